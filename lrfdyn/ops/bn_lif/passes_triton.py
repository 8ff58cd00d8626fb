"""The passes of batch norm and neuron over memory; see `triton.py`."""

from __future__ import annotations

import triton
import triton.language as tl

from lrfdyn.ops.lif.triton import current_gradients, fire, rounded
from lrfdyn.ops.tiles_triton import load_steps


@triton.jit
def statistics_kernel(x, partial, rows, C, CHANNELS, BR: tl.constexpr, BC: tl.constexpr, UNROLL: tl.constexpr):
    """Sums of x - x[0] and of its square, per channel, over every G-th block of UNROLL * BR rows."""
    cols = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = cols < C
    # Shifting by one sample keeps the variance of channels whose mean is far larger than their spread.
    shift = tl.load(x + cols % CHANNELS, mask=inside, other=0.0).to(tl.float32)[None, :]
    at = tl.arange(0, BR)
    local = at[:, None] * C + cols[None, :]
    first = tl.zeros((BR, BC), tl.float32)
    second = tl.zeros((BR, BC), tl.float32)
    for block in tl.range(tl.program_id(0), tl.cdiv(rows, BR * UNROLL), tl.num_programs(0), num_stages=1):
        start = tl.cast(block, tl.int64) * (BR * UNROLL)
        # All loads of a turn are in flight before the first sum waits for one.
        tiles = ()
        for k in tl.static_range(UNROLL):
            mask = (at < rows - start - k * BR)[:, None] & inside[None, :]
            tiles = tiles + (tl.load(x + (start + k * BR) * C + local, mask=mask, other=0.0),)
        for k in tl.static_range(UNROLL):
            mask = (at < rows - start - k * BR)[:, None] & inside[None, :]
            value = tl.where(mask, tiles[k].to(tl.float32) - shift, 0.0)
            first += value
            second += value * value
    _store_partials(partial, first, second, cols, inside, C)


@triton.jit
def _store_partials(partial, first, second, cols, inside, C):
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
def finish_statistics_kernel(
    x, partial, weight, offset, running_mean, running_var, stats, G, C, count, unbiased, momentum, eps,
    TRAINING: tl.constexpr, BG: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """stats `[3, C]`: mean of x, 1 / deviation, weight / deviation. Updates the running statistics."""
    cols = tl.program_id(0) * BC + tl.arange(0, BC)
    inside = cols < C
    bias = tl.zeros((BC,), tl.float32)
    if offset is not None:
        bias = tl.load(offset + cols, mask=inside, other=0.0).to(tl.float32)
    if TRAINING:
        first, second = _sum_partials(partial, cols, inside, G, C, BG, BC)
    old_mean = tl.load(running_mean + cols, mask=inside, other=0.0).to(tl.float32)
    old_var = tl.load(running_var + cols, mask=inside, other=0.0).to(tl.float32)
    mean = old_mean - bias
    variance = old_var
    if TRAINING:
        shifted = first / count
        mean = shifted + tl.load(x + cols, mask=inside, other=0.0).to(tl.float32)
        variance = tl.maximum(second / count - shifted * shifted, 0.0)
        new_mean = old_mean + momentum * (mean + bias - old_mean)
        new_var = old_var + momentum * (variance * unbiased - old_var)
        tl.store(running_mean + cols, new_mean.to(running_mean.dtype.element_ty), mask=inside)
        tl.store(running_var + cols, new_var.to(running_var.dtype.element_ty), mask=inside)
    rstd = 1 / tl.sqrt(variance + eps)
    tl.store(stats + cols, mean, mask=inside)
    tl.store(stats + C + cols, rstd, mask=inside)
    tl.store(stats + 2 * C + cols, rstd * tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32), mask=inside)


@triton.jit
def _load_norm(stats, shift, cols, inside, CHANNELS):
    """Mean, weight / deviation and bias of these columns."""
    channel = cols % CHANNELS
    mean = tl.load(stats + channel, mask=inside, other=0.0)[None, :]
    scale = tl.load(stats + 2 * CHANNELS + channel, mask=inside, other=0.0)[None, :]
    bias = tl.load(shift + channel, mask=inside, other=0.0).to(tl.float32)[None, :]
    return mean, scale, bias


@triton.jit
def _normalised(tiles, norm, T: tl.constexpr):
    """T tiles of x - mean, and T tiles of what the norm makes of x."""
    mean, scale, bias = norm
    centred = ()
    currents = ()
    for t in tl.static_range(T):
        value = tiles[t] - mean
        centred = centred + (value,)
        currents = currents + (value * scale + bias,)
    return centred, currents


@triton.jit
def _tile_of_program(M, C, BM: tl.constexpr, BC: tl.constexpr):
    """Program (i, j)'s tile of a matrix `[M, C]`: where its first row begins, its columns `[BC]` and which of them
    exist, and for `[BM, BC]` elements their offsets from the first row and which of them exist.

    The first programs have the last rows: the pass before went down the rows, so these may still be in the cache, and
    so may the first rows when the next operation begins with them.
    """
    cols = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = cols < C
    start = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * BM
    at = tl.arange(0, BM)
    return start * C, cols, inside, at[:, None] * C + cols[None, :], (at < M - start)[:, None] & inside[None, :]


