"""Who hears of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lrfdyn.training.trainer import Trainer


class Reporter:
    """Hears of a run; this one is silent."""

    def start(self, trainer: Trainer) -> None: ...

    def step(self, trainer: Trainer) -> None: ...

    def epoch(self, record: dict[str, Any]) -> None: ...

    def say(self, message: str) -> None: ...
