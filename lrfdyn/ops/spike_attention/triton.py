"""q (k^T v) with heads side by side in the channels: one program per image, step and head.

The d x e matrix k^T v stays in registers, q, k and v are read where the projections wrote them, and the output is
written where the next layer reads it, so nothing is transposed in memory. The causal form walks chunks of tokens:
masked scores inside a chunk, the matrix of the chunks before it for the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lrfdyn.ops.dispatch import first_derivative_only
from lrfdyn.ops.machine import H200, machine_of, next_power_of_two
from lrfdyn.ops.spike_attention.reference import Packed
from lrfdyn.ops.tiles_triton import spike_source, spike_values


@triton.jit
def _tile(base, start, N, stride, width: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr):
    """Pointers to tokens `start`.. of a head, and where they exist."""
    n = start + tl.arange(0, BN)
    c = tl.arange(0, BW)
    return base + n[:, None] * stride + c[None, :], (n < N)[:, None] & (c < width)[None, :]


@triton.jit
def _load(
    base, start, N, stride, width: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr, bit=None,
    dtype: tl.constexpr = None,
):  # fmt: skip
    """A tile of tokens as they are stored, or with `bit` that time step of packed spikes; zeros beyond the sequence."""
    at, mask = _tile(base, start, N, stride, width, BN, BW)
    value = tl.load(at, mask=mask, other=0)
    if bit is not None:
        value = spike_values(value, bit, True).to(dtype)
    return value


@triton.jit
def _store(base, start, N, stride, width: tl.constexpr, value, BN: tl.constexpr, BW: tl.constexpr):
    at, mask = _tile(base, start, N, stride, width, BN, BW)
    tl.store(at, value.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _head(x, batch_stride, head_stride, HEADS: tl.constexpr, IMAGES, PACKED: tl.constexpr):
    """The head of this program, and the time step whose bit to take."""
    image, step = spike_source(x, tl.program_id(0) // HEADS, batch_stride, IMAGES, PACKED)
    return image + (tl.program_id(0) % HEADS) * head_stride, step


@triton.jit
def _masked_scores(a, b, BN: tl.constexpr, PRECISION: tl.constexpr):
    """a b^T of the tokens `[BN, width]` of a chunk; zero where the second token is after the first."""
    n = tl.arange(0, BN)
    return tl.where(n[:, None] >= n[None, :], tl.dot(a, tl.trans(b), input_precision=PRECISION), 0.0)


@triton.jit
def _attention_forward(
    q, k, v, out, scale, N, qb, qh, qn, kb, kh, kn, vb, vh, vn, ob, oh, on, HEADS: tl.constexpr,
    CAUSAL: tl.constexpr, DW: tl.constexpr, EW: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    q, _step = _head(q, qb, qh, HEADS, 1, False)
    k, _step = _head(k, kb, kh, HEADS, 1, False)
    v, _step = _head(v, vb, vh, HEADS, 1, False)
    out, _step = _head(out, ob, oh, HEADS, 1, False)
    state = tl.zeros((BD, BE), tl.float32)
    if not CAUSAL:
        for start in range(0, N, BN):
            kt = _load(k, start, N, kn, DW, BN, BD)
            vt = _load(v, start, N, vn, EW, BN, BE)
            state = tl.dot(tl.trans(kt), vt, state, input_precision=PRECISION)
    for start in range(0, N, BN):
        qt = _load(q, start, N, qn, DW, BN, BD)
        y = tl.dot(qt, state.to(qt.dtype), input_precision=PRECISION)
        if CAUSAL:
            kt = _load(k, start, N, kn, DW, BN, BD)
            vt = _load(v, start, N, vn, EW, BN, BE)
            score = _masked_scores(qt, kt, BN, PRECISION)
            y = tl.dot(score.to(vt.dtype), vt, y, input_precision=PRECISION)
            state = tl.dot(tl.trans(kt), vt, state, input_precision=PRECISION)
        _store(out, start, N, on, EW, y * scale, BN, BE)


@triton.jit
def _attention_backward(
    q, k, v, grad, gq, gk, gv, extra, scale, N, IMAGES, qb, qh, qn, kb, kh, kn, vb, vh, vn, ob, oh, on, gqb, gqn, gvb,
    gvn, xb, xh, xn, HEADS: tl.constexpr, CAUSAL: tl.constexpr, DW: tl.constexpr, EW: tl.constexpr, BN: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr, PRECISION: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Gradients of q, k and v, heads side by side in rows of any width. `extra` is added to that of v.

    The first loop makes k^T v and, unless causal, q^T grad of all tokens. The causal form takes the gradient of q from
    the tokens before, in the first loop, and those of k and v from the tokens after, from the last chunk to the first.
    """
    dtype = grad.dtype.element_ty
    q, step = _head(q, qb, qh, HEADS, IMAGES, PACKED)
    k, step = _head(k, kb, kh, HEADS, IMAGES, PACKED)
    v, step = _head(v, vb, vh, HEADS, IMAGES, PACKED)
    bit = step if PACKED else None
    grad, _step = _head(grad, ob, oh, HEADS, 1, False)
    gq, _step = _head(gq, gqb, DW, HEADS, 1, False)
    gk, _step = _head(gk, gqb, DW, HEADS, 1, False)
    gv, _step = _head(gv, gvb, EW, HEADS, 1, False)
    if extra is not None:
        extra, _step = _head(extra, xb, xh, HEADS, 1, False)
    state = tl.zeros((BD, BE), tl.float32)  # k^T v
    other = tl.zeros((BD, BE), tl.float32)  # q^T grad
    for start in range(0, N, BN):
        kt = _load(k, start, N, kn, DW, BN, BD, bit, dtype)
        vt = _load(v, start, N, vn, EW, BN, BE, bit, dtype)
        if not CAUSAL:
            qt = _load(q, start, N, qn, DW, BN, BD, bit, dtype)
        gt = (_load(grad, start, N, on, EW, BN, BE) * scale).to(dtype)
        if CAUSAL:
            score = _masked_scores(gt, vt, BN, PRECISION)
            y = tl.dot(gt, tl.trans(state.to(dtype)), input_precision=PRECISION)
            y = tl.dot(score.to(dtype), kt, y, input_precision=PRECISION)
            _store(gq, start, N, gqn, DW, y, BN, BD)
        state = tl.dot(tl.trans(kt), vt, state, input_precision=PRECISION)
        if not CAUSAL:
            other = tl.dot(tl.trans(qt), gt, other, input_precision=PRECISION)
    for passed in range(0, N, BN):
        start = (tl.cdiv(N, BN) - 1) * BN - passed if CAUSAL else passed
        if CAUSAL:
            qt = _load(q, start, N, qn, DW, BN, BD, bit, dtype)
            kt = _load(k, start, N, kn, DW, BN, BD, bit, dtype)
            vt = _load(v, start, N, vn, EW, BN, BE, bit, dtype)
        gt = (_load(grad, start, N, on, EW, BN, BE) * scale).to(dtype)
        if CAUSAL:
            score = _masked_scores(gt, vt, BN, PRECISION)
        else:
            y = tl.dot(gt, tl.trans(state.to(dtype)), input_precision=PRECISION)
            _store(gq, start, N, gqn, DW, y, BN, BD)
            vt = _load(v, start, N, vn, EW, BN, BE, bit, dtype)
        y = tl.dot(vt, tl.trans(other.to(dtype)), input_precision=PRECISION)
        if CAUSAL:
            y = tl.dot(tl.trans(score.to(dtype)), qt, y, input_precision=PRECISION)
        _store(gk, start, N, gqn, DW, y, BN, BD)
        if CAUSAL:
            score = _masked_scores(qt, kt, BN, PRECISION)
        else:
            kt = _load(k, start, N, kn, DW, BN, BD, bit, dtype)
        y = tl.dot(kt, other.to(dtype), input_precision=PRECISION)
        if CAUSAL:
            y = tl.dot(tl.trans(score.to(dtype)), gt, y, input_precision=PRECISION)
        if extra is not None:
            y += _load(extra, start, N, xn, EW, BN, BE).to(tl.float32)
        _store(gv, start, N, gvn, EW, y, BN, BE)
        if CAUSAL:
            other = tl.dot(tl.trans(qt), gt, other, input_precision=PRECISION)


