"""All dilations in one pass over a channels-last grid.

A warp takes a block of channels and walks the rows of a few images, a lane its own channels. For every output row it
loads the rows that the taps reach, so a loaded value serves the taps of its whole row, and which taps fall off an edge
is known when the kernel is compiled. Backward, the same loads of the output's gradient serve both gradients,

    dX[q] = sum_o r_o G[q - o]        dr_o = sum_q G[q - o] X[q],

and the weight gradients stay in registers over all rows; each program leaves one partial sum, and they are added in a
fixed order. A grid of few tokens is held in registers as a whole, all its loads in flight at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lrfdyn.ops.dispatch import first_derivative_only
from lrfdyn.ops.machine import machine_of, programs_for
from lrfdyn.ops.tiles_triton import existing_columns, spike_source, spike_values, zero_tiles
from lrfdyn.ops.tuning import choices, launch_tuned

# Channels and images per program, of one warp: what is taken, then what may be tried. Backward a program adds up its
# images, so their number stays.
FORWARD = (64, 32, 128), (2, 1, 4)
BACKWARD, BACKWARD_WHOLE = ((64, 32), 2), ((32, 64), 8)
# Tokens of a grid that is held in registers as a whole.
WHOLE = 64


@dataclass(frozen=True)
class _Form:
    """What a kernel is compiled for."""

    channels: int
    step: int  # between tokens of what the stencils run over
    width: int
    rows: int  # of a grid that is held in registers as a whole, or 0
    dilations: tuple[int, ...]
    count: int  # of dilations
    identity: bool  # whether what the stencils run over is added to their output


@triton.jit
def _load_tokens(x, cols, mask, STEP: tl.constexpr, N: tl.constexpr):
    """N tokens, STEP apart, as they are stored."""
    tokens = ()
    for n in tl.static_range(N):
        tokens = tokens + (tl.load(x + n * STEP + cols, mask=mask, other=0),)
    return tokens


@triton.jit
def _row_of(tokens, i: tl.constexpr, step, W: tl.constexpr, PACKED: tl.constexpr):
    """Row i of loaded tokens in float32; PACKED, their spikes at one time step."""
    row = ()
    for j in tl.static_range(W):
        row = row + (spike_values(tokens[i * W + j], step, PACKED),)
    return row


@triton.jit
def _row(x, grid, i, cols, inside, H, STEP: tl.constexpr, F: tl.constexpr):
    """Row i in float32, out of a grid in registers; or loaded, and zeros if there is no such row."""
    if grid is None:
        tokens = _load_tokens(x + i * F.width * STEP, cols, inside & (i >= 0) & (i < H), STEP, F.width)
    return _row_of(tokens, 0, 0, F.width, False) if grid is None else _row_of(grid, i, 0, F.width, False)


@triton.jit
def _add_taps(acc, sums, row, value, taps, TAP: tl.constexpr, D: tl.constexpr, W: tl.constexpr, COUNT: tl.constexpr):
    """acc[j] + sum over b of taps[TAP + b] * row[j + b D], b = -1..1; and with a row `value`, sums with the products of
    value[j] and row[j + b D] added to entry TAP + b."""
    out = ()
    for j in tl.static_range(W):
        total = acc[j]
        for b in tl.static_range(3):
            if j + (b - 1) * D >= 0 and j + (b - 1) * D < W:
                total += taps[TAP + b] * row[j + (b - 1) * D]
        out = out + (total,)
    products = ()
    if value is not None:
        for k in tl.static_range(9 * COUNT):
            total = sums[k]
            if k >= TAP and k < TAP + 3:
                for j in tl.static_range(W):
                    if j + (k - TAP - 1) * D >= 0 and j + (k - TAP - 1) * D < W:
                        total += value[j] * row[j + (k - TAP - 1) * D]
            products = products + (total,)
    return out, products


@triton.jit
def _load_taps(weight, cols, inside, C: tl.constexpr, COUNT: tl.constexpr, FLIP: tl.constexpr):
    """Nine taps of every dilation, mirrored for the backward pass; the centre of all dilations as the first one's."""
    taps = ()
    for k in tl.static_range(9 * COUNT):
        if k % 9 == 4 and k > 4:
            taps = taps + (tl.zeros_like(taps[0]),)
        else:
            tap = tl.load(weight + (k - k % 9 + (8 - k % 9 if FLIP else k % 9)) * C + cols, mask=inside, other=0.0)
            if k == 4:
                for m in tl.static_range(1, COUNT):
                    tap += tl.load(weight + (9 * m + 4) * C + cols, mask=inside, other=0.0)
            taps = taps + (tap,)
    return taps


