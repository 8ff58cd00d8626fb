"""Files that are either whole or absent, folders, and the error stream."""

from __future__ import annotations

import csv
import errno
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

from lrfdyn.errors import LrfdynError, explain, require

# What a summary.json says in numbers.
MEASURES = {"top1", "miou", "seed", "parameters", "images_per_s", "wall_s"}
TEMPORARY = ".lrfdyn-"  # how the names of temporary folders begin


def write_atomic(path: Path, write: Callable[[Path], object]) -> None:
    """`write` to a temporary file beside `path`, flush it to the disk, then put it in place in one step. A device or a
    pipe is not replaced: an OSError."""
    if not path.is_symlink():
        plain_file(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder(path.parent) as folder:
        temporary = folder / path.name
        temporary.touch()
        mode = temporary.stat().st_mode
        try:
            write(temporary)
        except OSError as error:
            if error.errno:
                error.filename = str(path)  # and not the temporary one
            raise
        temporary.chmod(mode)  # as any file here: safetensors makes its own, which only its owner can read
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    with suppress(OSError), _opened(path.parent) as handle:  # some file systems cannot do this and need not
        os.fsync(handle)  # the new name survives the machine too


@contextmanager
def temporary_folder(place: Path) -> Iterator[Path]:
    """A folder in `place` for files that are being written. A lock tells it from that of a killed process."""
    folder, handle = _claim_new(place)
    try:
        yield folder
    finally:
        rmtree(folder, ignore_errors=True)
        os.close(handle)


def _claim_new(place: Path) -> tuple[Path, int]:
    """A new temporary folder and the handle that holds its lock. Before it is locked, `remove_abandoned` in another
    process may take it for an old one; then there is another."""
    while True:
        folder = Path(mkdtemp(prefix=TEMPORARY, dir=place))
        with suppress(FileNotFoundError):
            handle = os.open(folder, os.O_RDONLY)
            if _lock(handle) is not False and folder.exists():
                return folder, handle
            os.close(handle)


def remove_abandoned(place: Path, inside: str = "") -> None:
    """Removes what killed processes left in `place`, or in its folders that fit the pattern `inside`, of files that
    they were writing. What a live process writes stays."""
    for folder in place.glob(f"{inside}{TEMPORARY}*"):
        with suppress(OSError), _opened(folder) as handle:
            if _lock(handle):
                rmtree(folder, ignore_errors=True)


def _lock(handle: int) -> bool | None:
    """Whether an open folder is now this process's until it is closed; None where the system cannot say."""
    try:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        return None
    return True


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    handle = os.open(folder, os.O_RDONLY)
    try:
        yield handle
    finally:
        os.close(handle)


def write_table(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """A .csv file of rows with the same keys."""

    def write(file: Path) -> None:
        with file.open("w", newline="", encoding="utf-8") as text:
            table = csv.DictWriter(text, list(rows[0]))
            table.writeheader()
            table.writerows(rows)

    write_atomic(path, write)


def write_json(path: Path, value: Any) -> None:
    text = json.dumps(finite(value), indent=1, allow_nan=False) + "\n"
    write_atomic(path, lambda file: file.write_text(text, encoding="utf-8"))


def finite(value: Any) -> Any:
    """`value` with null for the numbers that JSON does not have (nan, inf)."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def expanded(path: str | os.PathLike[str], argument: str) -> Path:
    """The path with the folder of a user for `~` or `~name`; an error, also for one that the system refuses, names
    `argument`."""
    try:
        found = Path(path).expanduser()
        found.exists()
    except RuntimeError:
        raise LrfdynError(f"{argument}: {path} begins with a user that this machine does not know") from None
    except OSError as error:
        raise LrfdynError(f"{argument}: {explain(error)}") from None
    return found


def cache_folder() -> Path:
    """Where what is fetched or measured is kept: `LRFDYN_CACHE`, or `lrfdyn` where the system has its caches."""
    given, system = os.environ.get("LRFDYN_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if given:
        return expanded(given, "LRFDYN_CACHE")
    return expanded(system or "~/.cache", "XDG_CACHE_HOME") / "lrfdyn"


def plain_file(path: Path) -> Path:
    """The path, to be opened. An OSError where it is a pipe or a device, which may be waited for or never end."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is no file", str(path))
    return path


def file_digest(path: Path) -> str:
    """The SHA-256 of a file in hexadecimal."""
    with plain_file(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def text_lines(path: Path, argument: str) -> list[str]:
    """The lines of a text, without the spaces around them; an error names `argument` and the file."""
    try:
        return [line.strip() for line in plain_file(path).read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise LrfdynError(f"{argument}: cannot read {path} ({explain(error)})") from None


def read_json(path: Path, argument: str) -> dict[str, Any]:
    """The object in a JSON file; a damaged one is an error that names `argument` and the file."""
    try:
        return json_object(plain_file(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LrfdynError(f"{argument}: cannot read {path} ({explain(error)})") from None


def json_object(text: str) -> dict[str, Any]:
    """What a JSON text holds. Any other text is a ValueError."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    require(isinstance(value, dict), "it is no JSON object")
    return value


def read_summary(path: Path, argument: str) -> dict[str, Any]:
    """What a run says of itself in its summary.json, nothing where there is none; numbers are numbers."""
    summary = read_json(path, argument) if path.is_file() else {}
    for key in MEASURES & summary.keys():
        valid = summary[key] is None or _is_number(summary[key])
        require(valid, f"{argument}: {path}: {key}: expected a number, got {str(summary[key])[:40]!r}")
    return summary


def read_json_lines(path: Path, last: int | None = None) -> list[dict[str, Any]]:
    """The whole records of a log.jsonl, which need not be there, or of its `last` bytes: those of steps and epochs,
    with numbers. One that was cut short or edited into something else is left out."""
    records, text = [], b""
    if path.is_file():
        with path.open("rb") as file:
            file.seek(0 if last is None else max(0, file.seek(0, os.SEEK_END) - last))
            text = file.read()
    for line in text.decode("utf-8", errors="replace").splitlines():
        with suppress(ValueError):
            record = json_object(line)
            needed = {"step": {"step", "epoch", "loss"}, "epoch": {"step", "epoch", "train_loss"}}
            whole = needed.get(str(record.get("kind")), {""}) <= record.keys()
            optional = {"kind", *(k for k, v in record.items() if v is None and k not in ("step", "epoch"))}
            if whole and all(_is_number(v) for k, v in record.items() if k not in optional):
                records.append(record)
    return records


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@contextmanager
def sole_user(*folders: Path) -> Iterator[None]:
    """Makes the folders, and keeps them from all others that ask for them in this way. The system ends the claim with
    the process, however that ends; file systems without locks do not protect."""
    with ExitStack() as stack:
        for path in folders:
            free = _lock(stack.enter_context(_opened(writable_folder(path, "out")))) is not False
            require(free, f"out: another process is using {path}; wait for it, or take another folder")
            remove_abandoned(path, "*/")
        yield


@contextmanager
def in_turn(folder: Path) -> Iterator[None]:
    """One process after the other, of those that ask for a folder in this way."""
    with _opened(folder) as handle:
        while _lock(handle) is False:
            time.sleep(0.05)
        yield


def writable_folder(path: Path, argument: str) -> Path:
    """Makes the folder and proves that a file can be written in it; an error names `argument`."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        remove_abandoned(path)
        with temporary_folder(path):
            return path
    except (OSError, ValueError) as error:  # the latter of a path that no system has
        raise LrfdynError(f"{argument}: cannot write in the folder {path} ({explain(error)})") from None


@contextmanager
def discard_stderr() -> Iterator[None]:
    """Discards what is written to the error stream of the process, by libraries in C too."""
    kept = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
