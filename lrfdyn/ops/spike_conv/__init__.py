"""Convolution of spikes on a GPU. Its backward pass needs the spikes again, and keeps them as bits where they are."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["spike_conv"]


def _rows(x: Tensor) -> Tensor:
    """`[B, C, H, W]` in channels-last memory as the matrix `[B * H * W, C]`."""
    return x.permute(0, 2, 3, 1).reshape(-1, x.shape[1])


class _SpikeConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, packed: Tensor | None, weight: Tensor, stride: tuple[int, ...], padding: tuple[int, ...],
        groups: int,
    ) -> Tensor:  # fmt: skip
        pointwise = weight.shape[2:] == (1, 1) and set(stride) == {1} and set(padding) == {0} and groups == 1
        ctx.save_for_backward(x if packed is None else packed, weight)
        ctx.given = (x.shape[0], x.dtype, packed is not None, pointwise, stride, padding, groups)
        if pointwise:
            # A matrix product in channels-last memory.
            y = _rows(x) @ weight.flatten(1).T
            return y.view(x.shape[0], *x.shape[2:], -1).permute(0, 3, 1, 2)
        return F.conv2d(x, weight, None, stride, padding, groups=groups)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        saved, weight = ctx.saved_tensors
        images, dtype, packed, pointwise, stride, padding, groups = ctx.given
        grad = grads[0].contiguous(memory_format=torch.channels_last)
        for_x, _, for_weight = ctx.needs_input_grad[:3]
        if packed and (for_weight or not pointwise):
            from lrfdyn.ops.spike_conv.triton import unpack

            saved = unpack(saved, images // saved.shape[0], dtype)
        if pointwise:
            rows = _rows(grad)
            grad_weight = (rows.T @ _rows(saved)).view_as(weight) if for_weight else None
            del saved  # unpacked spikes and the gradient of x together are the peak of memory in a step
            grad_x = (rows @ weight.flatten(1)).view(images, *grad.shape[2:], -1).permute(0, 3, 1, 2) if for_x else None
        else:
            grad_x, grad_weight, _ = torch.ops.aten.convolution_backward(
                grad, saved, weight, None, stride, padding, (1, 1), False, (0, 0), groups, (for_x, for_weight, False)
            )
        return grad_x, None, grad_weight, None, None, None


def spike_conv(
    x: Tensor,
    weight: Tensor,
    stride: tuple[int, ...] = (1, 1),
    padding: tuple[int, ...] = (0, 0),
    groups: int = 1,
    packed: Tensor | None = None,
) -> Tensor:
    """`conv2d` without bias of `x` `[T * B, C, H, W]` in channels-last memory.

    `packed` `[B, C, H, W]` holds binary `x` as one byte per neuron, a bit per time step; then that is what is kept for
    the backward pass instead of `x`.
    """
    x = x.contiguous(memory_format=torch.channels_last)
    return _SpikeConv.apply(x, packed, weight, stride, padding, groups)
