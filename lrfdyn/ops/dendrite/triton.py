"""The recurrence of the modes with its state in registers: one lane per channel walks the tokens.

Forward, for every mode with z = exp(lambda):        s_n = z s_{n-1} + u_n,   X_n = 2 Re sum w s_n.
Backward runs from the last token to the first:      q_n = z q_{n+1} + G_n,   dU_n = 2 Re sum w q_n,

and since the kernel of a mode is 2 Re w z^m, sums over all tokens give every gradient of the parameters:

    dL/dw = 2 conj(sum u_n q_n),   dL/dlambda = 2 w sum u_n p_n,   p_n = sum_m m z^m G_{n+m} = z p_{n+1} + z q_{n+1}.

Without a frequency modes are real: what is the real and the imaginary part elsewhere are then two modes of their own.
Nothing is kept but the tokens and the parameters.

With two directions the first potential needs the last token, so no walk gives both. One program makes the two walks
over its sequence one after the other, the second from where the first one ended: it meets the tokens, and the sums that
it adds to, in the cache. Forward it begins at the last token, backward at the last too, where the gradients of the
first set begin. What the first walk gives waits in float32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lrfdyn.ops.dendrite.modes import LARGEST_DECAY
from lrfdyn.ops.dispatch import first_derivative_only
from lrfdyn.ops.machine import machine_of, programs_for
from lrfdyn.ops.tiles_triton import existing_columns, spike_source, spike_values, zero_tiles
from lrfdyn.ops.tuning import choices, launch_tuned

# Tokens loaded together, so that enough loads are in flight while the recurrence waits for none of them.
TOKENS = 8
# Channels per program, one warp each: what is taken, then what may be tried.
FORWARD_CHANNELS, BACKWARD_CHANNELS = (64, 32, 128), (32, 64)


@triton.jit
def _load_pairs(x, cols, inside, M: tl.constexpr):
    """A tuple of 2 M tiles: real and imaginary part of every mode of `x` `[C, M, 2]`."""
    pairs = ()
    for k in tl.static_range(2 * M):
        pairs = pairs + (tl.load(x + cols * (2 * M) + k, mask=inside, other=0.0),)
    return pairs


@triton.jit
def _load_poles(decay, frequency, cols, inside, M: tl.constexpr, LARGEST: tl.constexpr):
    """A tuple of 2 M tiles: real and imaginary part of z of every mode."""
    z = ()
    if frequency is None:
        decays = _load_pairs(decay, cols, inside, M)
        for k in tl.static_range(2 * M):
            z = z + (tl.exp(-tl.minimum(decays[k], LARGEST)),)
    else:
        for m in tl.static_range(M):
            alpha = tl.minimum(tl.load(decay + cols * M + m, mask=inside, other=0.0), LARGEST)
            omega = tl.load(frequency + cols * M + m, mask=inside, other=0.0)
            modulus = tl.exp(-alpha)
            z = z + (modulus * tl.cos(omega), modulus * tl.sin(omega))
    return z


@triton.jit
def _load_tokens(
    x, start, step: tl.constexpr, bit, N, C: tl.constexpr, cols, inside, L: tl.constexpr, PACKED: tl.constexpr
):
    """L tokens from `start` on in steps of +1 or -1, PACKED those of time step `bit`; zeros beyond the sequence."""
    tokens = ()
    for k in tl.static_range(L):
        n = start + step * k
        loaded = tl.load(x + n * C + cols, mask=inside & (n >= 0) & (n < N), other=0)
        tokens = tokens + (spike_values(loaded, bit, PACKED),)
    return tokens


@triton.jit
def _store_token(x, n, value, C: tl.constexpr, cols, mask):
    tl.store(x + n * C + cols, value.to(x.dtype.element_ty), mask=mask)


@triton.jit
def _walk(
    u, z, w, state, waiting, out, cols, inside, step: tl.constexpr, KEEP: tl.constexpr, REAL: tl.constexpr,
    N: tl.constexpr, C: tl.constexpr, M: tl.constexpr, L: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Potentials of a sequence, walked from the first token on (`step` 1) or from the last (-1), and added to those
    that are `waiting`, if any. Returns the state, that after the last token with KEEP."""
    first: tl.constexpr = 0 if step == 1 else N - 1
    tokens = _load_tokens(u, first, step, 0, N, C, cols, inside, L, False)
    for start in range(0, N, L):
        following = _load_tokens(u, first + step * (start + L), step, 0, N, C, cols, inside, L, False)
        if waiting is not None:
            others = _load_tokens(waiting, first + step * start, step, 0, N, C, cols, inside, L, False)
        for k in tl.static_range(L):
            soma = tl.zeros((BC,), tl.float32)
            after = ()
            for m in tl.static_range(0, 2 * M, 2):
                if REAL:
                    re = z[m] * state[m] + tokens[k]
                    im = z[m + 1] * state[m + 1] + tokens[k]
                    soma += 2 * w[m] * re
                    soma += 2 * w[m + 1] * im
                else:
                    re = z[m] * state[m] + (tokens[k] - z[m + 1] * state[m + 1])
                    im = z[m] * state[m + 1] + z[m + 1] * state[m]
                    soma += 2 * w[m] * re
                    soma -= 2 * w[m + 1] * im
                # Tokens beyond the sequence must not let the state decay further.
                if KEEP:
                    re = tl.where(start + k < N, re, state[m])
                    im = tl.where(start + k < N, im, state[m + 1])
                after = after + (re, im)
            state = after
            if waiting is not None:
                soma += others[k]
            _store_token(out, first + step * (start + k), soma, C, cols, inside & (start + k < N))
        tokens = following
    return state


