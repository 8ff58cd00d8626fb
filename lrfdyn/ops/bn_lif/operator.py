"""Batch norm and neuron as registered operators.

The statistics are an operator of their own: they update those of the norm in place, and an operator that writes into
its arguments cannot have a gradient. The gradient of the other one is that of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lrfdyn.ops.bn_lif.reference import Integer, Norm, has_bits
from lrfdyn.ops.lif import operator as lif_operators
from lrfdyn.ops.lif.operator import NEURON
from lrfdyn.ops.lif.reference import Dynamics
from lrfdyn.ops.operators import operator, or_nothing
from lrfdyn.ops.spike_conv import channels_last

INTEGER, NO_NEURON = "integer", "none"  # in the place of a surrogate


def neuron_numbers(neuron: Dynamics | Integer | None) -> tuple[list[float], str]:
    """A neuron in types that a schema knows."""
    if neuron is None:
        return [], NO_NEURON
    if isinstance(neuron, Integer):
        return [float(neuron.levels), neuron.scale], INTEGER
    return lif_operators.neuron_numbers(neuron)


def neuron_of(numbers: Sequence[float], surrogate: str) -> Dynamics | Integer | None:
    """The neuron of these numbers."""
    if surrogate == NO_NEURON:
        return None
    if surrogate == INTEGER:
        return Integer(int(numbers[0]), numbers[1])
    return lif_operators.neuron_of(numbers, surrogate)


@operator(
    "batch_statistics",
    "(Tensor x, Tensor weight, Tensor? offset, Tensor(a!) running_mean, Tensor(b!) running_var, float momentum, "
    "float eps, int repeats) -> Tensor",
    mutates=("running_mean", "running_var"),
)
def batch_statistics(
    x: Tensor, weight: Tensor, offset: Tensor | None, running_mean: Tensor, running_var: Tensor, momentum: float,
    eps: float, repeats: int,
) -> Tensor:  # fmt: skip
    """Mean, deviation and scale of a batch, `[3, C]`; the running statistics are updated."""
    from lrfdyn.ops.bn_lif.triton import dense_rows, launch_statistics

    norm = Norm(weight, weight, running_mean, running_var, True, momentum, eps)
    return launch_statistics(dense_rows(x), norm, offset, repeats)


@operator(
    "running_statistics",
    "(Tensor x, Tensor weight, Tensor? offset, Tensor running_mean, Tensor running_var, float eps) -> Tensor",
)
def running_statistics(
    x: Tensor, weight: Tensor, offset: Tensor | None, running_mean: Tensor, running_var: Tensor, eps: float
) -> Tensor:
    """The same of the running statistics; of `x` only the shape matters."""
    from lrfdyn.ops.bn_lif.triton import dense_rows, launch_statistics

    norm = Norm(weight, weight, running_mean, running_var, False, eps=eps)
    return launch_statistics(dense_rows(x), norm, offset, 1)


@batch_statistics.register_fake
@running_statistics.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(3, x.shape[2], dtype=torch.float32)


@operator(
    "bn_lif",
    f"(Tensor x, Tensor stats, Tensor weight, Tensor bias, Tensor? offset, Tensor? residual, {NEURON}, int repeats, "
    "bool pool, bool pool_first, bool keep, bool training) -> (Tensor, Tensor, Tensor, Tensor)",
)
def bn_lif_operator(
    x: Tensor, stats: Tensor, weight: Tensor, bias: Tensor, offset: Tensor | None, residual: Tensor | None,
    neuron: Sequence[float], surrogate: str, repeats: int, pool: bool, pool_first: bool, keep: bool, training: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """What comes out, its bits, and for the backward pass the codes of the pool and x at its maxima. `weight` and
    `offset` are in the statistics already, and here for their gradients."""
    from lrfdyn.ops.bn_lif.triton import dense_rows, launch

    d = neuron_of(neuron, surrogate)
    out, bits, codes, maxima = launch(dense_rows(x), stats, bias, residual, d, repeats, pool, pool_first, keep)
    return out, or_nothing(bits, x, torch.uint8), or_nothing(codes, x, torch.int16), or_nothing(maxima, x)


@bn_lif_operator.register_fake
def _(
    x: Tensor, stats: Tensor, weight: Tensor, bias: Tensor, offset: Tensor | None, residual: Tensor | None,
    neuron: Sequence[float], surrogate: str, repeats: int, pool: bool, pool_first: bool, keep: bool, training: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from lrfdyn.ops.bn_lif.triton import half_grid, is_apart, new_codes, new_like

    d, time, grid = neuron_of(neuron, surrogate), x.shape[0] * repeats, half_grid(x) if pool or pool_first else None
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    bits = new_like(x, 1, grid, torch.uint8)[0] if keep and has_bits(d, residual) else None
    codes = maxima = None
    if keep and pool_first:
        apart = is_apart(d, repeats)
        codes, maxima = new_codes(x, 1 if apart else x.shape[0], apart), new_like(x, x.shape[0], grid)
    elif keep and pool:
        codes = new_codes(x, time)
    out = new_like(x, time, grid, dtype)
    return out, or_nothing(bits, x, torch.uint8), or_nothing(codes, x, torch.int16), or_nothing(maxima, x)


@operator(
    "bn_lif_backward",
    f"(Tensor x, Tensor stats, Tensor weight, Tensor bias, Tensor? codes, Tensor? maxima, Tensor grad, {NEURON}, "
    "int repeats, bool training) -> (Tensor, Tensor, Tensor)",
)
def bn_lif_backward(
    x: Tensor, stats: Tensor, weight: Tensor, bias: Tensor, codes: Tensor | None, maxima: Tensor | None, grad: Tensor,
    neuron: Sequence[float], surrogate: str, repeats: int, training: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, of the weight and of the bias."""
    from lrfdyn.ops.bn_lif.triton import dense_rows, launch_backward

    d, x, grad = neuron_of(neuron, surrogate), dense_rows(x), dense_rows(grad)
    return launch_backward(x, stats, weight, bias, codes, maxima, grad, d, repeats, training, mine=False)


