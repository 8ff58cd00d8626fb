"""Effective receptive field: how much every input pixel moves the output at the centre."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lrfdyn.analysis.observe import as_batches
from lrfdyn.models.base import SpikingModel
from lrfdyn.ops.dispatch import plain_operations

DIGITS = 6  # of the map: more would only make files larger
LARGEST_MAP = 64  # cells a side; larger images are averaged in blocks


def receptive_field(
    model: SpikingModel, images: Tensor | Iterable[Tensor], on_batch: Callable[[int], None] = lambda _: None
) -> Tensor:
    """|d centre output / d input|, summed over channels and averaged over images, `[H, W]`. Spikes pass their
    surrogate gradient."""
    training = model.training
    model.eval()
    total, count = None, 0
    for batch in as_batches(images):
        x = batch.detach().clone().requires_grad_()
        with plain_operations():  # the kernels are made for training, where nobody asks for the gradient of the image
            features = model.forward_features(x)
            row, column = features.shape[-2] // 2, features.shape[-1] // 2
            (gradient,) = torch.autograd.grad(features[..., row, column].sum(), x)
        moved = gradient.abs().sum(-3).flatten(0, -3).sum(0)
        total = moved if total is None else total + moved
        count += batch.shape[-4]
        on_batch(batch.shape[-4])
    model.train(training)
    assert total is not None
    return total / count


def share_inside(field: Tensor, centre: tuple[int, int]) -> list[dict[str, Any]]:
    """The share of `field` inside squares of side 1, 3, 5, ... around `centre`."""
    height, width = field.shape
    row = (torch.arange(height) - centre[0]).abs().unsqueeze(1)
    column = (torch.arange(width) - centre[1]).abs()
    ring = torch.maximum(row, column)
    sums = torch.zeros(int(ring.max()) + 1, dtype=field.dtype).index_add_(0, ring.flatten(), field.flatten())
    total = field.sum()
    shares = sums.cumsum(0) / total if total > 0 else torch.zeros_like(sums)
    return [{"side": 2 * r + 1, "share": float(share)} for r, share in enumerate(shares)]


def receptive_field_record(
    model: SpikingModel, images: Tensor | Iterable[Tensor], on_batch: Callable[[int], None] = lambda _: None
) -> dict[str, Any]:
    """The map in cells of `pixels_per_cell`, scaled to a maximum of 1, its share inside growing squares, and the side
    of the square that holds half of it."""
    field = receptive_field(model, images, on_batch).double().cpu()
    stride = model.feature_info[-1].stride
    grid = (-(-field.shape[0] // stride), -(-field.shape[1] // stride))
    centre = (grid[0] // 2 * stride + stride // 2, grid[1] // 2 * stride + stride // 2)
    shares = share_inside(field, (min(centre[0], field.shape[0] - 1), min(centre[1], field.shape[1] - 1)))
    block = -(-max(field.shape) // LARGEST_MAP)
    cells = F.avg_pool2d(field[None, None], block, ceil_mode=True)[0, 0]
    scaled = cells / cells.max() if cells.max() > 0 else cells
    return {
        "pixels_per_cell": block,
        "map": [[round(value, DIGITS) for value in row] for row in scaled.tolist()],
        "share_inside": shares,
        "half_side": next((s["side"] for s in shares if s["share"] >= 0.5), None),
    }