@triton.jit
def _stencils(x, grid, residual, out, value, sums, i, H, taps, cols, inside, F: tl.constexpr, BC: tl.constexpr):
    """Writes row i of the output, and with `value` adds to the sums."""
    W: tl.constexpr = F.width
    COUNT: tl.constexpr = F.count
    here = _row(x, grid, i, cols, inside, H, F.step, F)
    if residual is not None:
        acc = _row(residual, None, i, cols, inside, H, F.channels, F)
    elif F.identity:
        acc = here
    else:
        acc = zero_tiles(W, BC)
    for n in tl.static_range(COUNT):
        acc, sums = _add_taps(acc, sums, here, value, taps, 9 * n + 3, F.dilations[n], W, COUNT)
        for side in tl.static_range(-1, 2, 2):  # above, below
            if grid is None or (i + side * F.dilations[n] >= 0 and i + side * F.dilations[n] < H):
                row = _row(x, grid, i + side * F.dilations[n], cols, inside, H, F.step, F)
                acc, sums = _add_taps(acc, sums, row, value, taps, 9 * n + 3 + 3 * side, F.dilations[n], W, COUNT)
    for j in tl.static_range(W):
        tl.store(out + (i * W + j) * F.channels + cols, acc[j].to(out.dtype.element_ty), mask=inside)
    return sums


