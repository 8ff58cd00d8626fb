"""One class per image."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lrfdyn.data import Batch, DataSource
from lrfdyn.errors import require
from lrfdyn.models import SpikingModel, create_model
from lrfdyn.models.registry import model_class

if TYPE_CHECKING:
    from lrfdyn.training.config import TrainConfig
    from lrfdyn.training.tasks import Seen


class Classification:
    results: tuple[str, ...] = ("top1", "top5", "test_loss")
    headline = "top1"
    pipeline = "image-classification"

    def build(self, config: TrainConfig, num_classes: int, image_size: int, in_channels: int) -> SpikingModel:
        for key in ("backbone", "head"):
            given = getattr(config.model, key)
            require(not given, f"model.{key}: is for segmentation, and {config.data.name} is not, got {given!r}")
        facts: dict[str, Any] = {"num_classes": num_classes, "image_size": image_size, "in_channels": in_channels}
        if "image_size" not in model_class(config.model.name).options():
            del facts["image_size"]  # a host that takes any size
        return create_model(config.model.name, **{**facts, **config.model.arguments()})

    def check(self, model: SpikingModel, source: DataSource) -> None:
        pass

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits, targets)

    def targets(self, batch: Batch, dtype: torch.dtype) -> Tensor:
        return batch.targets.to(dtype)

    def blank_targets(self, logits: Tensor) -> Tensor:
        return torch.zeros(logits.shape)

    @torch.no_grad()
    def test(
        self,
        model: nn.Module,
        source: DataSource,
        batch_size: int,
        accelerator: Any,
        dtype: torch.dtype,
        seen: Seen | None = None,
    ) -> dict[str, Any]:
        """Accuracies in percent and loss over all test images."""
        model.eval()
        sums = torch.zeros(4, dtype=torch.float64, device=accelerator.device)  # loss, top 1, top 5, images
        batches = source.test_batches(
            batch_size=batch_size,
            rank=accelerator.process_index,
            world_size=accelerator.num_processes,
            device=accelerator.device,
        )
        for batch in batches:
            with accelerator.autocast():
                logits = model(batch.images.to(dtype))
            logits, labels = logits[: batch.count].double(), batch.labels[: batch.count]
            best = logits.topk(min(5, logits.shape[1])).indices == labels.unsqueeze(1)
            loss = F.cross_entropy(logits, labels, reduction="sum")
            sums += torch.stack(
                (loss, best[:, 0].sum(), best.sum(), torch.tensor(batch.count, device=loss.device))
            ).double()
            if seen is not None:
                seen(batch.count)
        loss_sum, top1, top5, count = accelerator.reduce(sums, "sum").tolist()
        require(count > 0, "data: expected at least one test image that can be read")
        return {"test_loss": loss_sum / count, "top1": 100 * top1 / count, "top5": 100 * top5 / count}
