"""The local receptive fields as registered operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lrfdyn.ops.operators import operator


@operator(
    "lrf", "(Tensor x, Tensor weight, int[] dilations, Tensor? residual, bool identity, Tensor? packed) -> Tensor"
)
def lrf_operator(
    x: Tensor, weight: Tensor, dilations: Sequence[int], residual: Tensor | None, identity: bool, packed: Tensor | None
) -> Tensor:
    """The stencils over `x`, with `identity` added to `x` itself. `packed` are the bits of `x`, for the backward
    pass."""
    from lrfdyn.ops.lrf.triton import adjacent, launch, taps_of

    return launch(*adjacent(x), taps_of(weight), tuple(dilations), residual, identity)


@lrf_operator.register_fake
def _(
    x: Tensor, weight: Tensor, dilations: Sequence[int], residual: Tensor | None, identity: bool, packed: Tensor | None
) -> Tensor:
    from lrfdyn.ops.lrf.triton import new_tokens

    return new_tokens(x, x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype))


@operator(
    "lrf_backward",
    "(Tensor x, Tensor weight, Tensor grad, int[] dilations, bool identity, bool packed, ScalarType dtype) "
    "-> (Tensor, Tensor)",
)
def lrf_backward(
    x: Tensor, weight: Tensor, grad: Tensor, dilations: Sequence[int], identity: bool, packed: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Gradients of the tokens, in `dtype`, and of the weights. `x` are the tokens, or their bits if they are
    `packed`."""
    from lrfdyn.ops.lrf.triton import launch_backward, taps_of

    grad = grad.contiguous(memory_format=torch.channels_last)
    given = (tuple(dilations), identity, packed, dtype, weight.dtype)
    grad_x, grad_weight = launch_backward(x, taps_of(weight), grad, *given)
    return grad_x, grad_weight.contiguous()


@lrf_backward.register_fake
def _(
    x: Tensor, weight: Tensor, grad: Tensor, dilations: Sequence[int], identity: bool, packed: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    from lrfdyn.ops.lrf.triton import new_tokens

    return new_tokens(grad, dtype), weight.new_empty(weight.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, dilations, _, identity, packed = inputs
    ctx.save_for_backward(x if packed is None else packed, weight)
    ctx.given = (dilations, identity, packed is not None, x.dtype)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    # Here already: the residual takes it in this layout too.
    grad = grad.contiguous(memory_format=torch.channels_last)
    grad_x, grad_weight = lrf_backward(*ctx.saved_tensors, grad, *ctx.given)
    return grad_x, grad_weight, None, grad if ctx.needs_input_grad[3] else None, None, None


lrf_operator.register_autograd(_differentiate, setup_context=_keep)
