"""A run that ends before its end, on purpose: with a checkpoint, so that nothing is lost."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from lrfdyn.errors import require

PARENT = "LRFDYN_PARENT"  # the process that a run must not outlive
TIME_IS_UP = 1  # as a reason, beside the numbers of SIGINT (2) and SIGTERM (15)


class Stopped(Exception):  # noqa: N818 (nothing failed)
    """The run ended early and can go on. `code` is what the process should exit with: 0 for a time that was set."""

    def __init__(self, step: int, steps: int, reason: int) -> None:
        why = "the time is up" if reason == TIME_IS_UP else signal.Signals(reason).name
        super().__init__(f"stopped at step {step} of {steps} ({why}); the same command with --resume auto goes on")
        self.code = 0 if reason == TIME_IS_UP else 128 + reason


class Stop:
    """When a run is to end early: after so many `minutes`, inside `listening` at a signal (Ctrl-C, or what a scheduler
    sends before it takes the machine away), or when the process is gone that the variable PARENT of the environment
    names. `reason` is 0 as long as it is to go on."""

    def __init__(self, minutes: float | None = None) -> None:
        require(minutes is None or minutes > 0, f"minutes: expected a positive number, got {minutes}")
        self.signal = 0
        self.parent = os.environ.get(PARENT)
        self.deadline = None if minutes is None else time.monotonic() + 60 * minutes

    @property
    def reason(self) -> int:
        if self.signal:
            return self.signal
        if self.parent is not None and os.getppid() != int(self.parent):
            return signal.SIGTERM
        return TIME_IS_UP if self.deadline is not None and time.monotonic() >= self.deadline else 0

    @contextmanager
    def listening(self) -> Iterator[None]:
        def note(number: int, frame: FrameType | None) -> None:
            if self.signal == number == signal.SIGINT:
                raise KeyboardInterrupt  # asked twice: at once
            self.signal = number

        before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
