"""Effective receptive field: how much every input pixel moves the output at the centre."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lrfdyn.models.base import SpikingModel


def receptive_field(model: SpikingModel, images: Tensor) -> Tensor:
    """|d centre output / d input|, summed over channels and averaged over images, `[H, W]`. Spikes pass their
    surrogate gradient."""
    model.eval()
    x = images.detach().clone().requires_grad_()
    features = model.forward_features(x)
    row, column = features.shape[-2] // 2, features.shape[-1] // 2
    (gradient,) = torch.autograd.grad(features[..., row, column].sum(), x)
    return gradient.abs().sum(-3).mean(0)


def share_inside(field: Tensor, centre: tuple[int, int]) -> list[dict[str, Any]]:
    """The share of `field` inside squares of side 1, 3, 5, ... around `centre`."""
    height, width = field.shape
    row = (torch.arange(height) - centre[0]).abs().unsqueeze(1)
    column = (torch.arange(width) - centre[1]).abs()
    ring = torch.maximum(row, column)
    total = field.sum()
    return [
        {"side": 2 * r + 1, "share": float(field[ring <= r].sum() / total) if total > 0 else 0.0}
        for r in range(int(ring.max()) + 1)
    ]


def receptive_field_record(model: SpikingModel, images: Tensor) -> dict[str, Any]:
    """The map, scaled to a maximum of 1, and its share inside growing squares."""
    field = receptive_field(model, images).double().cpu()
    stride = model.feature_info[-1].stride
    grid = (-(-field.shape[0] // stride), -(-field.shape[1] // stride))
    centre = (grid[0] // 2 * stride + stride // 2, grid[1] // 2 * stride + stride // 2)
    top = field.max()
    return {
        "map": (field / top if top > 0 else field).tolist(),
        "share_inside": share_inside(field, (min(centre[0], field.shape[0] - 1), min(centre[1], field.shape[1] - 1))),
    }
