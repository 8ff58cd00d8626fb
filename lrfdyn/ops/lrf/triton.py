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

# Channels and images per program.
FORWARD, BACKWARD, BACKWARD_WHOLE = (64, 1), (64, 2), (32, 4)
# Tokens of a grid that is held in registers as a whole.
WHOLE = 64


@triton.jit
def _inside(cols, C: tl.constexpr, BC: tl.constexpr):
    """Which columns exist; known to be all if the blocks fit."""
    if C % BC == 0:
        mask = tl.full((BC,), True, tl.int1)
    else:
        mask = cols < C
    return mask


@triton.jit
def _load_row(x, i, cols, inside, C: tl.constexpr, H, W: tl.constexpr):
    """The W tokens of row i in float32; zeros if there is no such row."""
    row = ()
    mask = inside & (i >= 0) & (i < H)
    for j in tl.static_range(W):
        row = row + (tl.load(x + (i * W + j) * C + cols, mask=mask, other=0.0).to(tl.float32),)
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
def _lrf_forward(
    x, weight, residual, out, B, H, C: tl.constexpr, DILATIONS: tl.constexpr, COUNT: tl.constexpr, W: tl.constexpr,
    RESIDUAL: tl.constexpr, IDENTITY: tl.constexpr, IMAGES: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    cols = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = _inside(cols, C, BC)
    taps = _load_taps(weight, cols, inside, C, COUNT, False)
    for image in range(tl.program_id(0) * IMAGES, tl.minimum(B, (tl.program_id(0) + 1) * IMAGES)):
        base = tl.cast(image, tl.int64) * H * W * C
        for i in range(H):
            here = _load_row(x + base, i, cols, inside, C, H, W)
            acc = ()
            if RESIDUAL:
                acc = _load_row(residual + base, i, cols, inside, C, H, W)
            elif IDENTITY:
                acc = here
            else:
                for _j in tl.static_range(W):
                    acc = acc + (tl.zeros((BC,), tl.float32),)
            for n in tl.static_range(COUNT):
                acc = _add_taps(acc, here, taps, 9 * n + 3, DILATIONS[n], W)
                above = _load_row(x + base, i - DILATIONS[n], cols, inside, C, H, W)
                acc = _add_taps(acc, above, taps, 9 * n, DILATIONS[n], W)
                below = _load_row(x + base, i + DILATIONS[n], cols, inside, C, H, W)
                acc = _add_taps(acc, below, taps, 9 * n + 6, DILATIONS[n], W)
            for j in tl.static_range(W):
                tl.store(out + base + (i * W + j) * C + cols, acc[j].to(out.dtype.element_ty), mask=inside)


@triton.jit
def _lrf_backward(
    x, weight, grad, grad_x, partial, B, H, C: tl.constexpr, DILATIONS: tl.constexpr, COUNT: tl.constexpr,
    W: tl.constexpr, IDENTITY: tl.constexpr, IMAGES: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    cols = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = _inside(cols, C, BC)
    taps = _load_taps(weight, cols, inside, C, COUNT, True)
    sums = ()
    for _k in tl.static_range(9 * COUNT):
        sums = sums + (tl.zeros((BC,), tl.float32),)
    for image in range(tl.program_id(0) * IMAGES, tl.minimum(B, (tl.program_id(0) + 1) * IMAGES)):
        base = tl.cast(image, tl.int64) * H * W * C
        for i in range(H):
            value = _load_row(x + base, i, cols, inside, C, H, W)
            here = _load_row(grad + base, i, cols, inside, C, H, W)
            acc = ()
            if IDENTITY:
                acc = here
            else:
                for _j in tl.static_range(W):
                    acc = acc + (tl.zeros((BC,), tl.float32),)
            for n in tl.static_range(COUNT):
                acc = _add_taps(acc, here, taps, 9 * n + 3, DILATIONS[n], W)
                sums = _tap_products(sums, here, value, 9 * n + 3, DILATIONS[n], W, 9 * COUNT)
                above = _load_row(grad + base, i - DILATIONS[n], cols, inside, C, H, W)
                acc = _add_taps(acc, above, taps, 9 * n, DILATIONS[n], W)
                sums = _tap_products(sums, above, value, 9 * n, DILATIONS[n], W, 9 * COUNT)
                below = _load_row(grad + base, i + DILATIONS[n], cols, inside, C, H, W)
                acc = _add_taps(acc, below, taps, 9 * n + 6, DILATIONS[n], W)
                sums = _tap_products(sums, below, value, 9 * n + 6, DILATIONS[n], W, 9 * COUNT)
            for j in tl.static_range(W):
                tl.store(grad_x + base + (i * W + j) * C + cols, acc[j].to(grad_x.dtype.element_ty), mask=inside)
    partial += tl.program_id(0).to(tl.int64) * (9 * COUNT) * C + cols
    for n in tl.static_range(COUNT):
        for k in tl.static_range(9):
            tl.store(partial + (9 * n + 8 - k) * C, sums[9 * n + k], mask=inside)


@triton.jit
def _load_grid(x, cols, inside, C: tl.constexpr, N: tl.constexpr):
    """All tokens of a small grid, as they are stored."""
    grid = ()
    for n in tl.static_range(N):
        grid = grid + (tl.load(x + n * C + cols, mask=inside, other=0.0),)
    return grid


@triton.jit
def _row(grid, i: tl.constexpr, W: tl.constexpr):
    row = ()
    for j in tl.static_range(W):
        row = row + (grid[i * W + j].to(tl.float32),)
    return row


@triton.jit
def _lrf_forward_whole(
    x, weight, residual, out, B, C: tl.constexpr, DILATIONS: tl.constexpr, COUNT: tl.constexpr, H: tl.constexpr,
    W: tl.constexpr, RESIDUAL: tl.constexpr, IDENTITY: tl.constexpr, IMAGES: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    cols = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = _inside(cols, C, BC)
    taps = _load_taps(weight, cols, inside, C, COUNT, False)
    for image in range(tl.program_id(0) * IMAGES, tl.minimum(B, (tl.program_id(0) + 1) * IMAGES)):
        base = tl.cast(image, tl.int64) * (H * W) * C
        grid = _load_grid(x + base, cols, inside, C, H * W)
        for i in tl.static_range(H):
            here = _row(grid, i, W)
            acc = ()
            if RESIDUAL:
                acc = _load_row(residual + base, i, cols, inside, C, H, W)
            elif IDENTITY:
                acc = here
            else:
                for _j in tl.static_range(W):
                    acc = acc + (tl.zeros((BC,), tl.float32),)
            for n in tl.static_range(COUNT):
                acc = _add_taps(acc, here, taps, 9 * n + 3, DILATIONS[n], W)
                if i - DILATIONS[n] >= 0:
                    acc = _add_taps(acc, _row(grid, i - DILATIONS[n], W), taps, 9 * n, DILATIONS[n], W)
                if i + DILATIONS[n] < H:
                    acc = _add_taps(acc, _row(grid, i + DILATIONS[n], W), taps, 9 * n + 6, DILATIONS[n], W)
            for j in tl.static_range(W):
                tl.store(out + base + (i * W + j) * C + cols, acc[j].to(out.dtype.element_ty), mask=inside)


@triton.jit
def _lrf_backward_whole(
    x, weight, grad, grad_x, partial, B, C: tl.constexpr, DILATIONS: tl.constexpr, COUNT: tl.constexpr, H: tl.constexpr,
    W: tl.constexpr, IDENTITY: tl.constexpr, IMAGES: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    cols = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = _inside(cols, C, BC)
    taps = _load_taps(weight, cols, inside, C, COUNT, True)
    sums = ()
    for _k in tl.static_range(9 * COUNT):
        sums = sums + (tl.zeros((BC,), tl.float32),)
    for image in range(tl.program_id(0) * IMAGES, tl.minimum(B, (tl.program_id(0) + 1) * IMAGES)):
        base = tl.cast(image, tl.int64) * (H * W) * C
        grid = _load_grid(grad + base, cols, inside, C, H * W)
        following = _load_grid(x + base, cols, inside, C, W)
        for i in tl.static_range(H):
            value = _row(following, 0, W)
            if i + 1 < H:
                following = _load_grid(x + base + (i + 1) * W * C, cols, inside, C, W)
            here = _row(grid, i, W)
            acc = ()
            if IDENTITY:
                acc = here
            else:
                for _j in tl.static_range(W):
                    acc = acc + (tl.zeros((BC,), tl.float32),)
            for n in tl.static_range(COUNT):
                acc = _add_taps(acc, here, taps, 9 * n + 3, DILATIONS[n], W)
                sums = _tap_products(sums, here, value, 9 * n + 3, DILATIONS[n], W, 9 * COUNT)
                if i - DILATIONS[n] >= 0:
                    above = _row(grid, i - DILATIONS[n], W)
                    acc = _add_taps(acc, above, taps, 9 * n, DILATIONS[n], W)
                    sums = _tap_products(sums, above, value, 9 * n, DILATIONS[n], W, 9 * COUNT)
                if i + DILATIONS[n] < H:
                    below = _row(grid, i + DILATIONS[n], W)
                    acc = _add_taps(acc, below, taps, 9 * n + 6, DILATIONS[n], W)
                    sums = _tap_products(sums, below, value, 9 * n + 6, DILATIONS[n], W, 9 * COUNT)
            for j in tl.static_range(W):
                tl.store(grad_x + base + (i * W + j) * C + cols, acc[j].to(grad_x.dtype.element_ty), mask=inside)
    partial += tl.program_id(0).to(tl.int64) * (9 * COUNT) * C + cols
    for n in tl.static_range(COUNT):
        for k in tl.static_range(9):
            tl.store(partial + (9 * n + 8 - k) * C, sums[9 * n + k], mask=inside)


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


class _Lrf(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, dilations: tuple[int, ...], residual: Tensor | None, identity: bool
    ) -> Tensor:
        x = _channels_last(x)
        batch, channels, height, width = x.shape
        taps = weight.flatten(2).mT.float().contiguous()
        residual = None if residual is None else _channels_last(residual)
        dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
        out = torch.empty_like(x, dtype=dtype, memory_format=torch.channels_last)
        bc, images = FORWARD
        kernel = _lrf_forward_whole if height * width <= WHOLE else _lrf_forward
        kernel[(triton.cdiv(batch, images), triton.cdiv(channels, bc))](
            x, taps, residual, out, batch, H=height, C=channels, DILATIONS=dilations, COUNT=len(dilations), W=width,
            RESIDUAL=residual is not None, IDENTITY=identity, IMAGES=images, BC=bc, num_warps=1,
        )  # fmt: skip
        ctx.save_for_backward(x, taps)
        ctx.given = (dilations, identity, weight.dtype)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, Tensor | None, None]:
        x, taps = ctx.saved_tensors
        dilations, identity, dtype = ctx.given
        grad = _channels_last(grads[0])
        batch, channels, height, width = x.shape
        whole = height * width <= WHOLE
        bc, images = BACKWARD_WHOLE if whole else BACKWARD
        programs = triton.cdiv(batch, images)
        partial = taps.new_empty(programs, len(dilations), 9, channels)
        grad_x = torch.empty_like(x)
        kernel = _lrf_backward_whole if whole else _lrf_backward
        kernel[(programs, triton.cdiv(channels, bc))](
            x, taps, grad, grad_x, partial, batch, H=height, C=channels, DILATIONS=dilations, COUNT=len(dilations),
            W=width, IDENTITY=identity, IMAGES=images, BC=bc, num_warps=1,
        )  # fmt: skip
        grad_weight = partial.sum(0).mT.unflatten(-1, (3, 3)).to(dtype)
        return grad_x, grad_weight, None, grad if ctx.needs_input_grad[3] else None, None


def lrf_triton(
    x: Tensor, weight: Tensor, dilations: Sequence[int], residual: Tensor | None = None, identity: bool = False
) -> Tensor:
    """See `lrf`; with `identity`, `x` itself is added as well. Rows are unrolled, so wide ones compile slowly."""
    return _Lrf.apply(x, weight, tuple(dilations), residual, identity)
