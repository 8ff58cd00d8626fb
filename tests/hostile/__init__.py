"""Hostile cases, each a function of its category and a seed: wrong arguments, recipes, damaged files, command lines,
faults of the disk and of the output, signals. `tests/test_hostile.py` runs some of them and `tests/fuzz.py` many.

What is right is the same for all of them: the call works, or it fails with one short line. `run_case` returns what is
not: another exception, a traceback, a long message, output that is not JSON, a hang, a canary that was executed, or a
file of a run that was changed or lost.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from tests.hostile.api import api
from tests.hostile.case import Case, make_ground
from tests.hostile.commands import commands
from tests.hostile.faults import faults, signals
from tests.hostile.files import files
from tests.hostile.recipes import recipes

__all__ = ["CATEGORIES", "make_ground", "run_case"]

SECONDS = 30  # of computing that a case may take
PATIENCE = 300  # seconds by the clock, for what waits and does not compute
CATEGORIES: dict[str, Callable[[Case], None]] = {
    "api": api, "recipes": recipes, "files": files, "commands": commands, "faults": faults, "signals": signals,
}  # fmt: skip


LATE = "not done after"


class TimedOut(BaseException):
    """Not an `Exception`: what is tested must not catch it."""


def run_case(category: str, seed: int, ground: Path, seconds: float = SECONDS) -> list[str]:
    """Runs a case and returns what is wrong, each with what was done."""
    before, clocks = os.getcwd(), {signal.SIGPROF: signal.ITIMER_PROF, signal.SIGALRM: signal.ITIMER_REAL}
    kept = {number: signal.getsignal(number) for number in clocks}

    def ring(*_: object) -> None:
        raise TimedOut

    with tempfile.TemporaryDirectory(prefix="hostile-") as name:
        case = Case(ground, Path(name).resolve(), random.Random(f"{category} {seed}"))
        torch.manual_seed(seed)
        try:
            os.chdir(case.folder)
            for (number, clock), limit in zip(clocks.items(), (seconds, PATIENCE), strict=True):
                signal.signal(number, ring)
                signal.setitimer(clock, limit)
            CATEGORIES[category](case)
        except TimedOut as late:
            frames = [f for f in traceback.extract_tb(late.__traceback__) if f"{os.sep}lrfdyn{os.sep}" in f.filename]
            where = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
            case.find(f"{LATE} {seconds:g} s{where}")
        finally:
            for number, clock in clocks.items():
                signal.setitimer(clock, 0)
                signal.signal(number, kept[number])
            os.chdir(before)
        if case.canary.exists():
            case.find("the canary was executed")
        left = sorted(case.folder.rglob(".*.tmp"))
        if left and category not in ("signals", "files"):
            case.find(f"a temporary file is left: {left[0].name}")
    return [f"{'; '.join(case.notes)[:1500]}: {finding}" for finding in case.findings]