def dense_rows(x: Tensor) -> Tensor:
    """`x` with the numbers of a token adjacent, copied only if they are not."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _strides(*tensors: Tensor) -> list[int]:
    return [s for t in tensors for s in t.stride()[:3]]


def _options(q: Tensor, e: int, causal: bool, dtype: torch.dtype) -> dict[str, Any]:
    """Blocks and lanes decide the order of sums: functions of shape and machine."""
    _, heads, tokens, d = q.shape
    machine = machine_of(q.device)
    bd, be = (max(16, next_power_of_two(size)) for size in (d, e))
    # Masked scores of 64 tokens besides all else are more than the registers hold where heads are wide, and in float32,
    # which no matrix unit multiplies. On sm_90 shorter chunks have to be measured first.
    wide = bd * be > 4096 and not machine.shared_operands
    chunk = 32 if causal and (wide or (dtype == torch.float32 and machine.architecture != H200.architecture)) else 64
    bn = max(16, next_power_of_two(min(tokens, chunk)))
    return {
        "HEADS": heads, "CAUSAL": causal, "DW": d, "EW": e, "BN": bn, "BD": bd, "BE": be, "num_stages": 1,
        # The only one that all GPUs know; it is for float32, and products of 16 bits are exact.
        "PRECISION": "ieee", "num_warps": machine.warps(256 if bd * be > 4096 else 128),
    }  # fmt: skip


def new_output(v: Tensor) -> Tensor:
    """Empty, of the shape of `v`, with heads side by side."""
    batch, heads, tokens, e = v.shape
    return v.new_empty(batch, tokens, heads, e).transpose(1, 2)


def launch(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
    """`scale` q (k^T v) of dense rows."""
    batch, heads, tokens, _ = q.shape
    out = new_output(v)
    options = _options(q, v.shape[-1], causal, q.dtype)
    _attention_forward[(batch * heads,)](q, k, v, out, scale, tokens, *_strides(q, k, v, out), **options)
    return out


def parts_of(rows: Tensor, heads: int, d: int) -> Sequence[Tensor]:
    """The gradients of q, k and v out of rows in which they lie side by side, `[batch, N, heads * (2 d + e)]`."""
    return rows.split((heads * d, heads * d, rows.shape[-1] - 2 * heads * d), -1)


def in_heads(rows: Tensor, heads: int) -> Tensor:
    """`[batch, N, heads * d]` as `[batch, heads, N, d]`."""
    return rows.unflatten(-1, (heads, -1)).transpose(1, 2)


def launch_backward(
    parts: Sequence[Tensor], q: Tensor, k: Tensor, v: Tensor, grad: Tensor, extra: Tensor | None, scale: float,
    causal: bool, packed: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v, written into `parts` `[batch, N, heads * d]`; `extra` is added to that of v. q, k and v
    are dense rows, of spikes or of their bits (`packed`)."""
    batch, heads, tokens, e = grad.shape
    gq, gk, gv = (in_heads(part, heads) for part in parts)
    _attention_backward[(batch * heads,)](
        q, k, v, grad, gq, gk, gv, extra, scale, tokens, q.shape[0], *_strides(q, k, v, grad),
        gq.stride(0), gq.stride(2), gv.stride(0), gv.stride(2), *_strides(grad if extra is None else extra),
        PACKED=packed, **_options(q, e, causal, grad.dtype),
    )  # fmt: skip
    return gq, gk, gv


