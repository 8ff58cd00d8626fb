"""What a network is trained for: its loss, its targets and how it is tested. The data set decides which it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from lrfdyn.data import Batch, DataSource, data_class

if TYPE_CHECKING:
    from lrfdyn.models import SpikingModel
    from lrfdyn.training.config import TrainConfig

Seen = Callable[[int], None]


class Task(Protocol):
    results: tuple[str, ...]  # numbers of a test that a summary keeps, percent but for the loss
    headline: str  # the one of them that a progress bar shows
    pipeline: str  # the hub's word for it

    def build(self, config: TrainConfig, num_classes: int, image_size: int, in_channels: int) -> SpikingModel: ...

    def check(self, model: SpikingModel, source: DataSource) -> None:
        """Raises what a test would, before the training that comes first."""

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor: ...

    def targets(self, batch: Batch, dtype: torch.dtype) -> Tensor: ...

    def blank_targets(self, logits: Tensor) -> Tensor:
        """Targets of the right shape and kind, to count with."""

    def test(
        self,
        model: nn.Module,
        source: DataSource,
        batch_size: int,
        accelerator: Any,
        dtype: torch.dtype,
        seen: Seen | None = None,
    ) -> dict[str, Any]:
        """`results` over all test images and processes, and whatever else is worth keeping. `seen` hears of every
        batch how many images this process has tested with it."""


def task_of(data: str) -> Task:
    """Of a data set, by its name."""
    if data_class(data).task == "segmentation":
        from lrfdyn.segmentation.task import Segmentation

        return Segmentation()
    from lrfdyn.training.classification import Classification

    return Classification()


NAMES = {"top1": "top-1", "top5": "top-5", "miou": "mIoU", "mean_accuracy": "mean accuracy",
         "pixel_accuracy": "pixel accuracy"}  # fmt: skip


def shown_results(record: dict[str, Any], num_classes: int) -> dict[str, str]:
    """The numbers of a test as a user reads them. Five classes or fewer have no top-5, which would be 100 %."""
    hidden = {"top5"} if num_classes <= 5 else set()
    return {name: f"{record[key]:.2f} %" for key, name in NAMES.items() if key in record and key not in hidden}


def describe_results(record: dict[str, Any], num_classes: int) -> str:
    """The same in one line."""
    return ", ".join(f"{name} {text}" for name, text in shown_results(record, num_classes).items())
