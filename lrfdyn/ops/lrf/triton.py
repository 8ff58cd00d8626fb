"""All dilations in one pass over a channels-last grid.

A warp takes a block of channels and walks the rows of a few images, a lane its own channels. For every output row it
loads the rows that the taps reach (a first-level cache hit but for the first time), so a loaded value serves the taps
of its whole row, and which taps fall off the left or right edge is known when the kernel is compiled. Backward, the
same loads of the output's gradient serve both gradients,

    dX[q] = sum_o r_o G[q - o]        dr_o = sum_q G[q - o] X[q],

and the weight gradients stay in registers over all rows: no lane ever needs another's. Each program leaves one partial
sum, and they are added in a fixed order. A grid of few tokens is held in registers as a whole, all its loads in flight
at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lrfdyn.ops.dispatch import first_derivative_only
from lrfdyn.ops.tiles_triton import existing_columns, spike_source, spike_values, zero_tiles

# Channels and images per program.
FORWARD, BACKWARD, BACKWARD_WHOLE = (64, 2), (64, 2), (32, 8)
# Tokens of a grid that is held in registers as a whole.
WHOLE = 64


@triton.jit
def _load_row(x, i, cols, inside, S: tl.constexpr, H, W: tl.constexpr):
    """The W tokens of row i, S apart, in float32; zeros if there is no such row."""
    row = ()
    mask = inside & (i >= 0) & (i < H)
    for j in tl.static_range(W):
        row = row + (tl.load(x + (i * W + j) * S + cols, mask=mask, other=0.0).to(tl.float32),)
    return row


@triton.jit
def _load_tokens(x, cols, inside, S: tl.constexpr, N: tl.constexpr):
    """N tokens, S apart, as they are stored."""
    tokens = ()
    for n in tl.static_range(N):
        tokens = tokens + (tl.load(x + n * S + cols, mask=inside, other=0),)
    return tokens


@triton.jit
def _row_of(tokens, i: tl.constexpr, step, W: tl.constexpr, PACKED: tl.constexpr):
    """Row i of loaded tokens in float32; PACKED, their spikes at one time step."""
    row = ()
    for j in tl.static_range(W):
        row = row + (spike_values(tokens[i * W + j], step, PACKED),)
    return row


@triton.jit
def _add_taps(acc, row, weight, tap: tl.constexpr, D: tl.constexpr, W: tl.constexpr):
    """acc[j] + sum over b of weight[tap + b] * row[j + b D], b = -1..1; the centre tap only if D is positive."""
    out = ()
    for j in tl.static_range(W):
        total = acc[j]
        for b in tl.static_range(3):
            if j + (b - 1) * D >= 0 and j + (b - 1) * D < W:
                total += weight[tap + b] * row[j + (b - 1) * D]
        out = out + (total,)
    return out


@triton.jit
def _tap_products(sums, row, other, tap: tl.constexpr, D: tl.constexpr, W: tl.constexpr, COUNT: tl.constexpr):
    """sums, with the products of other[j] and row[j + b D] added to entry tap + b."""
    out = ()
    for k in tl.static_range(COUNT):
        total = sums[k]
        if k >= tap and k < tap + 3:
            for j in tl.static_range(W):
                if j + (k - tap - 1) * D >= 0 and j + (k - tap - 1) * D < W:
                    total += other[j] * row[j + (k - tap - 1) * D]
        out = out + (total,)
    return out


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
def _row_taps(
    acc, sums, row, value, taps, tap: tl.constexpr, D: tl.constexpr, W: tl.constexpr, COUNT: tl.constexpr,
    PRODUCTS: tl.constexpr,
):  # fmt: skip
    """The three taps of one row added to acc, and with PRODUCTS their share of the weight gradients to sums."""
    acc = _add_taps(acc, row, taps, tap, D, W)
    if PRODUCTS:
        sums = _tap_products(sums, row, value, tap, D, W, 9 * COUNT)
    return acc, sums


@triton.jit
def _stencils(
    acc, sums, here, value, x, grid, i, taps, cols, inside, S: tl.constexpr, H, DILATIONS: tl.constexpr,
    COUNT: tl.constexpr, W: tl.constexpr, PRODUCTS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """All stencils around row i (`here`): its neighbours come from the grid in registers (WHOLE) or are loaded."""
    for n in tl.static_range(COUNT):
        acc, sums = _row_taps(acc, sums, here, value, taps, 9 * n + 3, DILATIONS[n], W, COUNT, PRODUCTS)
        for side in tl.static_range(2):  # above, below
            if WHOLE:
                if i + (2 * side - 1) * DILATIONS[n] >= 0 and i + (2 * side - 1) * DILATIONS[n] < H:
                    row = _row_of(grid, i + (2 * side - 1) * DILATIONS[n], 0, W, False)
                    acc, sums = _row_taps(
                        acc, sums, row, value, taps, 9 * n + 6 * side, DILATIONS[n], W, COUNT, PRODUCTS
                    )  # fmt: skip
            else:
                row = _load_row(x, i + (2 * side - 1) * DILATIONS[n], cols, inside, S, H, W)
                acc, sums = _row_taps(
                    acc, sums, row, value, taps, 9 * n + 6 * side, DILATIONS[n], W, COUNT, PRODUCTS
                )  # fmt: skip
    return acc, sums


@triton.jit
def _store_row(out, i, row, cols, inside, C: tl.constexpr, W: tl.constexpr):
    for j in tl.static_range(W):
        tl.store(out + (i * W + j) * C + cols, row[j].to(out.dtype.element_ty), mask=inside)


@triton.jit
def _forward_row(
    x, grid, residual, out, i, taps, cols, inside, H, C: tl.constexpr, XS: tl.constexpr, DILATIONS: tl.constexpr,
    COUNT: tl.constexpr, W: tl.constexpr, RESIDUAL: tl.constexpr, IDENTITY: tl.constexpr, BC: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    if WHOLE:
        here = _row_of(grid, i, 0, W, False)
    else:
        here = _load_row(x, i, cols, inside, XS, H, W)
    if RESIDUAL:
        acc = _load_row(residual, i, cols, inside, C, H, W)
    elif IDENTITY:
        acc = here
    else:
        acc = zero_tiles(W, BC)
    acc, _none = _stencils(
        acc, (), here, (), x, grid, i, taps, cols, inside, XS, H, DILATIONS, COUNT, W, False, WHOLE
    )  # fmt: skip
    _store_row(out, i, acc, cols, inside, C, W)


@triton.jit
def _lrf_forward(
    x, weight, residual, out, B, H, C: tl.constexpr, XS: tl.constexpr, DILATIONS: tl.constexpr, COUNT: tl.constexpr,
    W: tl.constexpr, ROWS: tl.constexpr, RESIDUAL: tl.constexpr, IDENTITY: tl.constexpr, IMAGES: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """ROWS: those of a grid that is held in registers as a whole, or 0."""
    cols = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = existing_columns(cols, C, BC)
    taps = _load_taps(weight, cols, inside, C, COUNT, False)
    for image in range(tl.program_id(0) * IMAGES, tl.minimum(B, (tl.program_id(0) + 1) * IMAGES)):
        base = tl.cast(image, tl.int64) * H * W * C
        source = x + tl.cast(image, tl.int64) * H * W * XS
        if ROWS > 0:
            grid = _load_tokens(source, cols, inside, XS, ROWS * W)
            for i in tl.static_range(ROWS):
                _forward_row(
                    source, grid, residual + base if RESIDUAL else residual, out + base, i, taps, cols, inside, ROWS,
                    C, XS, DILATIONS, COUNT, W, RESIDUAL, IDENTITY, BC, True,
                )  # fmt: skip
        else:
            for i in range(H):
                _forward_row(
                    source, (), residual + base if RESIDUAL else residual, out + base, i, taps, cols, inside, H,
                    C, XS, DILATIONS, COUNT, W, RESIDUAL, IDENTITY, BC, False,
                )  # fmt: skip


@triton.jit
def _backward_row(
    sums, value, here, grad, grid, grad_x, i, taps, cols, inside, H, C: tl.constexpr, DILATIONS: tl.constexpr,
    COUNT: tl.constexpr, W: tl.constexpr, IDENTITY: tl.constexpr, BC: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    if IDENTITY:
        acc = here
    else:
        acc = zero_tiles(W, BC)
    acc, sums = _stencils(
        acc, sums, here, value, grad, grid, i, taps, cols, inside, C, H, DILATIONS, COUNT, W, True, WHOLE
    )  # fmt: skip
    _store_row(grad_x, i, acc, cols, inside, C, W)
    return sums


@triton.jit
def _lrf_backward(
    x, weight, grad, grad_x, partial, B, H, STEP_IMAGES, C: tl.constexpr, XS: tl.constexpr, DILATIONS: tl.constexpr,
    COUNT: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr, IDENTITY: tl.constexpr, PACKED: tl.constexpr,
    IMAGES: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """ROWS: those of a grid that is held in registers as a whole, or 0."""
    cols = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = existing_columns(cols, C, BC)
    taps = _load_taps(weight, cols, inside, C, COUNT, True)
    sums = zero_tiles(9 * COUNT, BC)
    for image in range(tl.program_id(0) * IMAGES, tl.minimum(B, (tl.program_id(0) + 1) * IMAGES)):
        base = tl.cast(image, tl.int64) * H * W * C
        source, step = spike_source(x, image, H * W * XS, STEP_IMAGES, PACKED)
        if ROWS > 0:
            grid = _load_tokens(grad + base, cols, inside, C, ROWS * W)
            following = _load_tokens(source, cols, inside, XS, W)
            for i in tl.static_range(ROWS):
                value = _row_of(following, 0, step, W, PACKED)
                if i + 1 < ROWS:
                    following = _load_tokens(source + (i + 1) * W * XS, cols, inside, XS, W)
                sums = _backward_row(
                    sums, value, _row_of(grid, i, 0, W, False), grad + base, grid, grad_x + base, i, taps, cols, inside,
                    ROWS, C, DILATIONS, COUNT, W, IDENTITY, BC, True,
                )  # fmt: skip
        else:
            for i in range(H):
                value = _row_of(_load_tokens(source + i * W * XS, cols, inside, XS, W), 0, step, W, PACKED)
                here = _load_row(grad + base, i, cols, inside, C, H, W)
                sums = _backward_row(
                    sums, value, here, grad + base, (), grad_x + base, i, taps, cols, inside, H,
                    C, DILATIONS, COUNT, W, IDENTITY, BC, False,
                )  # fmt: skip
    partial += tl.program_id(0).to(tl.int64) * (9 * COUNT) * C + cols
    for n in tl.static_range(COUNT):
        for k in tl.static_range(9):
            tl.store(partial + (9 * n + 8 - k) * C, sums[9 * n + k], mask=inside)


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _tokens(x: Tensor) -> tuple[Tensor, int]:
    """`[B, C, H, W]` with channels adjacent and a constant step between tokens (C, or more where the channels are a
    part of wider rows), copied only if it is not; and that step."""
    _, channels, height, width = x.shape
    step = x.stride(3)
    if step < channels or x.stride() != (height * width * step, 1, width * step, step):
        return _channels_last(x), channels
    return x, step


class _Lrf(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, dilations: tuple[int, ...], residual: Tensor | None, identity: bool,
        packed: Tensor | None,
    ) -> Tensor:  # fmt: skip
        x, step = _tokens(x)
        batch, channels, height, width = x.shape
        taps = weight.flatten(2).mT.float().contiguous()
        residual = None if residual is None else _channels_last(residual)
        dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
        out = torch.empty(batch, height, width, channels, dtype=dtype, device=x.device).permute(0, 3, 1, 2)
        bc, images = FORWARD
        _lrf_forward[(triton.cdiv(batch, images), triton.cdiv(channels, bc))](
            x, taps, residual, out, batch, H=height, C=channels, XS=step, DILATIONS=dilations, COUNT=len(dilations),
            W=width, ROWS=height if height * width <= WHOLE else 0, RESIDUAL=residual is not None, IDENTITY=identity,
            IMAGES=images, BC=bc, num_warps=1,
        )  # fmt: skip
        ctx.save_for_backward(x if packed is None else packed, taps)
        ctx.given = (dilations, identity, weight.dtype, x.dtype, packed is not None)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, Tensor | None, None, None]:
        first_derivative_only()
        x, taps = ctx.saved_tensors
        dilations, identity, dtype, x_dtype, packed = ctx.given
        grad = _channels_last(grads[0])
        x, step = _tokens(x)
        batch, channels, height, width = grad.shape
        whole = height * width <= WHOLE
        bc, images = BACKWARD_WHOLE if whole else BACKWARD
        programs = triton.cdiv(batch, images)
        partial = taps.new_empty(programs, len(dilations), 9, channels)
        grad_x = torch.empty_like(grad, dtype=x_dtype, memory_format=torch.channels_last)
        _lrf_backward[(programs, triton.cdiv(channels, bc))](
            x, taps, grad, grad_x, partial, batch, H=height, STEP_IMAGES=x.shape[0], C=channels, XS=step,
            DILATIONS=dilations, COUNT=len(dilations), W=width, ROWS=height if whole else 0, IDENTITY=identity,
            PACKED=packed, IMAGES=images, BC=bc, num_warps=1,
        )  # fmt: skip
        grad_weight = partial.sum(0).mT.unflatten(-1, (3, 3)).to(dtype)
        return grad_x, grad_weight, None, grad if ctx.needs_input_grad[3] else None, None, None


def lrf_triton(
    x: Tensor,
    weight: Tensor,
    dilations: Sequence[int],
    residual: Tensor | None = None,
    identity: bool = False,
    packed: Tensor | None = None,
) -> Tensor:
    """See `lrf`; with `identity`, `x` itself is added as well. Rows are unrolled, so wide ones compile slowly."""
    return _Lrf.apply(x, weight, tuple(dilations), residual, identity, packed)
