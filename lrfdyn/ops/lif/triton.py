"""The multi-step neuron as one kernel per direction.

The forward pass reads the currents and writes the spikes; the membrane stays in registers. The backward pass reads
currents and gradients and walks the membrane again, so nothing but the currents is kept.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lrfdyn.ops.dispatch import first_derivative_only
from lrfdyn.ops.lif.reference import Dynamics
from lrfdyn.ops.step_bits import attach_step_bits
from lrfdyn.ops.tiles_triton import block_of_program

BLOCK = 1024
# The spikes of one neuron, a bit per step, fit a byte up to here.
MOST_PACKED_STEPS = 8


@triton.jit
def fires(u, D: tl.constexpr):
    if D.strict:
        over = u > D.threshold
    else:
        over = u >= D.threshold
    return over


@triton.jit
def after_reset(u, over, D: tl.constexpr):
    return tl.where(over, D.v_reset, D.decay * u)


@triton.jit
def slope(u, D: tl.constexpr):
    """The surrogate derivative at the potential u."""
    x = u - D.threshold
    if D.surrogate == "sigmoid":
        # p (1 - p) = e / (1 + e)^2 for e = exp(-alpha |x|), with a reciprocal root instead of a division.
        e = tl.exp(-D.alpha * tl.abs(x))
        r = tl.rsqrt(1 + e)
        out = (D.alpha * e) * (r * r) * (r * r)
    elif D.surrogate == "atan":
        y = (3.141592653589793 / 2 * D.alpha) * x
        out = (D.alpha / 2) / (1 + y * y)
    else:
        out = tl.where(tl.abs(x) < 0.5 / D.alpha, D.alpha, 0.0)
    return out


@triton.jit
def potentials(currents, h, D: tl.constexpr, T: tl.constexpr):
    """U[1..T] of a tuple of T currents, and H[T]."""
    us = ()
    for t in tl.static_range(T):
        u = D.leak * h + D.gain * currents[t]
        us = us + (u,)
        h = after_reset(u, fires(u, D), D)
    return us, h


@triton.jit
def current_gradients(us, grads, grad_h, D: tl.constexpr, T: tl.constexpr):
    """Gradients of the T currents and of H[0], from those of the spikes and of H[T]."""
    out = ()
    for i in tl.static_range(T):
        u = us[T - 1 - i]
        k = slope(u, D)
        grad_u = grads[T - 1 - i] * k + tl.where(fires(u, D), 0.0, D.decay) * grad_h
        if not D.detach_reset:
            grad_u += grad_h * (D.v_reset - D.decay * u) * k
        grad_h = D.leak * grad_u
        out = (D.gain * grad_u,) + out
    return out, grad_h


@triton.jit
def _lif_forward(
    x, h0, spikes, packed, h_out, n, D: tl.constexpr, T: tl.constexpr,
    HAS_STATE: tl.constexpr, KEEP_STATE: tl.constexpr, PACK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    start, at, mask = block_of_program(n, BLOCK)
    # All loads before the first store: the compiler may not move a load over a store.
    currents = ()
    pointer = x + start
    for _t in tl.static_range(T):
        currents = currents + (tl.load(pointer + at, mask=mask, other=0.0).to(tl.float32),)
        pointer += n
    h = tl.zeros((BLOCK,), tl.float32)
    if HAS_STATE:
        h = tl.load(h0 + start + at, mask=mask, other=0.0).to(tl.float32)
    us, h = potentials(currents, h, D, T)
    bits = tl.zeros((BLOCK,), tl.int32)
    pointer = spikes + start
    for t in tl.static_range(T):
        over = fires(us[t], D)
        tl.store(pointer + at, over.to(tl.float32).to(spikes.dtype.element_ty), mask=mask)
        pointer += n
        bits |= over.to(tl.int32) << t
    if PACK:
        tl.store(packed + start + at, bits.to(tl.uint8), mask=mask)
    if KEEP_STATE:
        tl.store(h_out + start + at, h.to(h_out.dtype.element_ty), mask=mask)


@triton.jit
def _lif_backward(
    x, h0, grad, grad_h, grad_x, grad_h0, n, D: tl.constexpr, T: tl.constexpr,
    HAS_STATE: tl.constexpr, HAS_GRAD: tl.constexpr, HAS_GRAD_STATE: tl.constexpr, STATE_GRAD: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    start, at, mask = block_of_program(n, BLOCK)
    currents = ()
    grads = ()
    x += start
    grad += start
    for _t in tl.static_range(T):
        currents = currents + (tl.load(x + at, mask=mask, other=0.0).to(tl.float32),)
        if HAS_GRAD:
            grads = grads + (tl.load(grad + at, mask=mask, other=0.0).to(tl.float32),)
        else:
            grads = grads + (tl.zeros((BLOCK,), tl.float32),)
        x += n
        grad += n
    h = tl.zeros((BLOCK,), tl.float32)
    gh = tl.zeros((BLOCK,), tl.float32)
    if HAS_STATE:
        h = tl.load(h0 + start + at, mask=mask, other=0.0).to(tl.float32)
    if HAS_GRAD_STATE:
        gh = tl.load(grad_h + start + at, mask=mask, other=0.0).to(tl.float32)
    us, h = potentials(currents, h, D, T)
    out, gh = current_gradients(us, grads, gh, D, T)
    grad_x += start
    for t in tl.static_range(T):
        tl.store(grad_x + at, out[t].to(grad_x.dtype.element_ty), mask=mask)
        grad_x += n
    if STATE_GRAD:
        tl.store(grad_h0 + start + at, gh.to(grad_h0.dtype.element_ty), mask=mask)


def dense(x: Tensor) -> bool:
    """Whether `x` is one block of memory without gaps, in whatever order of its axes."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def time_major(x: Tensor) -> Tensor:
    """`x` with time outermost and every step one block of memory, copied only if it is not."""
    return x if dense(x[0]) and (x.shape[0] == 1 or x.stride(0) == x[0].numel()) else x.contiguous()


