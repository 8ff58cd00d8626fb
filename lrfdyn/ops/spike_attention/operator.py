"""Spiking self-attention as registered operators."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lrfdyn.ops.operators import operator

BITS = "Tensor? q_bits, Tensor? k_bits, Tensor? v_bits"


@operator("spike_attention", f"(Tensor q, Tensor k, Tensor v, float scale, bool causal, {BITS}) -> Tensor")
def attention_operator(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, q_bits: Tensor | None, k_bits: Tensor | None,
    v_bits: Tensor | None,
) -> Tensor:  # fmt: skip
    """`scale` q (k^T v); the bits of all three, or of none, are for the backward pass."""
    from lrfdyn.ops.spike_attention.triton import dense_rows, launch

    return launch(dense_rows(q), dense_rows(k), dense_rows(v), scale, causal)


@attention_operator.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    from lrfdyn.ops.spike_attention.triton import new_output

    return new_output(v)


@operator(
    "spike_attention_backward",
    "(Tensor q, Tensor k, Tensor v, Tensor grad, float scale, bool causal, bool packed) -> Tensor",
)
def attention_backward(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, scale: float, causal: bool, packed: bool
) -> Tensor:
    """Gradients of q, k and v side by side: an operator may not give three parts of one tensor."""
    from lrfdyn.ops.spike_attention.triton import dense_rows, launch_backward, parts_of

    rows = _new_rows(q, grad)
    parts, (q, k, v, grad) = parts_of(rows, grad.shape[1], q.shape[3]), map(dense_rows, (q, k, v, grad))
    launch_backward(parts, q, k, v, grad, None, scale, causal, packed)
    return rows


@attention_backward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, *_: Any) -> Tensor:
    return _new_rows(q, grad)


def _new_rows(q: Tensor, grad: Tensor) -> Tensor:
    batch, heads, tokens, e = grad.shape
    return grad.new_empty(batch, tokens, heads * (2 * q.shape[3] + e))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    q, k, v, scale, causal, *bits = inputs
    packed = bits[0] is not None
    ctx.save_for_backward(*(bits if packed else (q, k, v)))
    ctx.given = (scale, causal, packed)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    from lrfdyn.ops.spike_attention.triton import in_heads, parts_of

    q, k, v = ctx.saved_tensors
    parts = parts_of(attention_backward(q, k, v, grad, *ctx.given), grad.shape[1], q.shape[3])
    return *(in_heads(part, grad.shape[1]) for part in parts), None, None, None, None, None


attention_operator.register_autograd(_differentiate, setup_context=_keep)
