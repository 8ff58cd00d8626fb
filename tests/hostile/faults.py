"""Faults of the disk and of the output, and signals."""

from __future__ import annotations

import builtins
import errno
import io
import os
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lrfdyn.cli import main
from tests.hostile.case import Case, check_run


@contextmanager
def failing_writes(case: Case, after: int, code: int) -> Iterator[None]:
    """From the write number `after` on, whatever opens, moves, makes or flushes a file in the case's folder fails."""
    count = 0
    real = {"open": io.open, "os_open": os.open, "replace": os.replace, "mkdir": os.mkdir, "fsync": os.fsync}

    def fail(path: Any) -> None:
        nonlocal count
        inside = isinstance(path, int) or str(case.folder) in os.path.abspath(os.fsdecode(path))
        if inside:
            count += 1
            if count > after:
                raise OSError(code, os.strerror(code), None if isinstance(path, int) else os.fspath(path))

    def opened(file: Any, mode: str = "r", *rest: Any, **how: Any) -> Any:
        if isinstance(file, (str, os.PathLike)) and set(mode) & set("wax+"):
            fail(file)
        return real["open"](file, mode, *rest, **how)

    def os_opened(path: Any, flags: int, *rest: Any, **how: Any) -> Any:
        if flags & os.O_CREAT:
            fail(path)
        return real["os_open"](path, flags, *rest, **how)

    def first(name: str) -> Callable[..., Any]:
        def change(path: Any, *rest: Any, **how: Any) -> Any:
            fail(path)
            return real[name](path, *rest, **how)

        return change

    try:
        builtins.open = io.open = opened  # type: ignore[assignment]
        os.open, os.replace, os.mkdir, os.fsync = os_opened, first("replace"), first("mkdir"), first("fsync")
        yield
    finally:
        builtins.open = io.open = real["open"]  # type: ignore[assignment]
        os.open, os.replace, os.mkdir, os.fsync = (real[name] for name in ("os_open", "replace", "mkdir", "fsync"))


@contextmanager
def small_files(size: int) -> Iterator[None]:
    """No file can grow beyond `size` bytes, whoever writes it: a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def faults(case: Case) -> None:
    draw, ground = case.draw, case.ground
    lines = [
        ("predict", ground / "images", "--model", ground / "saved", "--json", "p.json"),
        ("theory", "--tokens", 9, "--figures", draw.choice(["none", "svg"]), "--out", "t"),
        (
            "analyze",
            ground / "saved",
            "--images",
            2,
            "--batch-size",
            2,
            "--out",
            "a",
            "--device",
            "cpu",
            "--figures",
            "none",
        ),
        ("profile", ground / "saved", "--batch", 1, "--repeats", 1, "--device", "cpu", "--plot", "p.png"),
        ("predict", ground / "images", "--model", ground / "segmenter", "--task", "segmentation", "--out", "maps"),
        (
            "figure-segmentation",
            f"a={ground / 'segmenter'}",
            "--root",
            ground / "shapes",
            "--count",
            1,
            "--out",
            "f.png",
        ),
        ("train", ground / "recipe.yaml", "--out", "r"),
        ("train", ground / "recipe.yaml", "--out", "run", "--resume", "auto"),
        ("train", ground / "recipe.yaml", "--out", "run", "--restart"),
    ]
    line, how = draw.choice(lines), draw.randrange(3)
    if how == 2:
        output_fault(case)
        return
    if "run" in line:
        case.take("run")
        if "auto" in line:
            cut_run(case.folder / "run")
    if how == 0:
        after, code = draw.randrange(30), draw.choice([errno.ENOSPC, errno.EACCES, errno.EIO, errno.EROFS])
        case.notes.append(f"{errno.errorcode[code]} from write {after} on")
        with failing_writes(case, after, code):
            case.command(*line, codes=(0, 1, 2))
    else:
        size = draw.choice([0, 1, 100, 3000, 20000, 200000])
        case.notes.append(f"no file beyond {size} bytes")
        with small_files(size):
            case.command(*line, codes=(0, 1, 2))
    if line[0] == "train":
        case.notes.append("then the same again")
        if case.command("train", ground / "recipe.yaml", "--out", line[3], "--resume", "auto") == 0:
            check_run(case, case.folder / line[3])
        elif "auto" in line:
            case.find("what could be resumed before the fault cannot be after it")


def cut_run(run: Path) -> None:
    """As if the process had been killed after its last checkpoint but one."""
    newest = sorted((run / "checkpoints").glob("step-*.safetensors"))[-1]
    newest.unlink()
    for name in ("summary.json", "model"):
        shutil.rmtree(run / name) if (run / name).is_dir() else (run / name).unlink()


def child(case: Case, argv: Sequence[object], prepare: Callable[[], Any]) -> int:
    """Starts a command line in a process of its own whose output goes to the files out and err; `prepare` may change
    that. Returns its number."""
    sys.stdout.flush()
    sys.stderr.flush()
    case.notes.append(f"lrfdyn {' '.join(map(str, argv))}")
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        for number, name in ((1, "out"), (2, "err")):
            handle = os.open(case.folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(handle, number)
        prepare()
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.stdout = open(1, "w", closefd=False) if prepare is not _no_output else None  # type: ignore[assignment]  # noqa: SIM115
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # as lrfdyn._start does when all is imported
            code = main([str(part) for part in argv])
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else 1
        except BaseException:
            traceback.print_exc()
            code = 1
        try:  # as the interpreter does at its end
            if sys.stdout is not None and not sys.stdout.closed:
                sys.stdout.flush()
        except (OSError, ValueError):
            code = 120
    finally:
        os._exit(code)


def ended(pid: int) -> int:
    """The exit code, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _no_output() -> None:
    os.close(1)  # the interpreter makes None of its output then


