"""The definition: every tap of every stencil is a shifted copy of the grid, zero outside."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def lrf_reference(x: Tensor, weight: Tensor, dilations: Sequence[int]) -> Tensor:
    """Y[i, j] = sum_d sum_{a, b in -1..1} r_d[a, b] X[i + a d, j + b d], per channel of `x` `[B, C, H, W]`."""
    height, width = x.shape[-2:]
    out = torch.zeros_like(x)
    for stencil, d in zip(weight, dilations, strict=True):
        padded = F.pad(x, (d, d, d, d))
        for a in range(3):
            for b in range(3):
                shifted = padded[..., a * d : a * d + height, b * d : b * d + width]
                out = out + stencil[:, a, b, None, None] * shifted
    return out
