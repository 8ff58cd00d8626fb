"""The dendrites as registered operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lrfdyn.ops.operators import operator, or_nothing

MODES = "Tensor decay, Tensor? frequency, Tensor weight"


@operator(
    "dendrite",
    f"(Tensor u, {MODES}, ScalarType dtype, Tensor? packed, Tensor? state, bool keep_state) -> (Tensor, Tensor)",
)
def dendrite_operator(
    u: Tensor, decay: Tensor, frequency: Tensor | None, weight: Tensor, dtype: torch.dtype, packed: Tensor | None,
    state: Tensor | None, keep_state: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Potentials in `dtype`, and the last state. `packed` are the bits of `u`, for the backward pass."""
    from lrfdyn.ops.dendrite.triton import as_read, launch

    decay, frequency, weight, state = as_read(decay, frequency, weight, state)
    soma, last = launch(u.contiguous(), decay, frequency, weight, dtype, state, keep_state)
    return soma, or_nothing(last, weight)


@dendrite_operator.register_fake
def _(
    u: Tensor, decay: Tensor, frequency: Tensor | None, weight: Tensor, dtype: torch.dtype, packed: Tensor | None,
    state: Tensor | None, keep_state: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    (batch, _, channels), modes = u.shape, weight.shape[-2]
    shape = (batch, channels, modes, 2) if keep_state else (0,)
    return u.new_empty(u.shape, dtype=dtype), weight.new_empty(shape, dtype=torch.float32)


@operator(
    "dendrite_backward",
    f"(Tensor u, {MODES}, Tensor grad, bool packed, ScalarType dtype) -> (Tensor, Tensor, Tensor, Tensor)",
)
def dendrite_backward(
    u: Tensor, decay: Tensor, frequency: Tensor | None, weight: Tensor, grad: Tensor, packed: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the tokens, in `dtype`, and of the modes in float32. `u` are the tokens, or their bits if they are
    `packed`."""
    from lrfdyn.ops.dendrite.triton import as_read, launch_backward

    decay, frequency, weight = as_read(decay, frequency, weight)
    given = (u.contiguous(), decay, frequency, weight, grad, packed, dtype)
    grad_u, grad_decay, grad_frequency, grad_weight = launch_backward(*given)
    return grad_u, grad_decay, or_nothing(grad_frequency, weight), grad_weight


@dendrite_backward.register_fake
def _(
    u: Tensor, decay: Tensor, frequency: Tensor | None, weight: Tensor, grad: Tensor, packed: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def new(shape: Any) -> Tensor:
        return weight.new_empty(shape, dtype=torch.float32)

    grads = new(decay.shape), new((0,) if frequency is None else frequency.shape), new(weight.shape)
    return grad.new_empty(grad.shape, dtype=dtype), *grads


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    u, decay, frequency, weight, _, packed, *_ = inputs
    ctx.save_for_backward(u if packed is None else packed, decay, frequency, weight)
    ctx.given = (packed is not None, u.dtype)


def _differentiate(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    grad_u, decay, frequency, weight = dendrite_backward(*saved, grad, *ctx.given)
    return grad_u, decay, None if saved[2] is None else frequency, weight, None, None, None, None


dendrite_operator.register_autograd(_differentiate, setup_context=_keep)
