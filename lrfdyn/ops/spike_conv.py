"""Convolution of spikes on a GPU. Its backward pass needs the spikes again, and keeps them as bits where they are."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lrfdyn.ops.dispatch import first_derivative_only
from lrfdyn.ops.gradient_memory import learn_reference_counts, may_overwrite


def channels_last(x: Tensor) -> Tensor:
    """`[T, B, C, H, W]` in the memory of `[T, B, H, W, C]`: itself where it is so."""
    rows = x.permute(0, 1, 3, 4, 2)
    return x if rows.is_contiguous() else rows.contiguous().permute(0, 1, 4, 2, 3)


def _rows(x: Tensor) -> Tensor:
    """The same as the matrix `[T * B * H * W, C]`."""
    return x.permute(0, 1, 3, 4, 2).flatten(0, 3)


class _SpikeConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, packed: Tensor | None, weight: Tensor, stride: tuple[int, ...], padding: tuple[int, ...],
        groups: int, fork: bool,
    ) -> Any:  # fmt: skip
        learn_reference_counts()
        ctx.set_materialize_grads(False)  # a shortcut that nobody took has no gradient
        given, x = x, channels_last(x)
        # Pointwise is a matrix product in channels-last memory. But in float32 the library may compute convolutions in
        # TF32, not matrix products: then it is several times as fast, and equal to the plain layer.
        pointwise = weight.shape[2:] == (1, 1) and set(stride) == {1} and set(padding) == {0} and groups == 1
        pointwise = pointwise and not (x.is_cuda and x.dtype == torch.float32 and torch.backends.cudnn.allow_tf32)
        ctx.save_for_backward(x if packed is None else packed, weight)
        ctx.given = (x.shape, x.stride(), x.dtype, packed is not None, pointwise, stride, padding, groups)
        if pointwise:
            y = (_rows(x) @ weight.flatten(1).T).view(*x.shape[:2], *x.shape[3:], -1).permute(0, 1, 4, 2, 3)
        else:
            y = F.conv2d(x.flatten(0, 1), weight, None, stride, padding, groups=groups).unflatten(0, x.shape[:2])
        return (y, given.view_as(given)) if fork else y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        first_derivative_only()
        saved, weight = ctx.saved_tensors
        shape, strides, dtype, packed, pointwise, stride, padding, groups = ctx.given
        other = grads[1] if len(grads) > 1 else None
        mine = other is not None and may_overwrite(grads[1])
        if grads[0] is None:
            return other, None, None, None, None, None, None
        grad = channels_last(grads[0])
        for_x, _, for_weight = ctx.needs_input_grad[:3]
        grad_x = grad_weight = None
        if packed and (for_weight or not pointwise):
            from lrfdyn.ops.bits_triton import unpack_steps

            saved = unpack_steps(saved, shape[0], dtype)
        if pointwise:
            rows, matrix = _rows(grad), weight.flatten(1)
            if for_weight:
                grad_weight = (rows.T @ _rows(saved)).view_as(weight)
            del saved  # unpacked spikes and the gradient of x together are the peak of memory in a step
            if for_x and other is not None and mine and (other.stride(), other.dtype) == (strides, grad.dtype):
                # What came along the other path is added inside the product.
                _rows(other).addmm_(rows, matrix)
                grad_x, other = other, None
            elif for_x:
                grad_x = torch.empty_strided(shape, strides, dtype=grad.dtype, device=grad.device)
                torch.mm(rows, matrix, out=_rows(grad_x))
        else:
            grad_x, grad_weight, _ = torch.ops.aten.convolution_backward(
                grad.flatten(0, 1), saved.flatten(0, 1), weight, None, stride, padding, (1, 1), False, (0, 0), groups,
                (for_x, for_weight, False),
            )  # fmt: skip
            grad_x = None if grad_x is None else grad_x.unflatten(0, shape[:2])
        if grad_x is not None and other is not None:
            grad_x = grad_x + other
        return grad_x, None, grad_weight, None, None, None, None


def spike_conv(
    x: Tensor,
    weight: Tensor,
    stride: tuple[int, ...] = (1, 1),
    padding: tuple[int, ...] = (0, 0),
    groups: int = 1,
    packed: Tensor | None = None,
    fork: bool = False,
) -> Any:
    """The convolution without bias of every time step of `x`.

    - `x`: `[T, B, C, H, W]`, best in channels-last memory.
    - `weight`: `[D, C / groups, kernel, kernel]`.
    - `stride`, `padding`, `groups`: As in `torch.nn.functional.conv2d`.
    - `packed`: `[B, C, H, W]` bytes, bit t for time step t of binary `x`: kept for the backward pass instead of `x`.
    - `fork`: Whether `x` is a second output, for a shortcut around the layers that follow: the gradient of the
      shortcut is then added inside the product that makes the gradient of `x`.

    Returns `[T, B, D, H', W']`, or that and `x` with `fork`.

    Example:

        >>> spike_conv(torch.ones(4, 2, 8, 6, 6), torch.randn(16, 8, 3, 3), padding=(1, 1)).shape
        torch.Size([4, 2, 16, 6, 6])
    """
    return _SpikeConv.apply(x, packed, weight, stride, padding, groups, fork)