def _full_output() -> None:
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)


def _left_output() -> None:
    read, write = os.pipe()
    os.close(read)
    os.dup2(write, 1)


def output_fault(case: Case) -> None:
    ground = case.ground
    line: tuple[Any, ...] = case.draw.choice([
        ("models",), ("models", "spikformer_4_384", "--json"), ("recipes",), ("recipes", "digits"), ("--help",),
        ("--version",),
        ("predict", ground / "images", "--model", ground / "saved"), ("evaluate", ground / "run", "--json"),
        ("predict", ground / "images", "--model", ground / "saved", "--json", "-"), ("train", ground / "recipe.yaml",
        "--dry-run"),
        ("theory", "--tokens", 9, "--figures", "none", "--out", "t"), ("sweep", ground / "sweep.yaml", "--dry-run"),
        ("profile", ground / "saved", "--batch", 1, "--repeats", 1, "--device", "cpu"), ("train",
        ground / "recipe.yaml", "--out", "r"),
    ])  # fmt: skip
    prepare = case.draw.choice([_no_output, _full_output, _left_output])
    case.notes.append(prepare.__name__.strip("_"))
    code = ended(child(case, line, prepare))
    err = (case.folder / "err").read_text(errors="replace")
    case.check_end([], code, "", err, codes=(0, 2, 141))
    if code == 0 and (case.folder / "r").exists():
        check_run(case, case.folder / "r")


def signals(case: Case) -> None:
    """A training that is stopped or killed, and goes on to the same end."""
    draw, run = case.draw, case.folder / "r"
    line = ("train", case.ground / "recipe.yaml", "--out", run, "--resume", "auto")
    for _ in range(draw.choice([1, 1, 2])):
        number, delay = draw.choice([signal.SIGINT, signal.SIGTERM, signal.SIGKILL, signal.SIGHUP]), draw.random() * 1.2
        pid = child(case, line, lambda: None)
        time.sleep(delay)
        case.notes.append(f"{number.name} after {delay:.2f} s")
        for _ in range(draw.choice([1, 1, 2, 3])):
            os.kill(pid, number)
            time.sleep(draw.random() * 0.1)
        code = ended(pid)
        err = (case.folder / "err").read_text(errors="replace") if (case.folder / "err").exists() else ""
        if code not in (0, 130, 143, 128 + number, -number) or "Traceback" in err:
            case.find(f"exit code {code} after {number.name}, stderr {err[-500:]!r}")
    if case.command(*line) == 0:
        check_run(case, run)
    else:
        case.find("the run cannot be resumed")
