"""The C of an integer model, compiled here and called from Python."""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lrfdyn.checks import checked
from lrfdyn.errors import LrfdynError, first_line, require, require_integer, shown
from lrfdyn.files import expanded, file_digest, read_json

COMPILERS = ("cc", "gcc", "clang")
OPTIONS = ("-O3", "-march=native")
MOST_THREADS = 64
KERNELS = ("lrfdyn_kernels.c", "lrfdyn_stage.c", "lrfdyn_conv.c")  # the same for every model
KERNEL_HEADERS = ("lrfdyn_kernels.h", "lrfdyn_maps.h", "lrfdyn_conv.h", "lrfdyn_sums.h")
SOURCES = ("lrfdyn_model.c", *KERNELS, "lrfdyn.h", "lrfdyn_model.h", *KERNEL_HEADERS)
MODEL_FILES = ("lrfdyn_model.c", "lrfdyn_model.h")  # of these nothing may change; kernels are anybody's to improve
LIBRARIES = "liblrfdyn-*.so"
SIZES_FIT = 1  # what lrfdyn_run_checked says of null pointers where the sizes are right


def find_compiler() -> str | None:
    """The C compiler that `CC` names, which may have options behind it, or the first that is installed."""
    wanted = os.environ.get("CC", "").split()[:1]
    return next(filter(None, map(shutil.which, wanted or COMPILERS)), None)


def all_options(options: Sequence[str] | None, threads: int) -> tuple[str, ...]:
    """With those of so many threads."""
    require_integer("threads", threads, 1, MOST_THREADS)
    return (*(OPTIONS if options is None else options), *(openmp(threads) if threads > 1 else ()))


def openmp(threads: int) -> tuple[str, ...]:
    return "-fopenmp", f"-DLRFDYN_THREADS={threads}"


def library_of(folder: Path, options: Sequence[str] | None = None, threads: int = 1) -> Path:
    """Where the compiled form lies. Its name depends on the processor, since what is compiled for one may not run on
    another, and on the source: a folder that was written anew has another library, in a process that holds the old one
    too, and whatever its files say about their age."""
    try:
        processor = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags"))
    except (OSError, StopIteration):
        processor = platform.processor()
    made_for = (platform.machine(), processor, all_options(options, threads))
    key = hashlib.sha256(repr(made_for).encode())
    for name in SOURCES:
        source = folder / name
        require(source.is_file(), f"model: {folder} is not a folder of C: it has no {name}")
        key.update(hashlib.sha256(source.read_bytes()).digest())
    return folder / LIBRARIES.replace("*", key.hexdigest()[:12])


@checked
def build_library(folder: Path, options: Sequence[str] | None = None, threads: int = 1) -> Path:
    """Compiles the folder of `write_c` to a shared library in it, unless there is one of the same source."""
    library, sources = library_of(folder, options, threads), [folder / name for name in SOURCES if name.endswith(".c")]
    if library.is_file():
        return library
    compiler = find_compiler()
    if compiler is None:
        missing = os.environ.get("CC") or " or ".join(COMPILERS)
        raise LrfdynError(f"runtime: native needs a C compiler, and there is no {missing}")
    made = library.with_suffix(f".{os.getpid()}.so")  # whole before it has its name
    flags = ["-std=c99", "-Wall", "-Wextra", "-Werror", *all_options(options, threads), "-fPIC", "-shared"]
    command = [compiler, *os.environ.get("CC", "").split()[1:], *flags, *map(str, sources), "-o", str(made)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            made.unlink(missing_ok=True)
            said = next(iter(done.stderr.strip().splitlines()), f"exit code {done.returncode}")
            what, how = ("model", "") if threads == 1 else ("threads", " with OpenMP, which more than one thread needs")
            raise LrfdynError(f"{what}: {command[0]} cannot compile {folder}{how} ({said})")
        made.replace(library)
    except OSError as error:
        raise LrfdynError(f"model: cannot compile {folder} ({error.strerror or error})") from None
    return library


class NativeModel:
    """An integer model that runs as compiled C: pictures of levels from 0 to 255, uint8 `[B, C, H, W]`, to logits
    `[B, classes]` in int32, one after the other. So many `threads` share the work on each and give the same bits; more
    than one needs a compiler with OpenMP. Its memory is static, so that one caller at a time can use it.

        write_c(integer, "model.c")
        logits = NativeModel("model.c", threads=2)(images)
    """

    @checked
    def __init__(self, folder: str | os.PathLike[str], options: Sequence[str] | None = None, threads: int = 1) -> None:
        path = expanded(folder, "model")
        facts = read_json(path / "lrfdyn.json", "model")
        require(isinstance(facts, dict), f"model: {path / 'lrfdyn.json'} is no JSON object")
        self.facts: dict[str, Any] = facts
        try:
            self.shape: tuple[int, ...] = tuple(map(int, facts["shape"]))
            self.classes, self.scale = int(facts["classes"]), float(facts["scale"])
            require(0 < self.scale < math.inf, "scale: expected a positive number")
        except (KeyError, OverflowError, TypeError, ValueError):
            raise LrfdynError(f"model: {path / 'lrfdyn.json'} does not say shape, classes and scale") from None
        digests = facts.get("sha256", {})  # folders of earlier versions have none
        require(isinstance(digests, dict), f"model: {path / 'lrfdyn.json'} does not say the checksums of its files")
        for name in filter(lambda name: name in digests and (path / name).is_file(), MODEL_FILES):
            same = digests[name] == file_digest(path / name)
            require(same, f"model: {path / name} is damaged or was changed (its checksum does not fit)")
        library = build_library(path, options, threads).resolve()
        try:
            self._library = ctypes.CDLL(str(library))
            self._run = self._library.lrfdyn_run_checked
        except (AttributeError, OSError) as error:
            said = first_line(error)
            raise LrfdynError(f"model: {library} cannot be used ({said}); without it, it is compiled anew") from None
        self._run.argtypes = [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_uint32]
        self._run.restype = ctypes.c_int
        size = math.prod(self.shape)
        counted = len(self.shape) == 3 and min(*self.shape, self.classes) >= 1 and max(size, self.classes) < 2**32
        fits = counted and self._run(None, size, None, self.classes) == SIZES_FIT
        require(fits, f"model: {path / 'lrfdyn.json'} says another shape or other classes than the model has")

    def __call__(self, images: np.ndarray) -> np.ndarray:
        require(isinstance(images, np.ndarray), f"images: expected an array, got {shown(images)}")
        known = images.ndim == 4 and images.shape[1:] == self.shape and images.dtype == np.uint8
        expected = f"expected levels in uint8 of [B, {', '.join(map(str, self.shape))}]"
        require(known, f"images: {expected}, got {images.dtype} of {list(images.shape)}")
        logits = np.empty((len(images), self.classes), np.int32)
        for picture, row in zip(np.ascontiguousarray(images), logits, strict=True):
            code = self._run(picture.ctypes.data, picture.size, row.ctypes.data, row.size)
            require(code == 0, f"model: its library returned the error {code}")
        return logits
