"""The C of an integer model, compiled here and called from Python."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lrfdyn.checks import checked
from lrfdyn.errors import LrfdynError, require
from lrfdyn.files import expanded, read_json

COMPILERS = ("cc", "gcc", "clang")
OPTIONS = ("-O3", "-march=native")
SOURCES = ("lrfdyn_model.c", "lrfdyn_kernels.c")


def find_compiler() -> str | None:
    """The C compiler that `CC` names, or the first that is installed."""
    wanted = os.environ.get("CC")
    return next(filter(None, map(shutil.which, [wanted] if wanted else COMPILERS)), None)


def library_of(folder: Path, options: Sequence[str] | None = None) -> Path:
    """Where the compiled form lies. Its name depends on the processor: what is compiled for one may not run on
    another."""
    try:
        processor = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags"))
    except (OSError, StopIteration):
        processor = platform.processor()
    key = hashlib.sha256(
        repr((platform.machine(), processor, tuple(OPTIONS if options is None else options))).encode()
    ).hexdigest()
    return folder / f"liblrfdyn-{key[:12]}.so"


@checked
def build_library(folder: Path, options: Sequence[str] | None = None) -> Path:
    """Compiles the folder of `write_c` to a shared library in it, unless there is one that is newer than its source."""
    library, sources = library_of(folder, options), [folder / name for name in SOURCES]
    for source in sources:
        require(source.is_file(), f"model: {folder} is not a folder of C: it has no {source.name}")
    if library.is_file() and all(library.stat().st_mtime > source.stat().st_mtime for source in sources):
        return library
    compiler = find_compiler()
    if compiler is None:
        missing = os.environ.get("CC") or " or ".join(COMPILERS)
        raise LrfdynError(f"runtime: native needs a C compiler, and there is no {missing}")
    made = library.with_suffix(f".{os.getpid()}.so")  # whole before it has its name
    flags = ["-std=c99", "-Wall", "-Wextra", "-Werror", *(OPTIONS if options is None else options), "-fPIC", "-shared"]
    command = [compiler, *flags, *map(str, sources), "-o", str(made)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            made.unlink(missing_ok=True)
            said = next(iter(done.stderr.strip().splitlines()), f"exit code {done.returncode}")
            raise LrfdynError(f"model: {command[0]} cannot compile {folder} ({said})")
        made.replace(library)
    except OSError as error:
        raise LrfdynError(f"model: cannot compile {folder} ({error.strerror or error})") from None
    return library


class NativeModel:
    """An integer model that runs as compiled C: pictures of levels from 0 to 255, uint8 `[B, C, H, W]`, to logits
    `[B, classes]` in int32, one after the other on one core. Its memory is static, so that one thread at a time can
    use it.

        write_c(integer, "model_c")
        logits = NativeModel("model_c")(images)
    """

    @checked
    def __init__(self, folder: str | os.PathLike[str], options: Sequence[str] | None = None) -> None:
        path = expanded(folder, "model")
        facts = read_json(path / "lrfdyn.json", "model")
        require(isinstance(facts, dict), f"model: {path / 'lrfdyn.json'} is no JSON object")
        self.facts: dict[str, Any] = facts
        try:
            self.shape: tuple[int, ...] = tuple(map(int, facts["shape"]))
            self.classes, self.scale = int(facts["classes"]), float(facts["scale"])
        except (KeyError, TypeError, ValueError):
            raise LrfdynError(f"model: {path / 'lrfdyn.json'} does not say shape, classes and scale") from None
        self._library = ctypes.CDLL(str(build_library(path, options).resolve()))
        self._run = self._library.lrfdyn_run_checked
        self._run.argtypes = [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_uint32]
        self._run.restype = ctypes.c_int

    def __call__(self, images: np.ndarray) -> np.ndarray:
        known = images.ndim == 4 and images.shape[1:] == self.shape and images.dtype == np.uint8
        expected = f"expected levels in uint8 of [B, {', '.join(map(str, self.shape))}]"
        require(known, f"images: {expected}, got {images.dtype} of {list(images.shape)}")
        logits = np.empty((len(images), self.classes), np.int32)
        for picture, row in zip(np.ascontiguousarray(images), logits, strict=True):
            code = self._run(picture.ctypes.data, picture.size, row.ctypes.data, row.size)
            require(code == 0, f"model: its library takes pictures of another size than its lrfdyn.json says ({code})")
        return logits