@triton.jit
def _dendrite_forward(
    u, decay, frequency, weight, state_in, waiting, out, state_out, N: tl.constexpr, C: tl.constexpr, M: tl.constexpr,
    L: tl.constexpr, LARGEST: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    blocks: tl.constexpr = (C + BC - 1) // BC
    cols = (tl.program_id(0) % blocks) * BC + tl.arange(0, BC)
    inside = existing_columns(cols, C, BC)
    b = (tl.program_id(0) // blocks).to(tl.int64)
    u += b * N * C
    out += b * N * C
    state = zero_tiles(2 * M, BC)
    if waiting is not None:
        waiting += b * N * C
        z = _load_poles(decay, frequency, C + cols, inside, M, LARGEST)
        w = _load_pairs(weight, C + cols, inside, M)
        _walk(u, z, w, state, None, waiting, cols, inside, -1, False, frequency is None, N, C, M, L, BC)
        tl.debug_barrier()  # a lane may read what another one wrote
    if state_in is not None:
        state = _load_pairs(state_in + b * C * M * 2, cols, inside, M)
    keep: tl.constexpr = state_out is not None
    z = _load_poles(decay, frequency, cols, inside, M, LARGEST)
    w = _load_pairs(weight, cols, inside, M)
    state = _walk(u, z, w, state, waiting, out, cols, inside, 1, keep, frequency is None, N, C, M, L, BC)
    if state_out is not None:
        for k in tl.static_range(2 * M):
            tl.store(state_out + b * C * M * 2 + cols * (2 * M) + k, state[k], mask=inside)


@triton.jit
def _walk_back(
    source, bit, z, w, grad, waiting, grad_u, sums, cols, inside, step: tl.constexpr, REAL: tl.constexpr,
    N: tl.constexpr, C: tl.constexpr, M: tl.constexpr, L: tl.constexpr, PACKED: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The gradient of the tokens of a sequence, walked against the direction of the modes (from the last token on with
    `step` -1), and added to that which is `waiting`, if any. Returns `sums` with those of this sequence."""
    first: tl.constexpr = 0 if step == 1 else N - 1
    state = zero_tiles(4 * M, BC)  # q and p
    tokens = _load_tokens(source, first, step, bit, N, C, cols, inside, L, PACKED)
    grads = _load_tokens(grad, first, step, 0, N, C, cols, inside, L, False)
    for start in range(0, N, L):
        following = first + step * (start + L)
        next_tokens = _load_tokens(source, following, step, bit, N, C, cols, inside, L, PACKED)
        next_grads = _load_tokens(grad, following, step, 0, N, C, cols, inside, L, False)
        if waiting is not None:
            others = _load_tokens(waiting, first + step * start, step, 0, N, C, cols, inside, L, False)
        for k in tl.static_range(L):
            total = tl.zeros((BC,), tl.float32)
            after = ()
            added = ()
            for m in tl.static_range(M):
                z_re = z[2 * m]
                z_im = z[2 * m + 1]
                if REAL:
                    zq_re = z_re * state[4 * m]
                    q_im = z_im * state[4 * m + 1]
                    p_re = z_re * state[4 * m + 2] + zq_re
                    p_im = z_im * state[4 * m + 3] + q_im
                    q_re = zq_re + grads[k]
                    q_im += grads[k]
                    total += 2 * w[2 * m] * q_re
                    total += 2 * w[2 * m + 1] * q_im
                else:
                    zq_re = z_re * state[4 * m] - z_im * state[4 * m + 1]
                    q_im = z_re * state[4 * m + 1] + z_im * state[4 * m]
                    p_re = z_re * state[4 * m + 2] + (zq_re - z_im * state[4 * m + 3])
                    p_im = z_re * state[4 * m + 3] + (q_im + z_im * state[4 * m + 2])
                    q_re = zq_re + grads[k]
                    total += 2 * w[2 * m] * q_re
                    total -= 2 * w[2 * m + 1] * q_im
                after = after + (q_re, q_im, p_re, p_im)
            for m in tl.static_range(4 * M):
                added = added + (sums[m] + tokens[k] * after[m],)
            state = after
            sums = added
            if waiting is not None:
                total += others[k]
            _store_token(grad_u, first + step * (start + k), total, C, cols, inside & (start + k < N))
        tokens = next_tokens
        grads = next_grads
    return sums


@triton.jit
def _dendrite_backward(
    u, decay, frequency, weight, grad, waiting, grad_u, partial, B, STEP_IMAGES, N: tl.constexpr, C: tl.constexpr,
    M: tl.constexpr, L: tl.constexpr, LARGEST: tl.constexpr, PACKED: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    cols = tl.program_id(0) * BC + tl.arange(0, BC)
    inside = existing_columns(cols, C, BC)
    z = _load_poles(decay, frequency, cols, inside, M, LARGEST)
    w = _load_pairs(weight, cols, inside, M)
    sums = zero_tiles(4 * M, BC)  # of u q and u p: two parts each, for every mode
    if waiting is not None:
        z_back = _load_poles(decay, frequency, C + cols, inside, M, LARGEST)
        w_back = _load_pairs(weight, C + cols, inside, M)
        sums_back = zero_tiles(4 * M, BC)
    for sequence in range(tl.program_id(1), B, tl.num_programs(1)):
        base = tl.cast(sequence, tl.int64) * N * C
        source, bit = spike_source(u, sequence, N * C, STEP_IMAGES, PACKED)
        first_out = grad_u + base if waiting is None else waiting + base
        sums = _walk_back(
            source, bit, z, w, grad + base, None, first_out, sums, cols, inside, -1, frequency is None, N, C, M, L,
            PACKED, BC,
        )  # fmt: skip
        if waiting is not None:
            tl.debug_barrier()
            sums_back = _walk_back(
                source, bit, z_back, w_back, grad + base, waiting + base, grad_u + base, sums_back, cols, inside, 1,
                frequency is None, N, C, M, L, PACKED, BC,
            )  # fmt: skip
    directions: tl.constexpr = 1 if waiting is None else 2
    partial += tl.program_id(1) * (4 * M * directions) * C + cols
    for m in tl.static_range(4 * M):
        tl.store(partial + m * C, sums[m], mask=inside)
        if waiting is not None:
            tl.store(partial + (4 * M + m) * C, sums_back[m], mask=inside)


@triton.jit
def _finish(
    partial, weight, grad_decay, grad_frequency, grad_weight, G, C, M: tl.constexpr, BG: tl.constexpr, BC: tl.constexpr
):
    cols = tl.program_id(0) * BC + tl.arange(0, BC)
    m = tl.program_id(1)  # over the modes of all directions
    inside = cols < C
    at = tl.arange(0, BG)
    sums = ()
    for part in tl.static_range(4):
        acc = tl.zeros((BG, BC), tl.float32)
        for start in range(0, G, BG):
            pointer = partial + ((start + at)[:, None] * (4 * tl.num_programs(1)) + 4 * m + part) * C + cols[None, :]
            acc += tl.load(pointer, mask=(start + at < G)[:, None] & inside[None, :], other=0.0)
        sums = sums + (tl.sum(acc, 0),)
    here = (m // M * C + cols) * M + m % M
    w_re = tl.load(weight + here * 2, mask=inside, other=0.0)
    w_im = tl.load(weight + here * 2 + 1, mask=inside, other=0.0)
    tl.store(grad_weight + here * 2, 2 * sums[0], mask=inside)
    if grad_frequency is None:
        tl.store(grad_weight + here * 2 + 1, 2 * sums[1], mask=inside)
        tl.store(grad_decay + here * 2, -2 * w_re * sums[2], mask=inside)
        tl.store(grad_decay + here * 2 + 1, -2 * w_im * sums[3], mask=inside)
    else:
        tl.store(grad_weight + here * 2 + 1, -2 * sums[1], mask=inside)
        tl.store(grad_decay + here, -2 * (w_re * sums[2] - w_im * sums[3]), mask=inside)
        tl.store(grad_frequency + here, -2 * (w_re * sums[3] + w_im * sums[2]), mask=inside)


def _waiting(weight: Tensor, out: Tensor) -> Tensor | None:
    """Where the sums of one direction wait for those of the other, in float32: `out` itself if it can hold them."""
    if weight.dim() == 3:
        return None
    return out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)


def _options(tokens: int, channels: int, modes: int) -> dict[str, Any]:
    return {"N": tokens, "C": channels, "M": modes, "L": TOKENS, "LARGEST": LARGEST_DECAY}


def _channels(x: Tensor, offered: tuple[int, ...]) -> Any:
    return choices(x.device, BC=tuple(map(machine_of(x.device).channels, offered)), lanes=(1,))


def as_read(*tensors: Tensor | None) -> list[Any]:
    """Modes and states, where there are any, as the kernels read them."""
    return [None if t is None else t.float().contiguous() for t in tensors]


def launch(
    u: Tensor, decay: Tensor, frequency: Tensor | None, weight: Tensor, dtype: torch.dtype, state: Tensor | None,
    keep_state: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Potentials in `dtype` of contiguous tokens, and the last state."""
    batch, tokens, channels = u.shape
    modes = weight.shape[-2]
    out = torch.empty_like(u, dtype=dtype)
    state_out = weight.new_empty(batch, channels, modes, 2) if keep_state else None
    launch_tuned(
        _dendrite_forward, lambda o: (programs_for(channels, o["BC"]) * batch,), _channels(u, FORWARD_CHANNELS),
        u, decay, frequency, weight, state, _waiting(weight, out), out, state_out, **_options(tokens, channels, modes),
    )  # fmt: skip
    return out, state_out


def launch_backward(
    u: Tensor, decay: Tensor, frequency: Tensor | None, weight: Tensor, grad: Tensor, packed: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Gradients of the tokens, in `dtype`, and of the modes. `u` are the tokens, or their bits if they are `packed`."""
    grad = grad.contiguous()
    batch, tokens, channels = grad.shape
    modes, machine, offered = weight.shape[-2], machine_of(u.device), _channels(u, BACKWARD_CHANNELS)
    sets = weight.numel() // (2 * channels)  # modes of all directions
    # A program takes several sequences, so that its sums are few beside the tokens it reads. How many decides the order
    # of a sum: it does not depend on what was tried.
    programs = max(1, min(batch, machine.walkers // programs_for(channels, offered[0]["BC"])))
    partial = weight.new_empty(programs, 4 * sets, channels)
    grad_u = torch.empty_like(grad, dtype=dtype)
    launch_tuned(
        _dendrite_backward, lambda o: (programs_for(channels, o["BC"]), programs), offered,
        u, decay, frequency, weight, grad, _waiting(weight, grad_u), grad_u, partial, batch, u.shape[0],
        PACKED=packed, **_options(tokens, channels, modes),
    )  # fmt: skip
    out = tuple(None if t is None else torch.empty_like(t) for t in (decay, frequency, weight))
    _finish[(programs_for(channels, 32), sets)](
        partial, weight, *out, programs, channels, M=modes, BG=32, BC=32, num_warps=machine.warps(128)
    )
    return grad_u, *out


class Dendrite(torch.autograd.Function):
    """See `dendrite`; potentials in `dtype`, float32 inside. With a state, going in or coming out, nothing is
    differentiated."""

    @staticmethod
    def forward(
        ctx: Any, u: Tensor, decay: Tensor, frequency: Tensor | None, weight: Tensor, dtype: torch.dtype,
        packed: Tensor | None, state: Tensor | None, keep_state: bool,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        u = u.contiguous()
        decay, weight, frequency, state = as_read(decay, weight, frequency, state)
        out = launch(u, decay, frequency, weight, dtype, state, keep_state)
        ctx.save_for_backward(u if packed is None else packed.contiguous(), decay, frequency, weight)
        ctx.given = (packed is not None, u.dtype)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        first_derivative_only()
        return *launch_backward(*ctx.saved_tensors, grads[0], *ctx.given), None, None, None, None
