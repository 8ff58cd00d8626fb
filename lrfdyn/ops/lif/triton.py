"""The multi-step neuron as one kernel.

The forward pass reads the currents and writes the spikes; the membrane stays in registers. The backward pass reads
currents and gradients and walks the membrane again, so nothing but the currents is kept.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lrfdyn.ops.bits import MOST_PACKED_STEPS
from lrfdyn.ops.dispatch import first_derivative_only
from lrfdyn.ops.lif.reference import Dynamics
from lrfdyn.ops.machine import programs_for
from lrfdyn.ops.tiles_triton import block_of_program, load_steps
from lrfdyn.ops.tuning import choices, launch_tuned

# Elements of one time step per program, and its lanes: what is taken, then what may be tried.
BLOCKS, LANES = (1024, 512, 2048), (128, 64, 256)


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
def fire(currents, h, D: tl.constexpr, T: tl.constexpr):
    """Of a tuple of T currents and the membrane H[0]: U[1..T], whether it fires, that as bits, and H[T]."""
    us = ()
    fired = ()
    bits = tl.zeros_like(h).to(tl.int32)
    for t in tl.static_range(T):
        u = D.leak * h + D.gain * currents[t]
        over = u > D.threshold if D.strict else u >= D.threshold
        h = tl.where(over, D.v_reset, D.decay * u)
        us = us + (u,)
        fired = fired + (over,)
        bits |= over.to(tl.int32) << t
    return us, fired, bits, h


@triton.jit
def current_gradients(us, fired, grads, grad_h, D: tl.constexpr, T: tl.constexpr):
    """Gradients of the T currents and of H[0], from those of the spikes and of H[T]."""
    out = ()
    for i in tl.static_range(T):
        u = us[T - 1 - i]
        k = slope(u, D)
        grad_u = grads[T - 1 - i] * k + tl.where(fired[T - 1 - i], 0.0, D.decay) * grad_h
        if not D.detach_reset:
            grad_u += grad_h * (D.v_reset - D.decay * u) * k
        grad_h = D.leak * grad_u
        out = (D.gain * grad_u,) + out
    return out, grad_h


@triton.jit
def _load_state(h, start, at, mask):
    """A membrane or its gradient in float32; zeros without one."""
    return tl.zeros(at.shape, tl.float32) if h is None else tl.load(h + start + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _lif(x, h0, grad, grad_h, out, out_h, packed, n, D: tl.constexpr, T: tl.constexpr, BLOCK: tl.constexpr):
    """Spikes, H[T] and bits; or with the gradient of the spikes those of x and H[0]."""
    start, at, mask = block_of_program(n, BLOCK)
    # All loads before the first store: the compiler may not move a load over a store.
    currents = load_steps(x + start, at, mask, n, T, False)
    if grad is not None:
        grads = load_steps(grad + start, at, mask, n, T, False)
    us, tiles, bits, h = fire(currents, _load_state(h0, start, at, mask), D, T)
    if grad is not None:
        tiles, h = current_gradients(us, tiles, grads, _load_state(grad_h, start, at, mask), D, T)
    out += start
    for t in tl.static_range(T):
        tl.store(out + at, tiles[t].to(tl.float32).to(out.dtype.element_ty), mask=mask)
        out += n
    if packed is not None:
        tl.store(packed + start + at, bits.to(tl.uint8), mask=mask)
    if out_h is not None:
        tl.store(out_h + start + at, h.to(out_h.dtype.element_ty), mask=mask)


def time_major(x: Tensor) -> Tensor:
    """`x` with time outermost and every step one block of memory, copied only if it is not."""
    dense = torch.ops.aten.is_non_overlapping_and_dense(x[0])
    return x if dense and (x.shape[0] == 1 or x.stride(0) == x[0].numel()) else x.contiguous()


def laid_out_as(x: Tensor, like: Tensor) -> Tensor:
    """`x` with the strides of `like`, copied only if they differ."""
    if x.stride() == like.stride() and x.shape == like.shape:
        return x
    return torch.empty_like(like, dtype=x.dtype).copy_(x)


def laid_out(x: Tensor, h0: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Currents and the first membrane as the kernel reads them."""
    x = time_major(x)
    return x, None if h0 is None else laid_out_as(h0, x[0])


