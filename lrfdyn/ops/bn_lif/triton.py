"""Batch norm and neuron in the fewest passes over memory.

Tensors are `[T, M, C]`: channels are the fast axis, M = B*H*W neurons per channel, time has a constant stride.

    forward    statistics: read x          apply: read x, write spikes
    backward   sums: read x, g             apply: read x, g, write the gradient of x

Each statistics or sums kernel leaves one partial result per program, and a small kernel adds them in a fixed order:
no atomics, the same bits every time. Potentials and spikes are computed again from x in both backward kernels. The
max pool works on spikes packed to one byte per neuron (a bit per time step), so the unpooled spikes never exist in
memory, and leaves a four-bit code per output and step, the place of the maximum in its window.

Narrow layers are seen as wider ones: F rows of C channels are one row of F*C, in which channel c returns every C
columns, so that all loads are whole cache lines. C below is that width, CHANNELS the true one.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lrfdyn.ops.bn_lif.reference import Integer, Norm
from lrfdyn.ops.lif.reference import Dynamics
from lrfdyn.ops.lif.triton import current_gradients, fires, potentials, rounded

MOST_STEPS = 8
# Elements of one time step per program: apply kernels, sums, statistics.
TILE, SUMS_TILE, STATISTICS_TILE = 1024, 512, 4096
# Programs per kernel that reduces: a few for each multiprocessor of a large GPU.
REDUCERS = 1056


@triton.jit
def _statistics(x, partial, rows, C, CHANNELS, BR: tl.constexpr, BC: tl.constexpr):
    """Sums of x - x[0] and of its square, per channel, over every G-th block of rows."""
    cols = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = cols < C
    # Shifting by one sample keeps the variance of channels whose mean is far larger than their spread.
    shift = tl.load(x + cols % CHANNELS, mask=inside, other=0.0).to(tl.float32)[None, :]
    at = tl.arange(0, BR)
    first = tl.zeros((BR, BC), tl.float32)
    second = tl.zeros((BR, BC), tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(rows, BR), tl.num_programs(0)):
        start = tl.cast(block, tl.int64) * BR
        mask = (at < rows - start)[:, None] & inside[None, :]
        value = tl.load(x + start * C + at[:, None] * C + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        value = tl.where(mask, value - shift, 0.0)
        first += value
        second += value * value
    out = partial + tl.program_id(0) * C + cols
    tl.store(out, tl.sum(first, 0), mask=inside)
    tl.store(out + tl.num_programs(0) * C, tl.sum(second, 0), mask=inside)


@triton.jit
def _sum_partials(partial, cols, inside, G, C, BG: tl.constexpr, BC: tl.constexpr):
    at = tl.arange(0, BG)
    first = tl.zeros((BG, BC), tl.float32)
    second = tl.zeros((BG, BC), tl.float32)
    for start in range(0, G, BG):
        mask = (start + at < G)[:, None] & inside[None, :]
        pointer = partial + (start + at)[:, None] * C + cols[None, :]
        first += tl.load(pointer, mask=mask, other=0.0)
        second += tl.load(pointer + G * C, mask=mask, other=0.0)
    return tl.sum(first, 0), tl.sum(second, 0)


@triton.jit
def _finish_statistics(
    x, partial, weight, offset, running_mean, running_var, stats, G, C, count, unbiased, momentum, eps,
    TRAINING: tl.constexpr, HAS_OFFSET: tl.constexpr, BG: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """stats `[3, C]`: mean of x, 1 / deviation, weight / deviation. Updates the running statistics."""
    cols = tl.program_id(0) * BC + tl.arange(0, BC)
    inside = cols < C
    bias = tl.zeros((BC,), tl.float32)
    if HAS_OFFSET:
        bias = tl.load(offset + cols, mask=inside, other=0.0).to(tl.float32)
    if TRAINING:
        first, second = _sum_partials(partial, cols, inside, G, C, BG, BC)
        shifted = first / count
        variance = tl.maximum(second / count - shifted * shifted, 0.0)
        mean = shifted + tl.load(x + cols, mask=inside, other=0.0).to(tl.float32)
        old_mean = tl.load(running_mean + cols, mask=inside, other=0.0).to(tl.float32)
        old_var = tl.load(running_var + cols, mask=inside, other=0.0).to(tl.float32)
        new_mean = old_mean + momentum * (mean + bias - old_mean)
        new_var = old_var + momentum * (variance * unbiased - old_var)
        tl.store(running_mean + cols, new_mean.to(running_mean.dtype.element_ty), mask=inside)
        tl.store(running_var + cols, new_var.to(running_var.dtype.element_ty), mask=inside)
    else:
        mean = tl.load(running_mean + cols, mask=inside, other=0.0).to(tl.float32) - bias
        variance = tl.load(running_var + cols, mask=inside, other=0.0).to(tl.float32)
    rstd = 1 / tl.sqrt(variance + eps)
    tl.store(stats + cols, mean, mask=inside)
    tl.store(stats + C + cols, rstd, mask=inside)
    tl.store(stats + 2 * C + cols, rstd * tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32), mask=inside)


@triton.jit
def _load_steps(x, local, mask, plane, T: tl.constexpr, REPEATED: tl.constexpr):
    """T tiles of x in float32; one tile T times if all steps are the same."""
    tiles = ()
    if REPEATED:
        tile = tl.load(x + local, mask=mask, other=0.0).to(tl.float32)
        for _t in tl.static_range(T):
            tiles = tiles + (tile,)
    else:
        for _t in tl.static_range(T):
            tiles = tiles + (tl.load(x + local, mask=mask, other=0.0).to(tl.float32),)
            x += plane
    return tiles


@triton.jit
def _apply(
    x, stats, shift, residual, out, packed, M, C, CHANNELS, D: tl.constexpr, T: tl.constexpr, REPEATED: tl.constexpr,
    INTEGER: tl.constexpr, RESIDUAL: tl.constexpr, WRITE: tl.constexpr, PACK: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    cols = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = cols < C
    start = tl.program_id(0).to(tl.int64) * BM
    at = tl.arange(0, BM)
    mask = (at < M - start)[:, None] & inside[None, :]
    local = at[:, None] * C + cols[None, :]
    plane = M * C
    channel = cols % CHANNELS
    mean = tl.load(stats + channel, mask=inside, other=0.0)[None, :]
    scale = tl.load(stats + 2 * CHANNELS + channel, mask=inside, other=0.0)[None, :]
    bias = tl.load(shift + channel, mask=inside, other=0.0).to(tl.float32)[None, :]
    tiles = _load_steps(x + start * C, local, mask, plane, T, REPEATED)
    added = ()
    if RESIDUAL:
        added = _load_steps(residual + start * C, local, mask, plane, T, False)
    currents = ()
    for t in tl.static_range(T):
        currents = currents + ((tiles[t] - mean) * scale + bias,)
    out += start * C
    if INTEGER:
        for t in tl.static_range(T):
            value = rounded(currents[t], D.levels) * D.scale
            if RESIDUAL:
                value += added[t]
            tl.store(out + local, value.to(out.dtype.element_ty), mask=mask)
            out += plane
    else:
        us, _h = potentials(currents, tl.zeros((BM, BC), tl.float32), D, T)
        bits = tl.zeros((BM, BC), tl.int32)
        for t in tl.static_range(T):
            over = fires(us[t], D)
            if WRITE:
                value = over.to(tl.float32)
                if RESIDUAL:
                    value += added[t]
                tl.store(out + local, value.to(out.dtype.element_ty), mask=mask)
                out += plane
            bits |= over.to(tl.int32) << t
        if PACK:
            tl.store(packed + start * C + local, bits.to(tl.uint8), mask=mask)


@triton.jit
def _spread(bits, T: tl.constexpr):
    """Bit t of a byte to the lowest bit of the t-th group of four."""
    out = bits & 1
    for t in tl.static_range(1, T):
        out |= (bits & (1 << t)) << (3 * t)
    return out


@triton.jit
def _pool(packed, out, packed_out, codes, OM, C, H, W, OH, OW, T: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr):
    """3x3 max pool, stride 2, of packed spikes: pooled spikes, and the first maximum of each window."""
    cols = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = cols < C
    start = tl.program_id(0).to(tl.int64) * BM
    at = tl.arange(0, BM)
    row = start + at
    there = row < OM
    oj = (row % OW).to(tl.int32)
    oi = ((row // OW) % OH).to(tl.int32)
    corner = (row // (OW * OH)) * H * W  # first neuron of the image
    taken = tl.zeros((BM, BC), tl.int32)
    code = tl.zeros((BM, BC), tl.int32)
    for k in tl.static_range(9):
        i = 2 * oi + (k // 3 - 1)
        j = 2 * oj + (k % 3 - 1)
        valid = there & (i >= 0) & (i < H) & (j >= 0) & (j < W)
        pointer = packed + (corner + i * W + j)[:, None] * C + cols[None, :]
        bits = tl.load(pointer, mask=valid[:, None] & inside[None, :], other=0).to(tl.int32)
        code |= _spread(bits & ~taken, T) * k
        taken |= bits
    # Where no neuron fired, all are equal and the first one inside the grid counts as the maximum.
    corner_code = tl.where(oi == 0, 3, 0) + tl.where(oj == 0, 1, 0)
    code |= _spread(~taken, T) * corner_code[:, None]
    local = at[:, None] * C + cols[None, :]
    mask = there[:, None] & inside[None, :]
    tl.store(codes + start * C + local, code.to(codes.dtype.element_ty), mask=mask)
    tl.store(packed_out + start * C + local, taken.to(tl.uint8), mask=mask)
    out += start * C
    plane = OM * C
    for t in tl.static_range(T):
        tl.store(out + local, ((taken >> t) & 1).to(tl.float32).to(out.dtype.element_ty), mask=mask)
        out += plane


@triton.jit
def _window(grad, codes, corner, oi, oj, there, cols, inside, C, OH, OW):
    """Offsets, validity and codes of the windows (oi, oj)."""
    mask = (there & (oi < OH) & (oj < OW))[:, None] & inside[None, :]
    offset = (corner + oi * OW + oj)[:, None] * C + cols[None, :]
    return offset, mask, tl.load(codes + offset, mask=mask, other=-1).to(tl.int32)


@triton.jit
def _take(grad, window, t: tl.constexpr):
    offset, mask, code = window
    return tl.load(grad + offset, mask=mask, other=0.0).to(tl.float32), (code >> (4 * t)) & 15


@triton.jit
def _unpool(
    grad, codes, out, C, H, W, OH, OW, plane, out_plane, T: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    """The gradient of the unpooled spikes: a neuron takes those of the windows whose maximum it was.

    A program takes windows of one image, and writes the two by two neurons that lie in each window and in none before:
    the centre, right of it (which the next window in the row sees too), below it, and the corner between four windows.
    """
    cols = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = cols < C
    image = tl.program_id(2).to(tl.int64)
    grad += image * OH * OW * C
    codes += image * OH * OW * C
    out += image * H * W * C
    o = tl.program_id(0) * BM + tl.arange(0, BM)
    there = o < OH * OW
    oi = o // OW
    oj = o % OW
    here = _window(grad, codes, 0, oi, oj, there, cols, inside, C, OH, OW)
    right = _window(grad, codes, 0, oi, oj + 1, there, cols, inside, C, OH, OW)
    below = _window(grad, codes, 0, oi + 1, oj, there, cols, inside, C, OH, OW)
    corner = _window(grad, codes, 0, oi + 1, oj + 1, there, cols, inside, C, OH, OW)
    offset = (2 * oi * W + 2 * oj)[:, None] * C + cols[None, :]
    mask = there[:, None] & inside[None, :]
    mask_right = mask & (2 * oj + 1 < W)[:, None]
    mask_below = mask & (2 * oi + 1 < H)[:, None]
    for t in tl.static_range(T):
        a, a_code = _take(grad, here, t)
        b, b_code = _take(grad, right, t)
        c, c_code = _take(grad, below, t)
        d, d_code = _take(grad, corner, t)
        ty = out.dtype.element_ty
        value = tl.where(a_code == 4, a, 0.0)
        tl.store(out + offset, value.to(ty), mask=mask)
        value = tl.where(a_code == 5, a, 0.0) + tl.where(b_code == 3, b, 0.0)
        tl.store(out + offset + C, value.to(ty), mask=mask_right)
        value = tl.where(a_code == 7, a, 0.0) + tl.where(c_code == 1, c, 0.0)
        tl.store(out + offset + W * C, value.to(ty), mask=mask_below)
        value = tl.where(a_code == 8, a, 0.0) + tl.where(b_code == 6, b, 0.0)
        value += tl.where(c_code == 2, c, 0.0) + tl.where(d_code == 0, d, 0.0)
        tl.store(out + offset + (W + 1) * C, value.to(ty), mask=mask_right & mask_below)
        grad += plane
        out += out_plane


@triton.jit
def _normalised_gradients(
    x, stats, shift, grad, start, cols, inside, M, C, CHANNELS, D: tl.constexpr, T: tl.constexpr,
    REPEATED: tl.constexpr, INTEGER: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """T tiles of x - mean, and T tiles of the gradient at the output of the norm."""
    at = tl.arange(0, BM)
    mask = (at < M - start)[:, None] & inside[None, :]
    local = at[:, None] * C + cols[None, :]
    tiles = _load_steps(x + start * C, local, mask, M * C, T, REPEATED)
    grads = _load_steps(grad + start * C, local, mask, M * C, T, False)
    channel = cols % CHANNELS
    mean = tl.load(stats + channel, mask=inside, other=0.0)[None, :]
    scale = tl.load(stats + 2 * CHANNELS + channel, mask=inside, other=0.0)[None, :]
    bias = tl.load(shift + channel, mask=inside, other=0.0).to(tl.float32)[None, :]
    centred = ()
    currents = ()
    for t in tl.static_range(T):
        value = tiles[t] - mean  # beyond the tensor all gradients are zero, whatever stands here
        centred = centred + (value,)
        currents = currents + (value * scale + bias,)
    if INTEGER:
        out = ()
        for t in tl.static_range(T):
            z = currents[t]
            out = out + (tl.where((z >= 0) & (z <= D.levels), grads[t] * D.scale, 0.0),)
    else:
        us, _h = potentials(currents, tl.zeros((BM, BC), tl.float32), D, T)
        out, _gh = current_gradients(us, grads, tl.zeros((BM, BC), tl.float32), D, T)
    return centred, out, mask, local


@triton.jit
def _sums(
    x, stats, shift, grad, partial, M, C, CHANNELS, D: tl.constexpr, T: tl.constexpr,
    REPEATED: tl.constexpr, INTEGER: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Sums of the gradient and of the gradient times x - mean, over every G-th block of neurons."""
    cols = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = cols < C
    first = tl.zeros((BM, BC), tl.float32)
    second = tl.zeros((BM, BC), tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(M, BM), tl.num_programs(0)):
        centred, grads, _mask, _local = _normalised_gradients(
            x, stats, shift, grad, tl.cast(block, tl.int64) * BM, cols, inside, M, C, CHANNELS,
            D, T, REPEATED, INTEGER, BM, BC,
        )  # fmt: skip
        for t in tl.static_range(T):
            first += grads[t]
            second += grads[t] * centred[t]
    out = partial + tl.program_id(0) * C + cols
    tl.store(out, tl.sum(first, 0), mask=inside)
    tl.store(out + tl.num_programs(0) * C, tl.sum(second, 0), mask=inside)


