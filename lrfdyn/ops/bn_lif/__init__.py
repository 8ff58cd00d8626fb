"""Batch norm and the multi-step neuron as one operation."""

from __future__ import annotations

from typing import Any

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
    dynamics: Dynamics | Integer | None,
    *,
    offset: Tensor | None = None,
    repeats: int = 1,
    residual: Tensor | None = None,
    pool: bool = False,
    pool_first: bool = False,
) -> Tensor:
    """Spikes of a neuron behind a batch norm, `residual + pool(SN(BN(x + offset)))`, as one operation; or potentials.

    - `x`: Currents `[T, B, C, H, W]`, best in channels-last memory; `[1, B, C, H, W]` with `repeats` > 1.
    - `norm`: The batch norm over the C channels. In training its running statistics are updated in place.
    - `dynamics`: The neuron, `Integer` for the integer spike, or None for what the norm gives.
    - `offset`: `[C]`, the bias of the convolution before. In training the norm takes it away again, so its gradient
      is zero and only the running mean sees it.
    - `repeats`: How many equal time steps a single one in `x` stands for.
    - `residual`: Of the shape of what is returned, added to it; not with `pool`.
    - `pool`: Halves the grid with a 3x3 max pool of stride 2 on the spikes.
    - `pool_first`: The same between norm and neuron.

    Returns `[T, B, C, H, W]`, T = `repeats` where that is more than 1, and half of H and W (rounded up) with a pool.

    Example:

        >>> norm = Norm(torch.ones(8), torch.zeros(8), torch.zeros(8), torch.ones(8), training=True)
        >>> bn_lif(torch.randn(4, 2, 8, 6, 6), norm, Dynamics.lif(), pool=True).shape
        torch.Size([4, 2, 8, 3, 3])
    """
    require(x.dim() == 5, f"x: expected [T, B, C, H, W], got {list(x.shape)}")
    require(repeats >= 1, f"repeats: expected an integer >= 1, got {repeats}")
    require(repeats == 1 or x.shape[0] == 1, f"repeats: expected one time step in x, got {x.shape[0]}")
    # Kernels read and write as many channels as x has.
    for name in ("weight", "bias", "running_mean", "running_var"):
        require_shape(f"norm.{name}", getattr(norm, name), (x.shape[2],))
    require_shape("offset", offset, (x.shape[2],))
    one = norm.training and repeats * x.numel() == x.shape[2]
    require(not one, f"x: expected more than one value per channel in training, got {list(x.shape)}")
    require(not (pool and pool_first), "pool_first: expected one pool, got that behind the neuron too")
    if dynamics is None:  # then both pools are the same
        pool, pool_first = False, pool or pool_first
    require(residual is None or not pool, "residual: cannot be added to pooled spikes")
    steps, (height, width) = max(x.shape[0], repeats), x.shape[3:]
    grid = ((height + 1) // 2, (width + 1) // 2) if pool_first else (height, width)
    require_shape("residual", residual, (steps, *x.shape[1:3], *grid))
    fits = (dynamics is None or steps <= MOST_PACKED_STEPS) and not (pool and isinstance(dynamics, Integer))
    if fits and use_triton(x, norm.weight, residual):
        if as_operator():
            given = (offset, repeats, residual, pool, pool_first)
            return with_step_bits(*bn_lif_by_operators(x, norm, dynamics, *given))
        from lrfdyn.ops.bn_lif.triton import BnLif

        parameters = (norm.weight, norm.bias, offset, residual)
        return with_step_bits(*BnLif.apply(x, *parameters, norm, dynamics, repeats, pool, pool_first))
    options: dict[str, Any] = {"residual": residual, "pool": pool, "pool_first": pool_first}
    return bn_lif_reference(x, norm, dynamics, offset=offset, repeats=repeats, **options)
