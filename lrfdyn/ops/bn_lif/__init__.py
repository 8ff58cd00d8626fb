"""Batch norm and the multi-step neuron as one operation."""

from __future__ import annotations

from torch import Tensor

from lrfdyn.errors import require
from lrfdyn.ops.bits import MOST_PACKED_STEPS, with_step_bits
from lrfdyn.ops.bn_lif.operator import bn_lif_by_operators
from lrfdyn.ops.bn_lif.reference import Integer, Norm, bn_lif_reference, joined
from lrfdyn.ops.dispatch import as_operator, require_shape, use_triton
from lrfdyn.ops.lif import Dynamics

__all__ = ["Integer", "Norm", "bn_lif", "bn_lif_reference", "joined"]


def bn_lif(
    x: Tensor,
    norm: Norm,
    dynamics: Dynamics | Integer,
    *,
    offset: Tensor | None = None,
    repeats: int = 1,
    residual: Tensor | None = None,
    pool: bool = False,
) -> Tensor:
    """Spikes of a neuron behind a batch norm, `residual + pool(SN(BN(x + offset)))`, as one operation.

    - `x`: Currents `[T, B, C, H, W]`, best in channels-last memory; `[1, B, C, H, W]` with `repeats` > 1.
    - `norm`: The batch norm over the C channels. In training its running statistics are updated in place.
    - `dynamics`: The neuron, or `Integer` for the integer spike.
    - `offset`: `[C]`, the bias of the convolution before. In training the norm takes it away again, so its gradient
      is zero and only the running mean sees it.
    - `repeats`: How many equal time steps a single one in `x` stands for.
    - `residual`: `[T, B, C, H, W]`, added to the spikes; not with `pool`.
    - `pool`: Halves the grid with a 3x3 max pool of stride 2 on the spikes.

    Returns `[T, B, C, H, W]`, T = `repeats` where that is more than 1, and half of H and W (rounded up) with `pool`.

    Example:

        >>> norm = Norm(torch.ones(8), torch.zeros(8), torch.zeros(8), torch.ones(8), training=True)
        >>> bn_lif(torch.randn(4, 2, 8, 6, 6), norm, Dynamics.lif(), pool=True).shape
        torch.Size([4, 2, 8, 3, 3])
    """
    require(x.dim() == 5, f"x: expected [T, B, C, H, W], got {list(x.shape)}")
    require(repeats == 1 or x.shape[0] == 1, f"repeats: expected one time step in x, got {x.shape[0]}")
    require(residual is None or not pool, "residual: cannot be added to pooled spikes")
    require_shape("residual", residual, (max(x.shape[0], repeats), *x.shape[1:]))
    fits = max(x.shape[0], repeats) <= MOST_PACKED_STEPS and not (pool and isinstance(dynamics, Integer))
    if fits and use_triton(x, norm.weight, residual):
        if as_operator():
            return with_step_bits(*bn_lif_by_operators(x, norm, dynamics, offset, repeats, residual, pool))
        from lrfdyn.ops.bn_lif.triton import BnLif

        return with_step_bits(*BnLif.apply(x, norm.weight, norm.bias, offset, residual, norm, dynamics, repeats, pool))
    return bn_lif_reference(x, norm, dynamics, offset=offset, repeats=repeats, residual=residual, pool=pool)