class SpikeAttention(torch.autograd.Function):
    """`scale` q (k^T v) for `[batch, heads, N, d]`, batch = T * B, `d` and `e` up to 256. `packed` holds the same
    spikes as one byte per neuron, `[B, heads, N, d]`. With `fork`, `v` comes back as a second output, for whatever
    else reads it: that gradient is then added where the gradient of `v` is made."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, packed: Packed | None, fork: bool
    ) -> Any:  # fmt: skip
        given = v
        q, k, v = dense_rows(q), dense_rows(k), dense_rows(v)
        out = launch(q, k, v, scale, causal)
        ctx.save_for_backward(*((q, k, v) if packed is None else (dense_rows(x) for x in packed)))
        ctx.given, ctx.side_by_side = (scale, causal, packed is not None), q.stride(2) > q.shape[1] * q.shape[3]
        return (out, given.view_as(given)) if fork else out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        first_derivative_only()
        q, k, v = ctx.saved_tensors
        grad = dense_rows(grads[0])
        extra = dense_rows(grads[1]) if len(grads) > 1 else None
        # Heads side by side in a row, and the rows of all three in one if those of q, k and v are.
        (batch, heads, tokens, e), d = grad.shape, q.shape[3]
        if ctx.side_by_side:
            parts = parts_of(grad.new_empty(batch, tokens, heads * (2 * d + e)), heads, d)
        else:
            parts = [grad.new_empty(batch, tokens, heads * size) for size in (d, d, e)]
        return *launch_backward(parts, q, k, v, grad, extra, *ctx.given), None, None, None, None
