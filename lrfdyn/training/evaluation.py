"""Accuracy on the test images, over all processes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lrfdyn.data import DataSource
from lrfdyn.errors import require
from lrfdyn.training.build import build_data, data_model
from lrfdyn.training.config import TrainConfig
from lrfdyn.training.processes import build_accelerator
from lrfdyn.weights import check_fit


@torch.no_grad()
def test(
    model: nn.Module, source: DataSource, batch_size: int, accelerator: Any, dtype: torch.dtype
) -> dict[str, float]:
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
    loss_sum, top1, top5, count = accelerator.reduce(sums, "sum").tolist()
    require(count > 0, "data: expected at least one test image that can be read")
    return {"test_loss": loss_sum / count, "top1": 100 * top1 / count, "top5": 100 * top5 / count}


def evaluate_weights(config: TrainConfig, weights: Mapping[str, Tensor], name: Path) -> dict[str, float]:
    """The accuracy of weights in the model and on the data of a configuration."""
    accelerator = build_accelerator(config.run)
    source = build_data(config)
    model = data_model(config, source)
    check_fit(name, model, weights)
    model.load_state_dict(dict(weights))
    dtype = torch.float64 if config.run.precision == "fp64" else torch.float32
    model.to(accelerator.device, dtype)
    return test(model, source, config.run.test_batch_size, accelerator, dtype)
