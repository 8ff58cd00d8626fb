"""The passes of batch norm and neuron over memory; see `triton.py`."""

from __future__ import annotations

import triton
import triton.language as tl

from lrfdyn.ops.lif.triton import current_gradients, fires, potentials, rounded
from lrfdyn.ops.tiles_triton import tile_of_program


@triton.jit
def statistics_kernel(
    x, partial, rows, C, CHANNELS, BR: tl.constexpr, BC: tl.constexpr, UNROLL: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """Sums of x - x[0] and of its square, per channel, over every G-th block of UNROLL * BR rows."""
    cols = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = cols < C
    # Shifting by one sample keeps the variance of channels whose mean is far larger than their spread.
    shift = tl.load(x + cols % CHANNELS, mask=inside, other=0.0).to(tl.float32)[None, :]
    at = tl.arange(0, BR)
    local = at[:, None] * C + cols[None, :]
    first = tl.zeros((BR, BC), tl.float32)
    second = tl.zeros((BR, BC), tl.float32)
    for block in tl.range(tl.program_id(0), tl.cdiv(rows, BR * UNROLL), tl.num_programs(0), num_stages=STAGES):
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
def load_steps(x, local, mask, plane, T: tl.constexpr, REPEATED: tl.constexpr):
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
def apply_kernel(
    x, stats, shift, residual, out, packed, M, C, CHANNELS, D: tl.constexpr, T: tl.constexpr, REPEATED: tl.constexpr,
    INTEGER: tl.constexpr, RESIDUAL: tl.constexpr, WRITE: tl.constexpr, PACK: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    start, cols, inside, local, mask = tile_of_program(M, C, BM, BC)
    plane = tl.cast(M, tl.int64) * C
    mean, scale, bias = load_norm(stats, shift, cols, inside, CHANNELS)
    tiles = load_steps(x + start * C, local, mask, plane, T, REPEATED)
    added = ()
    if RESIDUAL:
        added = load_steps(residual + start * C, local, mask, plane, T, False)
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
def load_norm(stats, shift, cols, inside, CHANNELS):
    """Mean, weight / deviation and bias of these columns."""
    channel = cols % CHANNELS
    mean = tl.load(stats + channel, mask=inside, other=0.0)[None, :]
    scale = tl.load(stats + 2 * CHANNELS + channel, mask=inside, other=0.0)[None, :]
    bias = tl.load(shift + channel, mask=inside, other=0.0).to(tl.float32)[None, :]
    return mean, scale, bias


@triton.jit
def normalised_gradients(
    tiles, grads, norm, D: tl.constexpr, T: tl.constexpr, INTEGER: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    """T tiles of x - mean, and T tiles of the gradient at the output of the norm, from tiles of x and of the gradient
    of the spikes."""
    mean, scale, bias = norm
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
    return centred, out


@triton.jit
def store_gradients(
    grad_x, local, mask, centred, grads, stats, means, cols, inside, plane, CHANNELS, T: tl.constexpr,
    REPEATED: tl.constexpr,
):  # fmt: skip
    """The gradient of x: that at the output of the norm less its two means, scaled."""
    channel = cols % CHANNELS
    scale = tl.load(stats + 2 * CHANNELS + channel, mask=inside, other=0.0)[None, :]
    first = tl.load(means + channel, mask=inside, other=0.0)[None, :]
    second = tl.load(means + CHANNELS + channel, mask=inside, other=0.0)[None, :]
    if REPEATED:
        total = grads[0] - first - centred[0] * second
        for t in tl.static_range(1, T):
            total += grads[t] - first - centred[t] * second
        tl.store(grad_x + local, (total * scale).to(grad_x.dtype.element_ty), mask=mask)
    else:
        for t in tl.static_range(T):
            value = (grads[t] - first - centred[t] * second) * scale
            tl.store(grad_x + local, value.to(grad_x.dtype.element_ty), mask=mask)
            grad_x += plane


@triton.jit
def sums_kernel(
    x, stats, shift, grad, partial, M, C, CHANNELS, D: tl.constexpr, T: tl.constexpr,
    REPEATED: tl.constexpr, INTEGER: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sums of the gradient and of the gradient times x - mean, over every G-th block of neurons."""
    cols = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = cols < C
    first = tl.zeros((BM, BC), tl.float32)
    second = tl.zeros((BM, BC), tl.float32)
    norm = load_norm(stats, shift, cols, inside, CHANNELS)
    plane = tl.cast(M, tl.int64) * C
    at = tl.arange(0, BM)
    local = at[:, None] * C + cols[None, :]
    for block in tl.range(tl.program_id(0), tl.cdiv(M, BM), tl.num_programs(0), num_stages=STAGES):
        start = tl.cast(block, tl.int64) * BM
        mask = (at < M - start)[:, None] & inside[None, :]
        tiles = load_steps(x + start * C, local, mask, plane, T, REPEATED)
        grads = load_steps(grad + start * C, local, mask, plane, T, False)
        centred, grads = normalised_gradients(tiles, grads, norm, D, T, INTEGER, BM, BC)
        for t in tl.static_range(T):
            first += grads[t]
            second += grads[t] * centred[t]
    out = partial + tl.program_id(0) * C + cols
    tl.store(out, tl.sum(first, 0), mask=inside)
    tl.store(out + tl.num_programs(0) * C, tl.sum(second, 0), mask=inside)


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
    if TRAINING:
        tl.store(means + cols, first / count, mask=inside)
        tl.store(means + C + cols, second * rstd * rstd / count, mask=inside)
    else:
        tl.store(means + cols, tl.zeros((BC,), tl.float32), mask=inside)
        tl.store(means + C + cols, tl.zeros((BC,), tl.float32), mask=inside)


@triton.jit
def apply_backward_kernel(
    x, stats, shift, grad, means, grad_x, M, C, CHANNELS, D: tl.constexpr, T: tl.constexpr,
    REPEATED: tl.constexpr, INTEGER: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    start, cols, inside, local, mask = tile_of_program(M, C, BM, BC)
    plane = tl.cast(M, tl.int64) * C
    tiles = load_steps(x + start * C, local, mask, plane, T, REPEATED)
    grads = load_steps(grad + start * C, local, mask, plane, T, False)
    norm = load_norm(stats, shift, cols, inside, CHANNELS)
    centred, grads = normalised_gradients(tiles, grads, norm, D, T, INTEGER, BM, BC)
    store_gradients(
        grad_x + start * C, local, mask, centred, grads, stats, means, cols, inside, plane, CHANNELS, T, REPEATED
    )


@triton.jit
def repeat_rows_kernel(x, out, stride, B, N, C, BN: tl.constexpr, BC: tl.constexpr):
    """Row b of x as all N tokens of image b, at every time step."""
    image = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BN)
    for start_c in range(0, C, BC):
        cols = start_c + tl.arange(0, BC)
        row = tl.load(x + (image % B) * stride + cols, mask=cols < C, other=0.0)
        for start in range(0, N, BN):
            n = start + at
            tl.store(
                out + image * N * C + n[:, None] * C + cols[None, :],
                tl.broadcast_to(row[None, :], (BN, BC)),
                mask=(n < N)[:, None] & (cols < C)[None, :],
            )