@triton.jit
def apply_kernel(
    x, stats, shift, residual, out, packed, M, C, CHANNELS, D: tl.constexpr, T: tl.constexpr, REPEATED: tl.constexpr,
    INTEGER: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """What a neuron makes of the normalised x, or without one (D is None) that itself, and the residual."""
    base, cols, inside, local, mask = _tile_of_program(M, C, BM, BC)
    plane = tl.cast(M, tl.int64) * C
    norm = _load_norm(stats, shift, cols, inside, CHANNELS)
    tiles = load_steps(x + base, local, mask, plane, T, REPEATED)
    if residual is not None:
        added = load_steps(residual + base, local, mask, plane, T, False)
    _centred, values = _normalised(tiles, norm, T)
    if D is not None and not INTEGER:
        _us, values, bits, _h = fire(values, tl.zeros((BM, BC), tl.float32), D, T)
    if out is not None:
        out += base
        for t in tl.static_range(T):
            value = rounded(values[t], D.levels) * D.scale if INTEGER else values[t].to(tl.float32)
            if residual is not None:
                value += added[t]
            tl.store(out + local, value.to(out.dtype.element_ty), mask=mask)
            out += plane
    if packed is not None:
        tl.store(packed + base + local, bits.to(tl.uint8), mask=mask)


@triton.jit
def _norm_gradients(tiles, grads, norm, D: tl.constexpr, T: tl.constexpr, INTEGER: tl.constexpr):
    """T tiles of x - mean, and T tiles of the gradient at the output of the norm, from tiles of x and of the gradient
    of the spikes."""
    centred, currents = _normalised(tiles, norm, T)  # beyond the tensor all gradients are zero, whatever stands here
    if D is None:
        out = grads
    elif INTEGER:
        out = ()
        for t in tl.static_range(T):
            z = currents[t]
            out = out + (tl.where((z >= 0) & (z <= D.levels), grads[t] * D.scale, 0.0),)
    else:
        rest = tl.zeros_like(grads[0])
        us, fired, _bits, _h = fire(currents, rest, D, T)
        out, _gh = current_gradients(us, fired, grads, rest, D, T)
    return centred, out


@triton.jit
def sums_kernel(
    x, stats, shift, grad, partial, M, C, CHANNELS, D: tl.constexpr, T: tl.constexpr,
    REPEATED: tl.constexpr, INTEGER: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Sums of the gradient and of the gradient times x - mean, over every G-th block of neurons."""
    cols = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = cols < C
    first = tl.zeros((BM, BC), tl.float32)
    second = tl.zeros((BM, BC), tl.float32)
    norm = _load_norm(stats, shift, cols, inside, CHANNELS)
    plane = tl.cast(M, tl.int64) * C
    at = tl.arange(0, BM)
    local = at[:, None] * C + cols[None, :]
    for block in tl.range(tl.program_id(0), tl.cdiv(M, BM), tl.num_programs(0), num_stages=1):
        start = tl.cast(block, tl.int64) * BM
        mask = (at < M - start)[:, None] & inside[None, :]
        tiles = load_steps(x + start * C, local, mask, plane, T, REPEATED)
        grads = load_steps(grad + start * C, local, mask, plane, T, False)
        centred, grads = _norm_gradients(tiles, grads, norm, D, T, INTEGER)
        for t in tl.static_range(T):
            first += grads[t]
            second += grads[t] * centred[t]
    _store_partials(partial, first, second, cols, inside, C)


@triton.jit
def finish_sums_kernel(
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
    zeros = tl.zeros_like(first)
    tl.store(means + cols, first / count if TRAINING else zeros, mask=inside)
    tl.store(means + C + cols, second * rstd * rstd / count if TRAINING else zeros, mask=inside)


@triton.jit
def apply_backward_kernel(
    x, stats, shift, grad, means, grad_x, M, C, CHANNELS, D: tl.constexpr, T: tl.constexpr,
    REPEATED: tl.constexpr, INTEGER: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The gradient of x: that at the output of the norm less its two means, scaled. Without `means` that at the output
    itself."""
    base, cols, inside, local, mask = _tile_of_program(M, C, BM, BC)
    plane = tl.cast(M, tl.int64) * C
    tiles = load_steps(x + base, local, mask, plane, T, REPEATED)
    grads = load_steps(grad + base, local, mask, plane, T, False)
    norm = _load_norm(stats, shift, cols, inside, CHANNELS)
    centred, grads = _norm_gradients(tiles, grads, norm, D, T, INTEGER)
    if means is not None:
        first = tl.load(means + cols % CHANNELS, mask=inside, other=0.0)[None, :]
        second = tl.load(means + CHANNELS + cols % CHANNELS, mask=inside, other=0.0)[None, :]
    grad_x += base
    total = tl.zeros((BM, BC), tl.float32)
    for t in tl.static_range(T):
        value = grads[t]
        if means is not None:
            value = value - first - centred[t] * second
        total = total + value if REPEATED and t > 0 else value
        if not REPEATED or t == T - 1:
            scaled = total if means is None else total * norm[1]
            tl.store(grad_x + local, scaled.to(grad_x.dtype.element_ty), mask=mask)
            grad_x += plane


@triton.jit
def repeat_rows_kernel(x, out, stride, B, N, C, BN: tl.constexpr, BC: tl.constexpr):
    """Row b of x as all N tokens of image b, at every time step."""
    image = tl.program_id(0).to(tl.int64)
    for start_c in range(0, C, BC):
        cols = start_c + tl.arange(0, BC)
        row = tl.load(x + (image % B) * stride + cols, mask=cols < C, other=0.0)
        for start in range(0, N, BN):
            n = start + tl.arange(0, BN)
            pointer = out + image * N * C + n[:, None] * C + cols[None, :]
            tl.store(pointer, tl.broadcast_to(row[None, :], (BN, BC)), mask=(n < N)[:, None] & (cols < C)[None, :])
