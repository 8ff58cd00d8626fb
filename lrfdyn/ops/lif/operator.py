"""The neurons as registered operators."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lrfdyn.ops.lif.reference import Dynamics
from lrfdyn.ops.operators import operator, or_nothing

NEURON = "float[] neuron, str surrogate"


def neuron_numbers(d: Dynamics) -> tuple[list[float], str]:
    """A neuron in types that a schema knows: its numbers in their order, and its surrogate."""
    numbers = [d.leak, d.gain, d.decay, d.threshold, d.v_reset, d.strict, d.alpha, d.detach_reset]
    return [float(number) for number in numbers], d.surrogate


@cache
def _dynamics(numbers: tuple[float, ...], surrogate: str) -> Dynamics:
    leak, gain, decay, threshold, v_reset, strict, alpha, detach_reset = numbers
    return Dynamics(leak, gain, decay, threshold, v_reset, bool(strict), surrogate, alpha, bool(detach_reset))


def neuron_of(numbers: Sequence[float], surrogate: str) -> Dynamics:
    """The neuron of these numbers."""
    return _dynamics(tuple(numbers), surrogate)


@operator("lif", f"(Tensor x, Tensor? h0, {NEURON}, bool keep_state, bool pack) -> (Tensor, Tensor, Tensor)")
def lif_operator(
    x: Tensor, h0: Tensor | None, neuron: Sequence[float], surrogate: str, keep_state: bool, pack: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Spikes, the last membrane and the bits of the spikes."""
    from lrfdyn.ops.lif.triton import laid_out, launch

    spikes, state, bits = launch(*laid_out(x, h0), neuron_of(neuron, surrogate), keep_state, pack)
    return spikes, or_nothing(state, x), or_nothing(bits, x, torch.uint8)


@lif_operator.register_fake
def _(
    x: Tensor, h0: Tensor | None, neuron: Sequence[float], surrogate: str, keep_state: bool, pack: bool
) -> tuple[Tensor, Tensor, Tensor]:
    from lrfdyn.ops.lif.triton import new_results, time_major

    spikes, state, bits = new_results(time_major(x), keep_state, pack)
    return spikes, or_nothing(state, x), or_nothing(bits, x, torch.uint8)


@operator(
    "lif_backward", f"(Tensor x, Tensor? h0, Tensor grad, Tensor? grad_state, {NEURON}) -> (Tensor, Tensor)"
)  # fmt: skip
def lif_backward(
    x: Tensor, h0: Tensor | None, grad: Tensor, grad_state: Tensor | None, neuron: Sequence[float], surrogate: str
) -> tuple[Tensor, Tensor]:
    """Gradients of the currents and of the first membrane."""
    from lrfdyn.ops.lif.triton import laid_out, launch_backward

    d, with_state = neuron_of(neuron, surrogate), h0 is not None
    grad_x, grad_h0 = launch_backward(*laid_out(x, h0), grad, grad_state, d, with_state)
    return grad_x, or_nothing(grad_h0, x)


@lif_backward.register_fake
def _(
    x: Tensor, h0: Tensor | None, grad: Tensor, grad_state: Tensor | None, neuron: Sequence[float], surrogate: str
) -> tuple[Tensor, Tensor]:
    from lrfdyn.ops.lif.triton import laid_out

    x, h0 = laid_out(x, h0)
    return torch.empty_like(x), or_nothing(None if h0 is None else torch.empty_like(h0), x)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, h0, neuron, surrogate, keep_state, _ = inputs
    ctx.save_for_backward(x, h0)
    ctx.given = (neuron, surrogate, keep_state)


def _differentiate(ctx: Any, grad: Tensor, grad_state: Tensor, _: Any) -> tuple[Any, ...]:
    x, h0 = ctx.saved_tensors
    neuron, surrogate, keep_state = ctx.given
    grad_x, grad_h0 = lif_backward(x, h0, grad, grad_state if keep_state else None, neuron, surrogate)
    return grad_x, grad_h0 if ctx.needs_input_grad[1] else None, None, None, None, None


lif_operator.register_autograd(_differentiate, setup_context=_keep)


@operator("integer_spike", "(Tensor x, int levels, float scale) -> Tensor")
def integer_operator(x: Tensor, levels: int, scale: float) -> Tensor:
    """`round(clamp(x, 0, levels)) * scale`."""
    from lrfdyn.ops.lif.triton import dense, launch_integer

    return launch_integer(dense(x), None, levels, scale)


@operator("integer_spike_backward", "(Tensor x, Tensor grad, int levels, float scale) -> Tensor")
def integer_backward(x: Tensor, grad: Tensor, levels: int, scale: float) -> Tensor:
    """The gradient of x."""
    from lrfdyn.ops.lif.triton import dense, launch_integer

    return launch_integer(dense(x), grad, levels, scale)


@integer_operator.register_fake
def _(x: Tensor, levels: int, scale: float) -> Tensor:
    from lrfdyn.ops.lif.triton import dense

    return torch.empty_like(dense(x))


@integer_backward.register_fake
def _(x: Tensor, grad: Tensor, levels: int, scale: float) -> Tensor:
    from lrfdyn.ops.lif.triton import dense

    return torch.empty_like(dense(x))


def _keep_integer(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, *ctx.given = inputs
    ctx.save_for_backward(x)


integer_operator.register_autograd(
    lambda ctx, grad: (integer_backward(ctx.saved_tensors[0], grad, *ctx.given), None, None),
    setup_context=_keep_integer,
)