@triton.jit
def _lrf(
    x, weight, residual, out, tokens, partial, B, H, STEP_IMAGES, F: tl.constexpr, TS: tl.constexpr,
    PACKED: tl.constexpr, IMAGES: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The stencils over x. With `tokens`, TS apart, x is a gradient: then they are mirrored, and the weight gradients
    of this program go to `partial`."""
    cols = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = existing_columns(cols, F.channels, BC)
    taps = _load_taps(weight, cols, inside, F.channels, F.count, tokens is not None)
    sums = () if tokens is None else zero_tiles(9 * F.count, BC)
    ROWS: tl.constexpr = F.rows
    for image in range(tl.program_id(0) * IMAGES, tl.minimum(B, (tl.program_id(0) + 1) * IMAGES)):
        base = tl.cast(image, tl.int64) * H * F.width * F.channels
        source = x + tl.cast(image, tl.int64) * H * F.width * F.step
        added = None if residual is None else residual + base
        if tokens is not None:
            spikes, step = spike_source(tokens, image, H * F.width * TS, STEP_IMAGES, PACKED)
        if ROWS > 0:
            grid = _load_tokens(source, cols, inside, F.step, ROWS * F.width)
            if tokens is not None:
                following = _load_tokens(spikes, cols, inside, TS, F.width)
            for i in tl.static_range(ROWS):
                value = None if tokens is None else _row_of(following, 0, step, F.width, PACKED)
                if tokens is not None and i + 1 < ROWS:
                    following = _load_tokens(spikes + (i + 1) * F.width * TS, cols, inside, TS, F.width)
                sums = _stencils(source, grid, added, out + base, value, sums, i, ROWS, taps, cols, inside, F, BC)
        else:
            for i in range(H):
                value = None
                if tokens is not None:
                    loaded = _load_tokens(spikes + i * F.width * TS, cols, inside, TS, F.width)
                    value = _row_of(loaded, 0, step, F.width, PACKED)
                sums = _stencils(source, None, added, out + base, value, sums, i, H, taps, cols, inside, F, BC)
    if tokens is not None:
        partial += tl.program_id(0).to(tl.int64) * (9 * F.count) * F.channels + cols
        for k in tl.static_range(9 * F.count):
            tl.store(partial + (k - k % 9 + 8 - k % 9) * F.channels, sums[k], mask=inside)


def adjacent(x: Tensor) -> tuple[Tensor, int]:
    """`[B, C, H, W]` with channels adjacent and a constant step between tokens (C, or more where the channels are a
    part of wider rows), copied only if it is not; and that step."""
    _, channels, height, width = x.shape
    step = x.stride(3)
    if step < channels or x.stride() != (height * width * step, 1, width * step, step):
        return x.contiguous(memory_format=torch.channels_last), channels
    return x, step


def taps_of(weight: Tensor) -> Tensor:
    """`[dilations, 9, C]` in float32, as the kernel reads the weights."""
    return weight.flatten(2).mT.float().contiguous()


def new_tokens(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Empty, of the shape of `x`, in channels-last memory."""
    batch, channels, height, width = x.shape
    return torch.empty(batch, height, width, channels, dtype=dtype, device=x.device).permute(0, 3, 1, 2)


def _form(x: Tensor, step: int, dilations: tuple[int, ...], identity: bool) -> _Form:
    _, channels, height, width = x.shape
    rows = height if height * width <= WHOLE else 0
    return _Form(channels, step, width, rows, dilations, len(dilations), identity)


def launch(
    x: Tensor, step: int, taps: Tensor, dilations: tuple[int, ...], residual: Tensor | None, identity: bool
) -> Tensor:
    """The stencils over tokens that are `step` apart, with adjacent channels."""
    batch, channels, height, _ = x.shape
    residual = None if residual is None else residual.contiguous(memory_format=torch.channels_last)
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    out = new_tokens(x, dtype)
    machine, (columns, images) = machine_of(x.device), FORWARD
    launch_tuned(
        _lrf, lambda o: (programs_for(batch, o["IMAGES"]), programs_for(channels, o["BC"])),
        choices(x.device, BC=tuple(map(machine.channels, columns)), IMAGES=images, lanes=(1,)),
        x, taps, residual, out, None, None, batch, height, batch, F=_form(x, step, dilations, identity), TS=0,
        PACKED=False,
    )  # fmt: skip
    return out


def launch_backward(
    x: Tensor, taps: Tensor, grad: Tensor, dilations: tuple[int, ...], identity: bool, packed: bool,
    dtype: torch.dtype, weight_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of the tokens, in `dtype`, and of the weights, from a channels-last one. `x` are the tokens, or their
    bits if they are `packed`."""
    x, step = adjacent(x)
    batch, channels, height, _ = grad.shape
    form = _form(grad, channels, dilations, identity)
    machine, (columns, images) = machine_of(grad.device), BACKWARD_WHOLE if form.rows else BACKWARD
    programs = programs_for(batch, images)
    partial = taps.new_empty(programs, form.count, 9, channels)
    grad_x = torch.empty_like(grad, dtype=dtype, memory_format=torch.channels_last)
    launch_tuned(
        _lrf, lambda o: (programs, programs_for(channels, o["BC"])),
        choices(grad.device, BC=tuple(map(machine.channels, columns)), lanes=(1,)),
        grad, taps, None, grad_x, x, partial, batch, height, x.shape[0], F=form, TS=step, PACKED=packed,
        IMAGES=images,
    )  # fmt: skip
    return grad_x, partial.sum(0).mT.unflatten(-1, (3, 3)).to(weight_dtype)


class Lrf(torch.autograd.Function):
    """See `lrf`; with `identity`, `x` itself is added as well. Rows are unrolled, so wide ones compile slowly."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, dilations: tuple[int, ...], residual: Tensor | None, identity: bool,
        packed: Tensor | None,
    ) -> Tensor:  # fmt: skip
        x, step = adjacent(x)
        taps = taps_of(weight)
        out = launch(x, step, taps, dilations, residual, identity)
        ctx.save_for_backward(x if packed is None else packed, taps)
        ctx.given = (dilations, identity, packed is not None, x.dtype, weight.dtype)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, Tensor | None, None, None]:
        first_derivative_only()
        grad = grads[0].contiguous(memory_format=torch.channels_last)
        grad_x, grad_weight = launch_backward(*ctx.saved_tensors, grad, *ctx.given)
        return grad_x, grad_weight, None, grad if ctx.needs_input_grad[3] else None, None, None
