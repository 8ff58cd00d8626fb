"""Batch norm and neuron in the fewest passes over memory.

Tensors are `[T, M, C]`: channels are the fast axis, M = B*H*W neurons per channel, time has a constant stride.

    forward    statistics: read x          apply: read x, write spikes
    backward   sums: read x, g             apply: read x, g, write the gradient of x

Each statistics or sums kernel leaves one partial result per program, and a small kernel adds them in a fixed order:
no atomics, the same bits every time. Potentials and spikes are computed again from x in both backward kernels. The
max pool (`pool_triton.py`) reads spikes as bits, so that those before the pool never exist in memory.

Narrow layers are seen as wider ones: F rows of C channels are one row of F*C, in which channel c returns every C
columns, so that all loads are whole cache lines. C below is that width, CHANNELS the true one.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor

from lrfdyn.ops.bn_lif import passes_triton as passes
from lrfdyn.ops.bn_lif.pool_triton import pool_kernel, unpool_kernel
from lrfdyn.ops.bn_lif.reference import Integer, Norm
from lrfdyn.ops.dispatch import first_derivative_only
from lrfdyn.ops.gradient_memory import learn_reference_counts, may_overwrite
from lrfdyn.ops.lif.reference import Dynamics
from lrfdyn.ops.spike_conv import channels_last

MOST_STEPS = 8
# Elements of one time step per program: apply kernels, sums, statistics (several such tiles at once).
TILE, SUMS_TILE, STATISTICS_TILE, STATISTICS_UNROLL = 1024, 512, 1024, 4
# Partial sums and channels per turn of the kernels that finish them.
FINISH = {"BG": 128, "BC": 8}
# Programs per kernel that reduces: a few for each multiprocessor of a large GPU.
REDUCERS = 1056


def channel_block(channels: int) -> int:
    """Channels per program: whole cache lines, and no idle lanes where the width allows."""
    fitting = (block for block in (128, 64, 32) if channels % block == 0)
    return next(fitting, min(64, triton.next_power_of_2(channels)))


def widened(channels: int, neurons: int) -> tuple[int, int]:
    """Rows of `channels` per row of a kernel, so that it is a multiple of 128 wide, and the columns per program."""
    factor = 128 // math.gcd(128, channels)
    factor = factor if neurons % factor == 0 else 1
    return factor, channel_block(channels * factor)


def dense_rows(x: Tensor) -> Tensor:
    """`[T, B, C, H, W]` stored as `[T, B, H, W, C]`, copied only if it is not."""
    rows = x.permute(0, 1, 3, 4, 2)
    if rows.is_contiguous() or rows.stride(4) != 1 or {rows.stride(i) for i in (0, 2, 3)} != {0}:
        return channels_last(x)
    # The gradient of a mean over time and space: one row per image, which the library would copy by elements.
    (steps, batch, height, width, channels), dense = rows.shape, rows.new_empty(rows.shape)
    passes.repeat_rows_kernel[(steps * batch,)](
        rows, dense, rows.stride(1), batch, height * width, channels,
        BN=8, BC=triton.next_power_of_2(min(channels, 512)),
    )  # fmt: skip
    return dense.permute(0, 1, 4, 2, 3)


def new_like(x: Tensor, steps: int, grid: tuple[int, int] | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """An empty channels-last tensor of `steps` time steps, on `grid` or in `dtype` if they differ."""
    _, batch, channels, height, width = x.shape
    height, width = grid or (height, width)
    return x.new_empty(steps, batch, height, width, channels, dtype=dtype).permute(0, 1, 4, 2, 3)


class BnLif(torch.autograd.Function):
    """See `bn_lif`; up to `MOST_STEPS` steps, no pool of integer spikes. Returns spikes, and their bits or None."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, offset: Tensor | None, residual: Tensor | None, norm: Norm,
        d: Dynamics | Integer, repeats: int, pool: bool,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        learn_reference_counts()
        # For this backward pass and that of whoever reads the spikes; tensors of inference mode have none. Sums with a
        # residual are no spikes, and integer spikes no bits.
        pack = not torch.is_inference_mode_enabled() and residual is None and not isinstance(d, Integer)
        x = dense_rows(x)
        steps, batch, channels, height, width = x.shape
        time, neurons = steps * repeats, batch * height * width
        factor, bc = widened(channels, neurons)
        lines, wide, _ = sizes = (neurons // factor, channels * factor, channels)
        columns, br = triton.cdiv(wide, bc), STATISTICS_TILE // bc
        stats = torch.empty(3, channels, dtype=torch.float32, device=x.device)
        programs = min(triton.cdiv(steps * lines, br * STATISTICS_UNROLL), max(1, REDUCERS // columns))
        partial = stats.new_empty(2, programs * factor, channels)
        if norm.training:
            passes.statistics_kernel[(programs, columns)](
                x, partial, steps * lines, wide, channels, BR=br, BC=bc, UNROLL=STATISTICS_UNROLL
            )
        count = time * neurons
        passes.finish_statistics_kernel[(triton.cdiv(channels, FINISH["BC"]),)](
            x, partial, weight, offset, norm.running_mean, norm.running_var, stats, programs * factor, channels,
            float(steps * neurons), count / max(count - 1, 1), norm.momentum, norm.eps, TRAINING=norm.training, **FINISH
        )  # fmt: skip

        dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
        out = None if pool else new_like(x, time, dtype=dtype)
        packed = x.new_empty(batch, height, width, channels, dtype=torch.uint8) if pack or pool else None
        residual = None if residual is None else dense_rows(residual)
        options = {"D": d, "T": time, "REPEATED": repeats > 1, "INTEGER": isinstance(d, Integer), "BC": bc}
        passes.apply_kernel[(triton.cdiv(lines, TILE // bc), columns)](
            x, stats, bias, residual, out, packed, *sizes, BM=TILE // bc, num_warps=8, **options
        )
        codes = None
        if pool:
            grid = ((height + 1) // 2, (width + 1) // 2)
            out = new_like(x, time, grid)
            pooled = batch * grid[0] * grid[1]
            unpooled, packed = packed, None
            if pack:
                codes = x.new_empty(pooled, channels, dtype=torch.int16 if time <= 4 else torch.int32)
                packed = x.new_empty(batch, *grid, channels, dtype=torch.uint8)
            bc = channel_block(channels)
            pool_kernel[(triton.cdiv(pooled, TILE // bc), triton.cdiv(channels, bc))](
                unpooled, out, packed, codes, pooled, channels, height, width, *grid, T=time, BM=TILE // bc,
                BC=bc, num_warps=2,
            )  # fmt: skip
        ctx.save_for_backward(x, stats, weight, bias, codes)
        ctx.given = (options, sizes, factor, norm.training, offset if offset is None else offset.shape, count)
        return out, None if packed is None else packed.permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        first_derivative_only()
        x, stats, weight, bias, codes = ctx.saved_tensors
        options, sizes, factor, training, offset, count = ctx.given
        with_residual = ctx.needs_input_grad[4]
        mine = not with_residual and may_overwrite(grads[0])
        grad = dense_rows(grads[0])
        lines, wide, channels = sizes
        time, bc = options["T"], options["BC"]
        if codes is not None:
            pooled, grad, mine = grad, new_like(x, time), True
            windows, block = pooled.shape[3] * pooled.shape[4], channel_block(channels)
            bm = max(1, min(TILE // block, triton.next_power_of_2(windows)))
            unpool_kernel[(triton.cdiv(windows, bm), triton.cdiv(channels, block), x.shape[1])](
                pooled, codes, grad, channels, *x.shape[3:], *pooled.shape[3:], codes.numel(), lines * wide, T=time,
                BM=bm, BC=block, num_warps=8,
            )  # fmt: skip
        columns, bs = triton.cdiv(wide, bc), SUMS_TILE // bc
        programs = min(triton.cdiv(lines, bs), max(1, REDUCERS // columns))
        partial = stats.new_empty(2, programs * factor, channels)
        passes.sums_kernel[(programs, columns)](x, stats, bias, grad, partial, *sizes, BM=bs, **options)
        grad_weight, grad_bias, means = torch.empty_like(weight), torch.empty_like(bias), stats.new_empty(2, channels)
        passes.finish_sums_kernel[(triton.cdiv(channels, FINISH["BC"]),)](
            partial, stats, grad_weight, grad_bias, means, programs * factor, channels, float(count), TRAINING=training,
            **FINISH,
        )  # fmt: skip
        # A gradient that nobody else holds is not needed any more: the result takes its memory.
        grad_x = grad if mine and not options["REPEATED"] and grad.dtype == x.dtype else torch.empty_like(x)
        passes.apply_backward_kernel[(triton.cdiv(lines, TILE // bc), columns)](
            x, stats, bias, grad, means, grad_x, *sizes, BM=TILE // bc, num_warps=8, **options
        )
        grad_offset = None
        if ctx.needs_input_grad[3]:
            # The norm takes the offset away again in training; outside it is a shift like the bias, scaled.
            grad_offset = torch.zeros_like(grad_bias) if training else grad_bias.float() * stats[2]
            grad_offset = grad_offset.reshape(offset)
        # Channels-last like everything else, or all sums along the residual stream would mix two layouts.
        residual = grad if with_residual else None
        return grad_x, grad_weight, grad_bias, grad_offset, residual, None, None, None, None
