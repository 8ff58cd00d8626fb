"""Convolution of spikes on a GPU. Its backward pass needs the spikes again, and keeps them as bits where they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lrfdyn.ops.dispatch import as_operator, first_derivative_only, transformed
from lrfdyn.ops.gradient_memory import learn_reference_counts, may_overwrite
from lrfdyn.ops.operators import operator, or_nothing


def channels_last(x: Tensor) -> Tensor:
    """`[T, B, C, H, W]` in the memory of `[T, B, H, W, C]`: itself where it is so."""
    rows = x.permute(0, 1, 3, 4, 2)
    return x if rows.is_contiguous() else rows.contiguous().permute(0, 1, 4, 2, 3)


def _rows(x: Tensor) -> Tensor:
    """The same as the matrix `[T * B * H * W, C]`."""
    return x.permute(0, 1, 3, 4, 2).flatten(0, 3)


def _is_pointwise(x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], groups: int) -> bool:
    """Pointwise is a matrix product in channels-last memory. But in float32 the library may compute convolutions in
    TF32, not matrix products: then it is several times as fast, and equal to the plain layer."""
    pointwise = weight.shape[2:] == (1, 1) and set(stride) == {1} and set(padding) == {0} and groups == 1
    return pointwise and not (x.is_cuda and x.dtype == torch.float32 and torch.backends.cudnn.allow_tf32)


def _convolve(
    x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], groups: int, pointwise: bool
) -> Tensor:
    """Of channels-last `x`."""
    if pointwise:
        return (_rows(x) @ weight.flatten(1).T).view(*x.shape[:2], *x.shape[3:], -1).permute(0, 1, 4, 2, 3)
    return F.conv2d(x.flatten(0, 1), weight, None, stride, padding, groups=groups).unflatten(0, x.shape[:2])


@dataclass(frozen=True)
class _Given:
    """What a backward pass must know of a convolution."""

    shape: torch.Size  # of x
    strides: tuple[int, ...]
    dtype: torch.dtype
    packed: bool
    pointwise: bool
    stride: Sequence[int]
    padding: Sequence[int]
    groups: int


def _gradients(
    given: _Given, saved: Tensor, weight: Tensor, grad: Tensor, for_x: bool, for_weight: bool,
    other: Tensor | None = None, mine: bool = False,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of x, to which `other` is added (in place, if it is `mine`), and of the weight, from a channels-last
    one. `saved` is x, or its bits if they are packed."""
    grad_x = grad_weight = None
    if given.packed and (for_weight or not given.pointwise):
        from lrfdyn.ops.bits_triton import unpack_steps

        saved = unpack_steps(saved, given.shape[0], given.dtype)
    if given.pointwise:
        rows, matrix = _rows(grad), weight.flatten(1)
        if for_weight:
            grad_weight = (rows.T @ _rows(saved)).view_as(weight)
        del saved  # unpacked spikes and the gradient of x together are the peak of memory in a step
        if for_x and other is not None and mine and (other.stride(), other.dtype) == (given.strides, grad.dtype):
            # What came along the other path is added inside the product.
            _rows(other).addmm_(rows, matrix)
            grad_x, other = other, None
        elif for_x:
            grad_x = torch.empty_strided(given.shape, given.strides, dtype=grad.dtype, device=grad.device)
            torch.mm(rows, matrix, out=_rows(grad_x))
    else:
        grad_x, grad_weight, _ = torch.ops.aten.convolution_backward(
            grad.flatten(0, 1), saved.flatten(0, 1), weight, None, given.stride, given.padding, (1, 1), False, (0, 0),
            given.groups, (for_x, for_weight, False),
        )  # fmt: skip
        grad_x = None if grad_x is None else grad_x.unflatten(0, given.shape[:2])
    if grad_x is not None and other is not None:
        grad_x = grad_x + other
    return grad_x, grad_weight


class _SpikeConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, packed: Tensor | None, weight: Tensor, stride: tuple[int, ...], padding: tuple[int, ...],
        groups: int, fork: bool,
    ) -> Any:  # fmt: skip
        learn_reference_counts()
        ctx.set_materialize_grads(False)  # a shortcut that nobody took has no gradient
        given, x = x, channels_last(x)
        pointwise = _is_pointwise(x, weight, stride, padding, groups)
        ctx.save_for_backward(x if packed is None else packed, weight)
        ctx.given = _Given(x.shape, x.stride(), x.dtype, packed is not None, pointwise, stride, padding, groups)
        y = _convolve(x, weight, stride, padding, groups, pointwise)
        return (y, given.view_as(given)) if fork else y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        first_derivative_only()
        saved, weight = ctx.saved_tensors
        other = grads[1] if len(grads) > 1 else None
        mine = other is not None and may_overwrite(grads[1])
        if grads[0] is None:
            return other, None, None, None, None, None, None
        for_x, _, for_weight = ctx.needs_input_grad[:3]
        grad = channels_last(grads[0])
        grad_x, grad_weight = _gradients(ctx.given, saved, weight, grad, for_x, for_weight, other, mine)
        return grad_x, None, grad_weight, None, None, None, None