@bn_lif_backward.register_fake
def _(x: Tensor, stats: Tensor, weight: Tensor, bias: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    from lrfdyn.ops.bn_lif.triton import new_like

    return new_like(x, x.shape[0]), torch.empty_like(weight), torch.empty_like(bias)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, stats, weight, bias, offset, _, *neuron, repeats, pool, pool_first, keep, training = inputs
    codes = output[2] if keep and (pool or pool_first) else None
    ctx.save_for_backward(x, stats, weight, bias, codes, output[3] if keep and pool_first else None)
    ctx.given = (*neuron, repeats, training)
    ctx.offset = None if offset is None else offset.shape


def _differentiate(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    from lrfdyn.ops.bn_lif.triton import offset_gradient

    saved = ctx.saved_tensors
    grad = channels_last(grad)  # the residual takes it in this layout too
    grad_x, grad_weight, grad_bias = bn_lif_backward(*saved, grad, *ctx.given)
    offset = None
    if ctx.needs_input_grad[4]:
        offset = offset_gradient(grad_bias, saved[1], ctx.given[-1], ctx.offset)
    residual = grad if ctx.needs_input_grad[5] else None
    return grad_x, None, grad_weight, grad_bias, offset, residual, None, None, None, None, None, None, None


bn_lif_operator.register_autograd(_differentiate, setup_context=_keep)


def bn_lif_by_operators(
    x: Tensor, norm: Norm, dynamics: Dynamics | Integer | None, offset: Tensor | None, repeats: int,
    residual: Tensor | None, pool: bool, pool_first: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """See `bn_lif`; what comes out, and the bits of spikes or None."""
    fixed = (x.detach(), norm.weight.detach(), None if offset is None else offset.detach())
    if norm.training:
        running = (norm.running_mean, norm.running_var, norm.momentum, norm.eps, repeats)
        stats = batch_statistics(*fixed, *running)
    else:
        stats = running_statistics(*fixed, norm.running_mean, norm.running_var, norm.eps)
    keep = torch.is_grad_enabled()
    out, bits, *_ = bn_lif_operator(
        x, stats, norm.weight, norm.bias, offset, residual, *neuron_numbers(dynamics), repeats, pool, pool_first, keep,
        norm.training,
    )  # fmt: skip
    return out, bits if keep and has_bits(dynamics, residual) else None