@triton.jit
def _finish_sums(
    partial, stats, grad_weight, grad_bias, means, G, C, count, TRAINING: tl.constexpr, BG: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """Gradients of weight and bias, and the two means that the gradient of x subtracts (zero outside training)."""
    cols = tl.program_id(0) * BC + tl.arange(0, BC)
    inside = cols < C
    first, second = _sum_partials(partial, cols, inside, G, C, BG, BC)
    rstd = tl.load(stats + C + cols, mask=inside, other=0.0)
    tl.store(grad_bias + cols, first.to(grad_bias.dtype.element_ty), mask=inside)
    tl.store(grad_weight + cols, (second * rstd).to(grad_weight.dtype.element_ty), mask=inside)
    if TRAINING:
        tl.store(means + cols, first / count, mask=inside)
        tl.store(means + C + cols, second * rstd * rstd / count, mask=inside)
    else:
        tl.store(means + cols, tl.zeros((BC,), tl.float32), mask=inside)
        tl.store(means + C + cols, tl.zeros((BC,), tl.float32), mask=inside)


@triton.jit
def _apply_backward(
    x, stats, shift, grad, means, grad_x, M, C, CHANNELS, D: tl.constexpr, T: tl.constexpr,
    REPEATED: tl.constexpr, INTEGER: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    cols = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = cols < C
    start = tl.program_id(0).to(tl.int64) * BM
    centred, grads, mask, local = _normalised_gradients(
        x, stats, shift, grad, start, cols, inside, M, C, CHANNELS, D, T, REPEATED, INTEGER, BM, BC
    )
    channel = cols % CHANNELS
    scale = tl.load(stats + 2 * CHANNELS + channel, mask=inside, other=0.0)[None, :]
    first = tl.load(means + channel, mask=inside, other=0.0)[None, :]
    second = tl.load(means + CHANNELS + channel, mask=inside, other=0.0)[None, :]
    grad_x += start * C
    if REPEATED:
        total = tl.zeros((BM, BC), tl.float32)
        for t in tl.static_range(T):
            total += grads[t] - first - centred[t] * second
        tl.store(grad_x + local, (total * scale).to(grad_x.dtype.element_ty), mask=mask)
    else:
        for t in tl.static_range(T):
            value = (grads[t] - first - centred[t] * second) * scale
            tl.store(grad_x + local, value.to(grad_x.dtype.element_ty), mask=mask)
            grad_x += M * C


def channel_block(channels: int) -> int:
    """Channels per program: whole cache lines, and no idle lanes where the width allows."""
    for block in (128, 64, 32):
        if channels % block == 0:
            return block
    return min(64, triton.next_power_of_2(channels))


def widened(channels: int, neurons: int) -> tuple[int, int]:
    """Rows of `channels` per row of a kernel, so that it is a multiple of 128 wide, and the columns per program."""
    factor = 128 // math.gcd(128, channels)
    factor = factor if neurons % factor == 0 else 1
    return factor, channel_block(channels * factor)


def channels_last(x: Tensor) -> Tensor:
    """`[T, B, C, H, W]` stored as `[T, B, H, W, C]`, copied only if it is not."""
    return x.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)


def new_like(x: Tensor, steps: int, grid: tuple[int, int] | None = None) -> Tensor:
    """An empty channels-last tensor of `steps` time steps, on `grid` if it differs."""
    _, batch, channels, height, width = x.shape
    height, width = grid or (height, width)
    return x.new_empty(steps, batch, height, width, channels).permute(0, 1, 4, 2, 3)


class _BnLif(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, offset: Tensor | None, residual: Tensor | None, norm: Norm,
        d: Dynamics | Integer, repeats: int, pool: bool, pack: bool,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        x = channels_last(x)
        steps, batch, channels, height, width = x.shape
        neurons = batch * height * width
        factor, bc = widened(channels, neurons)
        lines, wide = neurons // factor, channels * factor
        bm, br = TILE // bc, STATISTICS_TILE // bc
        columns = triton.cdiv(wide, bc)
        stats = torch.empty(3, channels, dtype=torch.float32, device=x.device)
        programs = min(triton.cdiv(steps * lines, br), max(1, REDUCERS // columns))
        partial = stats.new_empty(2, programs * factor, channels)
        if norm.training:
            _statistics[(programs, columns)](x, partial, steps * lines, wide, channels, BR=br, BC=bc)
        count = steps * repeats * neurons
        _finish_statistics[(triton.cdiv(channels, 16),)](
            x, partial, weight, offset, norm.running_mean, norm.running_var, stats, programs * factor, channels,
            float(steps * neurons), count / max(count - 1, 1), norm.momentum, norm.eps,
            TRAINING=norm.training, HAS_OFFSET=offset is not None, BG=128, BC=16,
        )  # fmt: skip

        time = steps * repeats
        out = x if pool else new_like(x, time)
        packed = x.new_empty(batch, height, width, channels, dtype=torch.uint8) if pack else None
        residual = None if residual is None else channels_last(residual)
        _apply[(triton.cdiv(lines, bm), columns)](
            x, stats, bias, residual, out, packed, lines, wide, channels, D=d, T=time, REPEATED=repeats > 1,
            INTEGER=isinstance(d, Integer), RESIDUAL=residual is not None, WRITE=not pool, PACK=packed is not None,
            BM=bm, BC=bc,
        )  # fmt: skip
        codes = None
        if pool:
            grid = ((height + 1) // 2, (width + 1) // 2)
            out = new_like(x, time, grid)
            pooled = batch * grid[0] * grid[1]
            codes = x.new_empty(pooled, channels, dtype=torch.int16 if time <= 4 else torch.int32)
            unpooled, packed = packed, x.new_empty(batch, *grid, channels, dtype=torch.uint8)
            bc = channel_block(channels)
            _pool[(triton.cdiv(pooled, TILE // bc), triton.cdiv(channels, bc))](
                unpooled, out, packed, codes, pooled, channels, height, width, *grid, T=time, BM=TILE // bc, BC=bc
            )
        ctx.save_for_backward(x, stats, weight, bias, codes)
        ctx.given = (d, repeats, norm.training, offset if offset is None else offset.shape, count)
        if packed is not None:
            packed = packed.permute(0, 3, 1, 2)
            ctx.mark_non_differentiable(packed)
        return out, packed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, stats, weight, bias, codes = ctx.saved_tensors
        d, repeats, training, offset, count = ctx.given
        grad = channels_last(grads[0])
        steps, batch, channels, height, width = x.shape
        time, neurons = steps * repeats, batch * height * width
        if codes is not None:
            pooled, grad = grad, new_like(x, time)
            grid = pooled.shape[3:]
            bc = channel_block(channels)
            bm = max(1, min(TILE // bc, triton.next_power_of_2(grid[0] * grid[1])))
            _unpool[(triton.cdiv(grid[0] * grid[1], bm), triton.cdiv(channels, bc), batch)](
                pooled, codes, grad, channels, height, width, *grid, codes.numel(), neurons * channels, T=time,
                BM=bm, BC=bc,
            )  # fmt: skip
        factor, bc = widened(channels, neurons)
        lines, wide = neurons // factor, channels * factor
        bm, bs = TILE // bc, SUMS_TILE // bc
        columns = triton.cdiv(wide, bc)
        programs = min(triton.cdiv(lines, bs), max(1, REDUCERS // columns))
        partial = stats.new_empty(2, programs * factor, channels)
        options: dict[str, Any] = {
            "D": d, "T": time, "REPEATED": repeats > 1, "INTEGER": isinstance(d, Integer), "BC": bc
        }  # fmt: skip
        sizes = (lines, wide, channels)
        _sums[(programs, columns)](x, stats, bias, grad, partial, *sizes, BM=bs, **options)
        grad_weight, grad_bias, means = torch.empty_like(weight), torch.empty_like(bias), stats.new_empty(2, channels)
        _finish_sums[(triton.cdiv(channels, 16),)](
            partial, stats, grad_weight, grad_bias, means, programs * factor, channels, float(count),
            TRAINING=training, BG=128, BC=16,
        )  # fmt: skip
        grad_x = torch.empty_like(x)
        _apply_backward[(triton.cdiv(lines, bm), columns)](
            x, stats, bias, grad, means, grad_x, *sizes, BM=bm, **options
        )
        grad_offset = None
        if ctx.needs_input_grad[3]:
            # The norm takes the offset away again in training; outside it is a shift like the bias, scaled.
            grad_offset = torch.zeros_like(grad_bias) if training else grad_bias.float() * stats[2]
            grad_offset = grad_offset.reshape(offset)
        # Channels-last like everything else, or all sums along the residual stream would mix two layouts.
        residual = grad if ctx.needs_input_grad[4] else None
        return grad_x, grad_weight, grad_bias, grad_offset, residual, None, None, None, None, None


def bn_lif_triton(
    x: Tensor,
    norm: Norm,
    dynamics: Dynamics | Integer,
    offset: Tensor | None = None,
    repeats: int = 1,
    residual: Tensor | None = None,
    pool: bool = False,
) -> Tensor:
    # Sums with a residual are no spikes, and integer spikes no bits.
    pack = residual is None and not isinstance(dynamics, Integer)
    out, packed = _BnLif.apply(x, norm.weight, norm.bias, offset, residual, norm, dynamics, repeats, pool, pack)
    if packed is not None:
        out.packed = packed
    return out