def laid_out_as(x: Tensor, like: Tensor) -> Tensor:
    """`x` with the strides of `like`, copied only if they differ."""
    if x.stride() == like.stride() and x.shape == like.shape:
        return x
    return torch.empty_like(like, dtype=x.dtype).copy_(x)


class _Lif(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, h0: Tensor | None, d: Dynamics, keep_state: bool, pack: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        x = time_major(x)
        h0 = None if h0 is None else laid_out_as(h0, x[0])
        spikes = torch.empty_like(x)
        packed = torch.empty_like(x[0], dtype=torch.uint8) if pack else None
        h = torch.empty_like(x[0]) if keep_state else None
        n = x[0].numel()
        _lif_forward[(triton.cdiv(n, BLOCK),)](
            x, h0, spikes, packed, h, n, D=d, T=x.shape[0],
            HAS_STATE=h0 is not None, KEEP_STATE=keep_state, PACK=pack, BLOCK=BLOCK,
        )  # fmt: skip
        ctx.save_for_backward(x, h0)
        ctx.dynamics = d
        if packed is not None:
            ctx.mark_non_differentiable(packed)
        return spikes, h, packed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, Tensor | None, None, None, None]:
        first_derivative_only()
        x, h0 = ctx.saved_tensors
        grad, grad_h = grads[:2]
        grad = None if grad is None else laid_out_as(grad, x)
        grad_h = None if grad_h is None else laid_out_as(grad_h, x[0])
        grad_x = torch.empty_like(x)
        grad_h0 = torch.empty_like(h0) if ctx.needs_input_grad[1] else None
        n = x[0].numel()
        _lif_backward[(triton.cdiv(n, BLOCK),)](
            x, h0, x if grad is None else grad, grad_h, grad_x, grad_h0, n, D=ctx.dynamics, T=x.shape[0],
            HAS_STATE=h0 is not None, HAS_GRAD=grad is not None, HAS_GRAD_STATE=grad_h is not None,
            STATE_GRAD=grad_h0 is not None, BLOCK=BLOCK,
        )  # fmt: skip
        return grad_x, grad_h0, None, None, None


def lif_triton(
    x: Tensor, dynamics: Dynamics, initial_state: Tensor | None = None, output_final_state: bool = False
) -> tuple[Tensor, Tensor | None]:
    """`lif_reference` with the membrane in float32, whatever the type of `x`."""
    # For the backward pass of whoever reads the spikes; tensors of inference mode have none.
    pack = not torch.is_inference_mode_enabled() and x.shape[0] <= MOST_PACKED_STEPS
    spikes, state, packed = _Lif.apply(x, initial_state, dynamics, output_final_state, pack)
    attach_step_bits(spikes, packed)
    return spikes, state


@triton.jit
def rounded(x, LEVELS: tl.constexpr):
    """round(clamp(x, 0, LEVELS)), halves to even: adding 1.5 * 2^23 leaves no room for a fraction."""
    return (tl.minimum(tl.maximum(x, 0.0), LEVELS) + 12582912.0) - 12582912.0


@triton.jit
def _integer_forward(x, out, n, LEVELS: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr):
    start, at, mask = block_of_program(n, BLOCK)
    value = tl.load(x + start + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + start + at, (rounded(value, LEVELS) * SCALE).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _integer_backward(x, grad, grad_x, n, LEVELS: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr):
    start, at, mask = block_of_program(n, BLOCK)
    value = tl.load(x + start + at, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(grad + start + at, mask=mask, other=0.0).to(tl.float32)
    g = tl.where((value >= 0) & (value <= LEVELS), g * SCALE, 0.0)
    tl.store(grad_x + start + at, g.to(grad_x.dtype.element_ty), mask=mask)


class _Integer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, levels: int, scale: float) -> Tensor:
        x = x if dense(x) else x.contiguous()
        out = torch.empty_like(x)
        _integer_forward[(triton.cdiv(x.numel(), BLOCK),)](x, out, x.numel(), LEVELS=levels, SCALE=scale, BLOCK=BLOCK)
        ctx.save_for_backward(x)
        ctx.levels, ctx.scale = levels, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        first_derivative_only()
        (x,) = ctx.saved_tensors
        grad = laid_out_as(grads[0], x)
        grad_x = torch.empty_like(x)
        _integer_backward[(triton.cdiv(x.numel(), BLOCK),)](
            x, grad, grad_x, x.numel(), LEVELS=ctx.levels, SCALE=ctx.scale, BLOCK=BLOCK
        )
        return grad_x, None, None


def integer_spike_triton(x: Tensor, levels: int, scale: float) -> Tensor:
    return _Integer.apply(x, levels, scale)
