"""The integer spike of SDT-V3: D binary steps at once while training, no state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lrfdyn.errors import require
from lrfdyn.ops.dispatch import use_triton


class _IntegerSpike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, levels: int, scale: float) -> Tensor:
        if ctx.needs_input_grad[0]:  # the mask is a good part of the whole where nobody asks for it
            ctx.save_for_backward((x >= 0) & (x <= levels))
        ctx.scale = scale
        return x.clamp(0, levels).round() * scale

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (inside,) = ctx.saved_tensors
        return grads[0] * inside * ctx.scale, None, None


def integer_spike(x: Tensor, levels: int = 4, normalize: bool = True) -> Tensor:
    """The integer spike of SDT-V3: `round(clamp(x, 0, D)) / D`, halves to even, D = `levels`.

    The gradient is 1/D where 0 <= x <= D and 0 elsewhere. Without `normalize` neither is divided by D.

    - `x`: Currents of any shape.
    - `levels`: D, the largest integer.
    - `normalize`: Whether the result is divided by D.

    Returns a tensor of the shape and type of `x`.

    Example:

        >>> integer_spike(torch.tensor([-1.0, 0.6, 2.2, 9.0])).tolist()
        [0.0, 0.25, 0.5, 1.0]
    """
    require(levels >= 1, f"levels: expected an integer >= 1, got {levels}")
    scale = 1 / levels if normalize else 1.0
    if use_triton(x):
        from lrfdyn.ops.lif.triton import integer_spike_triton

        return integer_spike_triton(x, levels, scale)
    return _IntegerSpike.apply(x, levels, scale)


def integer_to_binary(spikes: Tensor, levels: int = 4) -> Tensor:
    """The binary steps `[levels, ...]` whose mean is the normalised integer spike `spikes` `[...]`."""
    count = (spikes * levels).round()
    steps = torch.arange(levels, device=spikes.device).reshape(-1, *[1] * spikes.dim())
    return (count.unsqueeze(0) > steps).to(spikes.dtype)
