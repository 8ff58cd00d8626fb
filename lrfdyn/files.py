"""Files that are either whole or absent, folders, and the error stream."""

from __future__ import annotations

import csv
import errno
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lrfdyn.errors import LrfdynError, explain, require

# What a summary.json says in numbers.
MEASURES = {"top1", "miou", "seed", "parameters", "images_per_s", "wall_s"}


def write_atomic(path: Path, write: Callable[[Path], object]) -> None:
    """`write` to a temporary file beside `path`, flush it to the disk, then put it in place in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode
        write(temporary)
        temporary.chmod(mode)  # as any file here: safetensors makes its own, which only its owner can read
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        with suppress(OSError), _opened(path.parent) as folder:  # some file systems cannot do this and need not
            os.fsync(folder)  # the new name survives the machine too
    finally:
        temporary.unlink(missing_ok=True)


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
    """The path with the folder of a user for `~` or `~name`; an error names `argument`."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise LrfdynError(f"{argument}: {path} begins with a user that this machine does not know") from None


def plain_file(path: Path) -> Path:
    """The path, to be opened. An OSError where it is a pipe or a device, which may be waited for or never end."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is no file", str(path))
    return path


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


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The whole records of a log.jsonl, which need not be there: those of steps and epochs, with numbers. One that was
    cut short or edited into something else is left out."""
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        with suppress(ValueError):
            record = json_object(line)
            needed = {"step": {"step", "epoch", "loss"}, "epoch": {"step", "epoch", "train_loss"}}
            whole = needed.get(str(record.get("kind")), {""}) <= record.keys()
            if whole and all(map(_is_number, (v for k, v in record.items() if k != "kind" and v is not None))):
                records.append(record)
    return records


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@contextmanager
def sole_user(path: Path) -> Iterator[None]:
    """Makes the folder, and keeps it from other processes that ask for it in this way. The system ends the claim with
    the process, however that ends; file systems without locks do not protect."""
    with _opened(writable_folder(path, "out")) as handle:
        try:
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LrfdynError(f"out: another process is using {path}; wait for it, or take another folder") from None
        except (ImportError, OSError):
            pass
        yield


def writable_folder(path: Path, argument: str) -> Path:
    """Makes the folder and proves that a file can be written in it; an error names `argument`."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        write_atomic(path / ".writable", lambda file: file.write_bytes(b""))
        (path / ".writable").unlink()
    except OSError as error:
        raise LrfdynError(f"{argument}: cannot write in the folder {path} ({error.strerror})") from None
    return path


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
