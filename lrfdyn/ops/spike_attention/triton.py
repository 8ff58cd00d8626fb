"""q (k^T v) with heads side by side in the channels: one program per image, step and head.

The d x e matrix k^T v stays in registers, q, k and v are read where the projections wrote them, and the output is
written where the next layer reads it, so nothing is transposed in memory. The causal form walks chunks of tokens:
masked scores inside a chunk, the matrix of the chunks before it for the rest. Where the spikes also exist as bits (one
byte per neuron, a bit per time step), those are what is kept for the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lrfdyn.ops.dispatch import first_derivative_only
from lrfdyn.ops.spike_attention.reference import Packed


@triton.jit
def _tile(base, start, N, stride, width: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr):
    """Pointers to tokens `start`.. of a head, and where they exist."""
    n = start + tl.arange(0, BN)
    c = tl.arange(0, BW)
    return base + n[:, None] * stride + c[None, :], (n < N)[:, None] & (c < width)[None, :]


@triton.jit
def _head(x, batch_stride, head_stride, HEADS: tl.constexpr):
    pid = tl.program_id(0)
    return x + (pid // HEADS).to(tl.int64) * batch_stride + (pid % HEADS) * head_stride


@triton.jit
def _spike_head(x, batch_stride, head_stride, HEADS: tl.constexpr, IMAGES, PACKED: tl.constexpr):
    """A head of spikes, and the time step whose bit to take: packed, all steps of an image share their bytes."""
    image = tl.program_id(0) // HEADS
    step = image // IMAGES
    if PACKED:
        image = image % IMAGES
    return x + image.to(tl.int64) * batch_stride + (tl.program_id(0) % HEADS) * head_stride, step


@triton.jit
def _load_spikes(
    x, start, N, stride, width: tl.constexpr, step, BN: tl.constexpr, BW: tl.constexpr, dtype: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    at, mask = _tile(x, start, N, stride, width, BN, BW)
    value = tl.load(at, mask=mask, other=0)
    if PACKED:
        value = ((value.to(tl.int32) >> step) & 1).to(tl.float32).to(dtype)
    return value


@triton.jit
def _below(BN: tl.constexpr):
    n = tl.arange(0, BN)
    return n[:, None] >= n[None, :]


@triton.jit
def _attention_forward(
    q, k, v, out, scale, N, qb, qh, qn, kb, kh, kn, vb, vh, vn, ob, oh, on, HEADS: tl.constexpr,
    CAUSAL: tl.constexpr, DW: tl.constexpr, EW: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    q = _head(q, qb, qh, HEADS)
    k = _head(k, kb, kh, HEADS)
    v = _head(v, vb, vh, HEADS)
    out = _head(out, ob, oh, HEADS)
    state = tl.zeros((BD, BE), tl.float32)
    if not CAUSAL:
        for start in range(0, N, BN):
            at, mask = _tile(k, start, N, kn, DW, BN, BD)
            kt = tl.load(at, mask=mask, other=0.0)
            at, mask = _tile(v, start, N, vn, EW, BN, BE)
            vt = tl.load(at, mask=mask, other=0.0)
            state = tl.dot(tl.trans(kt), vt, state, input_precision=PRECISION)
    for start in range(0, N, BN):
        at, mask = _tile(q, start, N, qn, DW, BN, BD)
        qt = tl.load(at, mask=mask, other=0.0)
        y = tl.dot(qt, state.to(qt.dtype), input_precision=PRECISION)
        if CAUSAL:
            at, mask = _tile(k, start, N, kn, DW, BN, BD)
            kt = tl.load(at, mask=mask, other=0.0)
            at, mask = _tile(v, start, N, vn, EW, BN, BE)
            vt = tl.load(at, mask=mask, other=0.0)
            score = tl.where(_below(BN), tl.dot(qt, tl.trans(kt), input_precision=PRECISION), 0.0)
            y = tl.dot(score.to(vt.dtype), vt, y, input_precision=PRECISION)
            state = tl.dot(tl.trans(kt), vt, state, input_precision=PRECISION)
        at, mask = _tile(out, start, N, on, EW, BN, BE)
        tl.store(at, (y * scale).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _attention_backward(
    q, k, v, grad, gq, gk, gv, extra, scale, N, IMAGES, qb, qh, qn, kb, kh, kn, vb, vh, vn, ob, oh, on, gqb, gqn, gvb,
    gvn, xb, xh, xn, HEADS: tl.constexpr, CAUSAL: tl.constexpr, DW: tl.constexpr, EW: tl.constexpr, BN: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr, PRECISION: tl.constexpr, PACKED: tl.constexpr, EXTRA: tl.constexpr,
):  # fmt: skip
    """Gradients of q, k and v, heads side by side in rows of any width. `extra` is added to that of v."""
    dtype = grad.dtype.element_ty
    q, step = _spike_head(q, qb, qh, HEADS, IMAGES, PACKED)
    k, step = _spike_head(k, kb, kh, HEADS, IMAGES, PACKED)
    v, step = _spike_head(v, vb, vh, HEADS, IMAGES, PACKED)
    grad = _head(grad, ob, oh, HEADS)
    gq = _head(gq, gqb, DW, HEADS)
    gk = _head(gk, gqb, DW, HEADS)
    gv = _head(gv, gvb, EW, HEADS)
    if EXTRA:
        extra = _head(extra, xb, xh, HEADS)
    state = tl.zeros((BD, BE), tl.float32)  # k^T v
    other = tl.zeros((BD, BE), tl.float32)  # q^T grad
    if not CAUSAL:
        for start in range(0, N, BN):
            kt = _load_spikes(k, start, N, kn, DW, step, BN, BD, dtype, PACKED)
            vt = _load_spikes(v, start, N, vn, EW, step, BN, BE, dtype, PACKED)
            qt = _load_spikes(q, start, N, qn, DW, step, BN, BD, dtype, PACKED)
            at, mask = _tile(grad, start, N, on, EW, BN, BE)
            gt = (tl.load(at, mask=mask, other=0.0) * scale).to(qt.dtype)
            state = tl.dot(tl.trans(kt), vt, state, input_precision=PRECISION)
            other = tl.dot(tl.trans(qt), gt, other, input_precision=PRECISION)
        for start in range(0, N, BN):
            at, mask = _tile(grad, start, N, on, EW, BN, BE)
            gt = (tl.load(at, mask=mask, other=0.0) * scale).to(dtype)
            y = tl.dot(gt, tl.trans(state.to(gt.dtype)), input_precision=PRECISION)
            at, mask = _tile(gq, start, N, gqn, DW, BN, BD)
            tl.store(at, y.to(gq.dtype.element_ty), mask=mask)
            vt = _load_spikes(v, start, N, vn, EW, step, BN, BE, dtype, PACKED)
            y = tl.dot(vt, tl.trans(other.to(gt.dtype)), input_precision=PRECISION)
            at, mask = _tile(gk, start, N, gqn, DW, BN, BD)
            tl.store(at, y.to(gk.dtype.element_ty), mask=mask)
            kt = _load_spikes(k, start, N, kn, DW, step, BN, BD, dtype, PACKED)
            y = tl.dot(kt, other.to(gt.dtype), input_precision=PRECISION)
            if EXTRA:
                at, mask = _tile(extra, start, N, xn, EW, BN, BE)
                y += tl.load(at, mask=mask, other=0.0).to(tl.float32)
            at, mask = _tile(gv, start, N, gvn, EW, BN, BE)
            tl.store(at, y.to(gv.dtype.element_ty), mask=mask)
    else:
        for start in range(0, N, BN):
            kt = _load_spikes(k, start, N, kn, DW, step, BN, BD, dtype, PACKED)
            vt = _load_spikes(v, start, N, vn, EW, step, BN, BE, dtype, PACKED)
            at, mask = _tile(grad, start, N, on, EW, BN, BE)
            gt = (tl.load(at, mask=mask, other=0.0) * scale).to(kt.dtype)
            score = tl.where(_below(BN), tl.dot(gt, tl.trans(vt), input_precision=PRECISION), 0.0)
            y = tl.dot(gt, tl.trans(state.to(gt.dtype)), input_precision=PRECISION)
            y = tl.dot(score.to(kt.dtype), kt, y, input_precision=PRECISION)
            at, mask = _tile(gq, start, N, gqn, DW, BN, BD)
            tl.store(at, y.to(gq.dtype.element_ty), mask=mask)
            state = tl.dot(tl.trans(kt), vt, state, input_precision=PRECISION)
        for back in range(0, N, BN):
            start = (tl.cdiv(N, BN) - 1) * BN - back
            qt = _load_spikes(q, start, N, qn, DW, step, BN, BD, dtype, PACKED)
            kt = _load_spikes(k, start, N, kn, DW, step, BN, BD, dtype, PACKED)
            vt = _load_spikes(v, start, N, vn, EW, step, BN, BE, dtype, PACKED)
            at, mask = _tile(grad, start, N, on, EW, BN, BE)
            gt = (tl.load(at, mask=mask, other=0.0) * scale).to(kt.dtype)
            score = tl.where(_below(BN), tl.dot(gt, tl.trans(vt), input_precision=PRECISION), 0.0)
            y = tl.dot(vt, tl.trans(other.to(vt.dtype)), input_precision=PRECISION)
            y = tl.dot(tl.trans(score.to(qt.dtype)), qt, y, input_precision=PRECISION)
            at, mask = _tile(gk, start, N, gqn, DW, BN, BD)
            tl.store(at, y.to(gk.dtype.element_ty), mask=mask)
            score = tl.where(_below(BN), tl.dot(qt, tl.trans(kt), input_precision=PRECISION), 0.0)
            y = tl.dot(kt, other.to(kt.dtype), input_precision=PRECISION)
            y = tl.dot(tl.trans(score.to(gt.dtype)), gt, y, input_precision=PRECISION)
            if EXTRA:
                at, mask = _tile(extra, start, N, xn, EW, BN, BE)
                y += tl.load(at, mask=mask, other=0.0).to(tl.float32)
            at, mask = _tile(gv, start, N, gvn, EW, BN, BE)
            tl.store(at, y.to(gv.dtype.element_ty), mask=mask)
            other = tl.dot(tl.trans(qt), gt, other, input_precision=PRECISION)


def _options(q: Tensor, v: Tensor, causal: bool) -> dict[str, Any]:
    _, heads, tokens, d = q.shape
    e = v.shape[-1]
    bd, be = (max(16, triton.next_power_of_2(width)) for width in (d, e))
    block = max(16, min(64, triton.next_power_of_2(tokens)))
    precision = "ieee" if q.dtype == torch.float32 else "tf32"
    return {
        "HEADS": heads, "CAUSAL": causal, "DW": d, "EW": e, "BN": block, "BD": bd, "BE": be, "PRECISION": precision,
        "num_warps": 8 if bd * be > 4096 else 4, "num_stages": 1,
    }  # fmt: skip


def _dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _strides(*tensors: Tensor) -> list[int]:
    return [s for t in tensors for s in t.stride()[:3]]


def _empty_heads(like: Tensor) -> Tensor:
    """`[batch, heads, N, width]` in the memory of `[batch, N, heads, width]`."""
    batch, heads, tokens, width = like.shape
    return like.new_empty(batch, tokens, heads, width).transpose(1, 2)


def _gradients(grad: Tensor, d: int, side_by_side: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Empty gradients of q, k `[batch, heads, N, d]` and v, like `grad` `[batch, heads, N, e]`: heads side by side in
    a row, and the rows of all three in one if those of q, k and v are."""
    batch, heads, tokens, e = grad.shape
    sizes = [heads * d, heads * d, heads * e]
    if side_by_side:
        parts = grad.new_empty(batch, tokens, sum(sizes)).split(sizes, -1)
    else:
        parts = tuple(grad.new_empty(batch, tokens, size) for size in sizes)
    gq, gk, gv = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in parts)
    return gq, gk, gv


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, packed: Packed | None, fork: bool
    ) -> Any:  # fmt: skip
        given = v
        q, k, v = _dense_rows(q), _dense_rows(k), _dense_rows(v)
        out = _empty_heads(v)
        _attention_forward[(q.shape[0] * q.shape[1],)](
            q, k, v, out, scale, q.shape[2], *_strides(q, k, v, out), **_options(q, v, causal)
        )
        ctx.save_for_backward(*((q, k, v) if packed is None else (_dense_rows(x) for x in packed)))
        ctx.given = (scale, causal, packed is not None, q.stride(2) > q.shape[1] * q.shape[3])
        return (out, given.view_as(given)) if fork else out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        first_derivative_only()
        q, k, v = ctx.saved_tensors
        scale, causal, packed, side_by_side = ctx.given
        grad = _dense_rows(grads[0])
        extra = _dense_rows(grads[1]) if len(grads) > 1 else None
        batch, heads, tokens, d = (grad.shape[0], *q.shape[1:])
        gq, gk, gv = _gradients(grad, d, side_by_side)
        _attention_backward[(batch * heads,)](
            q, k, v, grad, gq, gk, gv, extra, scale, tokens, q.shape[0], *_strides(q, k, v, grad),
            gq.stride(0), gq.stride(2), gv.stride(0), gv.stride(2), *_strides(grad if extra is None else extra),
            PACKED=packed, EXTRA=extra is not None, **_options(gq, gv, causal),
        )  # fmt: skip
        return gq, gk, gv, None, None, None, None


def spike_attention_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    causal: bool = False,
    packed: Packed | None = None,
    fork: bool = False,
) -> Any:
    """`scale` q (k^T v) for `[batch, heads, N, d]`, batch = T * B, `d` and `e` up to 256. `packed` holds the same
    spikes as one byte per neuron, `[B, heads, N, d]`. With `fork`, `v` comes back as a second output, for whatever
    else reads it: that gradient is then added where the gradient of `v` is made."""
    return _Attention.apply(q, k, v, scale, causal, packed, fork)
