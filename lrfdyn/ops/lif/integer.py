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
    """`round(clamp(x, 0, D)) / D` (halves to even); the gradient is 1/D inside [0, D]. Without `normalize`
    neither is divided by D."""
    require(levels >= 1, f"levels: expected an integer >= 1, got {levels}")
    scale = 1 / levels if normalize else 1.0
    if use_triton(x):
        from lrfdyn.ops.lif.triton import integer_spike_triton

        return integer_spike_triton(x, levels, scale)
    return _IntegerSpike.apply(x, levels, scale)


def integer_to_binary(spikes: Tensor, levels: int = 4) -> Tensor:
    """`levels` binary steps `[levels, ...]` whose mean is the normalised integer spike `[...]`."""
    count = (spikes * levels).round()
    steps = torch.arange(levels, device=spikes.device).reshape(-1, *[1] * spikes.dim())
    return (count.unsqueeze(0) > steps).to(spikes.dtype)