def new_results(x: Tensor, keep_state: bool, pack: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Empty spikes, last membrane and bits, the last two where they are wanted."""
    spikes = torch.empty_like(x)
    packed = torch.empty_like(x[0], dtype=torch.uint8) if pack else None
    return spikes, torch.empty_like(x[0]) if keep_state else None, packed


def _launch_elements(kernel: Any, n: int, x: Tensor, *args: Any, **constants: Any) -> None:
    """Launches a kernel whose programs take blocks of n elements."""
    offered = choices(x.device, BLOCK=BLOCKS, lanes=LANES)
    launch_tuned(kernel, lambda o: (programs_for(n, o["BLOCK"]),), offered, x, *args, n, **constants)


def launch(
    x: Tensor, h0: Tensor | None, d: Dynamics, keep_state: bool, pack: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Spikes, last membrane and bits of what is laid out."""
    (spikes, h, packed), n = new_results(x, keep_state, pack), x[0].numel()
    _launch_elements(_lif, n, x, h0, None, None, spikes, h, packed, D=d, T=x.shape[0])
    return spikes, h, packed


def launch_backward(
    x: Tensor, h0: Tensor | None, grad: Tensor, grad_h: Tensor | None, d: Dynamics, with_h0: bool
) -> tuple[Tensor, Tensor | None]:
    """Gradients of the currents and, `with_h0`, of the first membrane."""
    grad, n = laid_out_as(grad, x), x[0].numel()
    grad_h = None if grad_h is None else laid_out_as(grad_h, x[0])
    grad_x, grad_h0 = torch.empty_like(x), torch.empty_like(h0) if with_h0 else None
    _launch_elements(_lif, n, x, h0, grad, grad_h, grad_x, grad_h0, None, D=d, T=x.shape[0])
    return grad_x, grad_h0


class Lif(torch.autograd.Function):
    """Spikes, the last membrane if it is kept, and the bits of the spikes for backward passes of whoever reads them."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, h0: Tensor | None, d: Dynamics, keep_state: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        x, h0 = laid_out(x, h0)
        ctx.save_for_backward(x, h0)
        ctx.dynamics = d
        return launch(x, h0, d, keep_state, x.shape[0] <= MOST_PACKED_STEPS and not torch.is_inference_mode_enabled())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, Tensor | None, None, None]:
        first_derivative_only()
        return *launch_backward(*ctx.saved_tensors, *grads[:2], ctx.dynamics, ctx.needs_input_grad[1]), None, None


@triton.jit
def rounded(x, LEVELS: tl.constexpr):
    """round(clamp(x, 0, LEVELS)), halves to even: adding 1.5 * 2^23 leaves no room for a fraction."""
    return (tl.minimum(tl.maximum(x, 0.0), LEVELS) + 12582912.0) - 12582912.0


@triton.jit
def _integer(x, grad, out, n, LEVELS: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr):
    """The integer spikes of x, or the gradient of x from theirs."""
    start, at, mask = block_of_program(n, BLOCK)
    value = tl.load(x + start + at, mask=mask, other=0.0).to(tl.float32)
    if grad is None:
        value = rounded(value, LEVELS) * SCALE
    else:
        g = tl.load(grad + start + at, mask=mask, other=0.0).to(tl.float32)
        value = tl.where((value >= 0) & (value <= LEVELS), g * SCALE, 0.0)
    tl.store(out + start + at, value.to(out.dtype.element_ty), mask=mask)


def dense(x: Tensor) -> Tensor:
    """`x` without gaps in memory, copied only if it has some."""
    return x if torch.ops.aten.is_non_overlapping_and_dense(x) else x.contiguous()


def launch_integer(x: Tensor, grad: Tensor | None, levels: int, scale: float) -> Tensor:
    """The integer spikes of a dense x, or its gradient from theirs."""
    out = torch.empty_like(x)
    grad = None if grad is None else laid_out_as(grad, x)
    _launch_elements(_integer, x.numel(), x, grad, out, LEVELS=levels, SCALE=scale)
    return out


class IntegerSpikeKernel(torch.autograd.Function):
    """`round(clamp(x, 0, levels)) * scale`, computed in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, levels: int, scale: float) -> Tensor:
        x = dense(x)
        ctx.save_for_backward(x)
        ctx.given = (levels, scale)
        return launch_integer(x, None, levels, scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        first_derivative_only()
        return launch_integer(*ctx.saved_tensors, grads[0], *ctx.given), None, None
