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

from lrfdyn.ops.column_mask_triton import existing_columns
from lrfdyn.ops.dispatch import first_derivative_only

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
def _load_values(x, i, cols, inside, step, S: tl.constexpr, H, W: tl.constexpr, PACKED: tl.constexpr):
    """The same; packed, the spikes of one time step out of bytes that hold all of them."""
    if PACKED:
        row = ()
        for j in tl.static_range(W):
            bits = tl.load(x + (i * W + j) * S + cols, mask=inside, other=0).to(tl.int32)
            row = row + (((bits >> step) & 1).to(tl.float32),)
    else:
        row = _load_row(x, i, cols, inside, S, H, W)
    return row


@triton.jit
def _image(x, image, size, IMAGES, PACKED: tl.constexpr):
    """An image of x, and its time step: packed, all steps of an image share their bytes."""
    step = image // IMAGES
    if PACKED:
        image = image % IMAGES
    return x + tl.cast(image, tl.int64) * size, step


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
    x, weight, residual, out, B, H, C: tl.constexpr, XS: tl.constexpr, DILATIONS: tl.constexpr, COUNT: tl.constexpr,
    W: tl.constexpr, RESIDUAL: tl.constexpr, IDENTITY: tl.constexpr, IMAGES: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    cols = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = existing_columns(cols, C, BC)
    taps = _load_taps(weight, cols, inside, C, COUNT, False)
    for image in range(tl.program_id(0) * IMAGES, tl.minimum(B, (tl.program_id(0) + 1) * IMAGES)):
        base = tl.cast(image, tl.int64) * H * W * C
        source = x + tl.cast(image, tl.int64) * H * W * XS
        for i in range(H):
            here = _load_row(source, i, cols, inside, XS, H, W)
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
                above = _load_row(source, i - DILATIONS[n], cols, inside, XS, H, W)
                acc = _add_taps(acc, above, taps, 9 * n, DILATIONS[n], W)
                below = _load_row(source, i + DILATIONS[n], cols, inside, XS, H, W)
                acc = _add_taps(acc, below, taps, 9 * n + 6, DILATIONS[n], W)
            for j in tl.static_range(W):
                tl.store(out + base + (i * W + j) * C + cols, acc[j].to(out.dtype.element_ty), mask=inside)


@triton.jit
def _lrf_backward(
    x, weight, grad, grad_x, partial, B, H, STEP_IMAGES, C: tl.constexpr, XS: tl.constexpr, DILATIONS: tl.constexpr,
    COUNT: tl.constexpr, W: tl.constexpr, IDENTITY: tl.constexpr, PACKED: tl.constexpr, IMAGES: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    cols = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = existing_columns(cols, C, BC)
    taps = _load_taps(weight, cols, inside, C, COUNT, True)
    sums = ()
    for _k in tl.static_range(9 * COUNT):
        sums = sums + (tl.zeros((BC,), tl.float32),)
    for image in range(tl.program_id(0) * IMAGES, tl.minimum(B, (tl.program_id(0) + 1) * IMAGES)):
        base = tl.cast(image, tl.int64) * H * W * C
        source, step = _image(x, image, H * W * XS, STEP_IMAGES, PACKED)
        for i in range(H):
            value = _load_values(source, i, cols, inside, step, XS, H, W, PACKED)
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
def _load_grid(x, cols, inside, S: tl.constexpr, N: tl.constexpr):
    """All tokens of a small grid, S apart, as they are stored."""
    grid = ()
    for n in tl.static_range(N):
        grid = grid + (tl.load(x + n * S + cols, mask=inside, other=0),)
    return grid


@triton.jit
def _row(grid, i: tl.constexpr, W: tl.constexpr):
    row = ()
    for j in tl.static_range(W):
        row = row + (grid[i * W + j].to(tl.float32),)
    return row


@triton.jit
def _values(row, step, W: tl.constexpr, PACKED: tl.constexpr):
    """A loaded row in float32; packed, one time step of it."""
    out = ()
    for j in tl.static_range(W):
        if PACKED:
            out = out + (((row[j].to(tl.int32) >> step) & 1).to(tl.float32),)
        else:
            out = out + (row[j].to(tl.float32),)
    return out


@triton.jit
def _lrf_forward_whole(
    x, weight, residual, out, B, C: tl.constexpr, XS: tl.constexpr, DILATIONS: tl.constexpr, COUNT: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr, RESIDUAL: tl.constexpr, IDENTITY: tl.constexpr, IMAGES: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    cols = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = existing_columns(cols, C, BC)
    taps = _load_taps(weight, cols, inside, C, COUNT, False)
    for image in range(tl.program_id(0) * IMAGES, tl.minimum(B, (tl.program_id(0) + 1) * IMAGES)):
        base = tl.cast(image, tl.int64) * (H * W) * C
        grid = _load_grid(x + tl.cast(image, tl.int64) * (H * W) * XS, cols, inside, XS, H * W)
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
    x, weight, grad, grad_x, partial, B, STEP_IMAGES, C: tl.constexpr, XS: tl.constexpr, DILATIONS: tl.constexpr,
    COUNT: tl.constexpr, H: tl.constexpr, W: tl.constexpr, IDENTITY: tl.constexpr, PACKED: tl.constexpr,
    IMAGES: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    cols = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = existing_columns(cols, C, BC)
    taps = _load_taps(weight, cols, inside, C, COUNT, True)
    sums = ()
    for _k in tl.static_range(9 * COUNT):
        sums = sums + (tl.zeros((BC,), tl.float32),)
    for image in range(tl.program_id(0) * IMAGES, tl.minimum(B, (tl.program_id(0) + 1) * IMAGES)):
        base = tl.cast(image, tl.int64) * (H * W) * C
        grid = _load_grid(grad + base, cols, inside, C, H * W)
        source, step = _image(x, image, H * W * XS, STEP_IMAGES, PACKED)
        following = _load_grid(source, cols, inside, XS, W)
        for i in tl.static_range(H):
            value = _values(following, step, W, PACKED)
            if i + 1 < H:
                following = _load_grid(source + (i + 1) * W * XS, cols, inside, XS, W)
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
        kernel = _lrf_forward_whole if height * width <= WHOLE else _lrf_forward
        kernel[(triton.cdiv(batch, images), triton.cdiv(channels, bc))](
            x, taps, residual, out, batch, H=height, C=channels, XS=step, DILATIONS=dilations, COUNT=len(dilations),
            W=width, RESIDUAL=residual is not None, IDENTITY=identity, IMAGES=images, BC=bc, num_warps=1,
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
        kernel = _lrf_backward_whole if whole else _lrf_backward
        kernel[(programs, triton.cdiv(channels, bc))](
            x, taps, grad, grad_x, partial, batch, H=height, STEP_IMAGES=x.shape[0], C=channels, XS=step,
            DILATIONS=dilations, COUNT=len(dilations), W=width, IDENTITY=identity, PACKED=packed, IMAGES=images, BC=bc,
            num_warps=1,
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
