"""Frames of recordings in one file, mapped into memory, that begins with JSON which says what they are made of."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lrfdyn.errors import LrfdynError, explain
from lrfdyn.files import in_turn, json_object, plain_file, writable_folder, write_atomic

FORMAT = 1  # of the file; one of another format is made anew
HEAD = 4096  # bytes in front of the frames
WIDTHS = ("uint8", "uint16", "uint32")  # of a count; the first that holds all of them

logger = logging.getLogger(__name__)


class TooManyError(Exception):
    """A pixel has more events in a frame than the width of a count holds."""


def cached_frames(path: Path, facts: Mapping[str, Any], make: Callable[[], Iterable[np.ndarray]]) -> np.ndarray:
    """The counts in `path` where they are made of `facts`, JSON that has their `shape`; else `make()` gives them in
    parts, and they are written first."""
    facts = {"format": FORMAT, **facts}
    while (frames := _mapped(path, facts)) is None:
        try:
            folder = writable_folder(path.parent, "cache")
        except LrfdynError as error:
            raise LrfdynError(f"{error}; data.options.cache names another") from None
        with in_turn(folder):
            if _mapped(path, facts) is None:  # no other process has made it meanwhile
                logger.warning("data: making the frames of %d recordings, once, in %s", facts["shape"][0], path)
                _write(path, facts, make)
    return frames


def _mapped(path: Path, facts: Mapping[str, Any]) -> np.ndarray | None:
    """The frames in a file, where it is whole and made of `facts`."""
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
                for counts in make():
                    if counts.max() > np.iinfo(width).max:
                        raise TooManyError
                    out.write(counts.astype(width).tobytes())

        try:
            write_atomic(path, write)
            break
        except TooManyError:
            continue
        except OSError as error:
            raise LrfdynError(f"cache: cannot write {path} ({explain(error)})") from None