CONVOLUTION = "SymInt[] stride, SymInt[] padding, SymInt groups"


def _new_rows(x: Tensor, channels: int, grid: Sequence[int]) -> Tensor:
    """Empty, with the steps and images of `x`, in channels-last memory."""
    return x.new_empty(*x.shape[:2], *grid, channels).permute(0, 1, 4, 2, 3)


@operator("spike_conv", f"(Tensor x, Tensor? packed, Tensor weight, {CONVOLUTION}) -> Tensor")
def conv_operator(
    x: Tensor, packed: Tensor | None, weight: Tensor, stride: Sequence[int], padding: Sequence[int], groups: int
) -> Tensor:
    """The convolution, in channels-last memory. `packed` are the bits of `x`, for the backward pass."""
    x = channels_last(x)
    pointwise = _is_pointwise(x, weight, stride, padding, groups)
    return channels_last(_convolve(x, weight, stride, padding, groups, pointwise))


@conv_operator.register_fake
def _(
    x: Tensor, packed: Tensor | None, weight: Tensor, stride: Sequence[int], padding: Sequence[int], groups: int
) -> Tensor:
    sides = zip(x.shape[3:], weight.shape[2:], padding, stride, strict=True)
    return _new_rows(x, weight.shape[0], [(n + 2 * around - kernel) // step + 1 for n, kernel, around, step in sides])


@operator(
    "spike_conv_backward",
    f"(Tensor saved, Tensor weight, Tensor grad, {CONVOLUTION}, bool packed, bool for_x, bool for_weight) "
    "-> (Tensor, Tensor)",
)
def conv_backward(
    saved: Tensor, weight: Tensor, grad: Tensor, stride: Sequence[int], padding: Sequence[int], groups: int,
    packed: bool, for_x: bool, for_weight: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of x, in channels-last memory, and of the weight in its own layout. `saved` is x, or its bits if they
    are `packed`."""
    saved, grad = saved if packed else channels_last(saved), channels_last(grad)
    new, pointwise = _new_input(saved, grad, packed), _is_pointwise(grad, weight, stride, padding, groups)
    given = _Given(new.shape, new.stride(), grad.dtype, packed, pointwise, stride, padding, groups)
    grad_x, grad_weight = _gradients(given, saved, weight, grad, for_x, for_weight)
    grad_x = None if grad_x is None else channels_last(grad_x)
    if grad_weight is not None and grad_weight.stride() != weight.stride():
        grad_weight = torch.empty_like(weight).copy_(grad_weight)
    return or_nothing(grad_x, grad), or_nothing(grad_weight, weight)


def _new_input(saved: Tensor, grad: Tensor, packed: bool) -> Tensor:
    """Empty, like the gradient of x."""
    _, channels, *grid = saved.shape if packed else saved.shape[1:]
    return _new_rows(grad, channels, grid)


@conv_backward.register_fake
def _(
    saved: Tensor, weight: Tensor, grad: Tensor, stride: Sequence[int], padding: Sequence[int], groups: int,
    packed: bool, for_x: bool, for_weight: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    grad_x = _new_input(saved, grad, packed) if for_x else None
    return or_nothing(grad_x, grad), or_nothing(torch.empty_like(weight) if for_weight else None, weight)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, packed, weight, *convolution = inputs
    ctx.save_for_backward(x if packed is None else packed, weight)
    ctx.given = (*convolution, packed is not None)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    for_x, _, for_weight, *_ = ctx.needs_input_grad
    grad_x, grad_weight = conv_backward(*ctx.saved_tensors, grad, *ctx.given, for_x, for_weight)
    return grad_x if for_x else None, None, grad_weight if for_weight else None, None, None, None


conv_operator.register_autograd(_differentiate, setup_context=_keep)


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
    if transformed():
        y = _convolve(x, weight, stride, padding, groups, pointwise=False)
        return (y, x) if fork else y
    if as_operator():  # which may not give back x; whoever compiles adds the two gradients
        y = conv_operator(x, packed, weight, stride, padding, groups)
        return (y, x) if fork else y
    return _SpikeConv.apply(x, packed, weight, stride, padding, groups, fork)
