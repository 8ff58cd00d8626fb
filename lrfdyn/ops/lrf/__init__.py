"""Local receptive fields: dilated depth-wise 3x3 stencils over the token grid, one per dilation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from lrfdyn.errors import require
from lrfdyn.ops.dispatch import as_operator, autocast_dtype, require_shape, use_triton
from lrfdyn.ops.lrf.operator import lrf_operator
from lrfdyn.ops.lrf.reference import lrf_reference

__all__ = ["lrf", "lrf_reference"]

# The kernel unrolls a row, each token with its sum in registers.
WIDEST = 32


def lrf(
    x: Tensor, weight: Tensor, dilations: Sequence[int], residual: Tensor | None = None, packed: Tensor | None = None
) -> Tensor:
    """Local receptive fields: the sum over dilations of depth-wise 3x3 convolutions of `x`, added to `residual`.

    - `x`: Tokens on their grid, `[B, C, H, W]`. Zero padding keeps the size.
    - `weight`: `[len(dilations), C, 3, 3]`.
    - `dilations`: Integers >= 1; without any nothing is computed, and `residual` itself comes back (zeros if None).
    - `residual`: `[B, C, H, W]`.
    - `packed`: `[B / T, C, H, W]` bytes, bit t for time step t of the same spikes `x`, B = T * images: on a GPU
      these are kept for the backward pass instead of `x`.

    Returns `[B, C, H, W]`.

    Example:

        >>> x = torch.rand(2, 16, 14, 14)
        >>> lrf(x, torch.randn(2, 16, 3, 3), dilations=(3, 5), residual=x).shape
        torch.Size([2, 16, 14, 14])
    """
    require(x.dim() == 4, f"x: expected [B, C, H, W], got {list(x.shape)}")
    require(all(d >= 1 for d in dilations), f"dilations: expected integers >= 1, got {tuple(dilations)}")
    require_shape("weight", weight, (len(dilations), x.shape[1], 3, 3))
    require_shape("residual", residual, x.shape)
    if dilations and x.shape[3] <= WIDEST and use_triton(x, weight, residual):
        identity = residual is x
        x = x.to(autocast_dtype(x))
        given = (x, weight, tuple(dilations), None if identity else residual, identity, packed)
        if as_operator():
            return lrf_operator(*given)
        from lrfdyn.ops.lrf.triton import Lrf

        return Lrf.apply(*given)
    out = residual
    for stencil, dilation in zip(weight, dilations, strict=True):
        local = F.conv2d(x, stencil.unsqueeze(1), padding=dilation, dilation=dilation, groups=x.shape[1])
        out = local if out is None else out + local
    return torch.zeros_like(x) if out is None else out
