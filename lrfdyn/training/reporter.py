"""Who hears of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lrfdyn.training.trainer import Trainer


class Reporter:
    """Hears of a run; this one is silent."""

    def start(self, trainer: Trainer) -> None:
        """Before the first step."""

    def step(self, trainer: Trainer) -> None:
        """After every step."""

    def epoch(self, record: dict[str, Any]) -> None:
        """After every epoch, with its line of the log."""

    def say(self, message: str) -> None:
        """A line for the reader."""
