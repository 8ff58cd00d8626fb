"""What is made of many files once, in one file that is mapped into memory and begins with JSON which says of what."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lrfdyn.errors import LrfdynError, explain, require
from lrfdyn.files import expanded, in_turn, json_object, plain_file, writable_folder, write_atomic

FORMAT = 1  # of the file; one of another format is made anew
HEAD = 4096  # bytes in front of the numbers
WIDTHS = ("uint8", "uint16", "uint32")  # of a number; the first that holds all of them

logger = logging.getLogger(__name__)


class TooManyError(Exception):
    """A number is larger than the width holds."""


def fingerprint(root: Path, files: Iterable[tuple[Any, ...]], what: str) -> str:
    """A hash of the name, size and time of every file, and of what stands behind its path; `what` is for errors."""
    text = hashlib.sha256()
    try:
        for path, *rest in files:
            about, name = os.stat(path), path.removeprefix(str(root))
            text.update(repr((name, about.st_size, about.st_mtime_ns, *rest)).encode(errors="replace"))
    except OSError as error:
        raise LrfdynError(f"data: cannot read the {what} {error.filename} ({error.strerror})") from None
    return text.hexdigest()


def cache_folder(given: str | None, usual: Path) -> Path:
    """The folder of an option `cache`, or the usual one."""
    text = given is None or isinstance(given, str)
    require(text, f"cache: expected the path of a folder, got {given!r}")
    return (usual if given is None else expanded(given, "cache")).absolute()


def cached_array(
    path: Path, facts: Mapping[str, Any], make: Callable[[], Iterable[np.ndarray]], what: str
) -> np.ndarray:
    """The numbers in `path` where they are made of `facts`, JSON that has their `shape`; else `make()` gives them in
    parts, and they are written first. `what` they are is for the message."""
    facts = {"format": FORMAT, **facts}
    while (array := _mapped(path, facts)) is None:
        try:
            folder = writable_folder(path.parent, "cache")
        except LrfdynError as error:
            raise LrfdynError(f"{error}; data.options.cache names another") from None
        with in_turn(folder):
            if _mapped(path, facts) is None:  # no other process has made it meanwhile
                logger.warning("data: making the %s, once, in %s", what, path)
                _write(path, facts, make)
    return array


def _mapped(path: Path, facts: Mapping[str, Any]) -> np.ndarray | None:
    """The numbers in a file, where it is whole and made of `facts`."""
    try:
        with plain_file(path).open("rb") as file:
            stated = json_object(file.read(HEAD).decode())
        width = np.dtype(stated.pop("width", ""))
        whole = path.stat().st_size == HEAD + math.prod(facts["shape"]) * width.itemsize
        known = stated == facts and whole and width.name in WIDTHS
        return np.memmap(path, width, "r", HEAD, tuple(facts["shape"])) if known else None
    except (OSError, TypeError, ValueError):
        return None


def _write(path: Path, facts: Mapping[str, Any], make: Callable[[], Iterable[np.ndarray]]) -> None:
    for width in WIDTHS:

        def write(file: Path, width: str = width) -> None:
            with file.open("wb") as out:
                out.write(json.dumps({**facts, "width": width}).encode().ljust(HEAD))
                for part in make():
                    if part.max() > np.iinfo(width).max:
                        raise TooManyError
                    out.write(part.astype(width, copy=False).tobytes())

        try:
            write_atomic(path, write)
            break
        except TooManyError:
            continue
        except OSError as error:
            raise LrfdynError(f"cache: cannot write {path} ({explain(error)})") from None
    else:
        raise LrfdynError(f"cache: {path} cannot hold numbers above {np.iinfo(WIDTHS[-1]).max}")
