"""Batch norm and neuron in the fewest passes over memory.

Tensors are `[T, M, C]`: channels are the fast axis, M = B*H*W neurons per channel, time has a constant stride.

    forward    statistics: read x          apply: read x, write spikes
    backward   sums: read x, g             apply: read x, g, write the gradient of x

Each statistics or sums kernel leaves one partial result per program, and a small kernel adds them in a fixed order:
no atomics, the same bits every time. Potentials and spikes are computed again from x in both backward kernels. The
max pool (`pool_triton.py`) works on spikes packed to one byte per neuron (a bit per time step), so the unpooled spikes
never exist in memory, and leaves a four-bit code per output and step, the place of the maximum in its window.

Narrow layers are seen as wider ones: F rows of C channels are one row of F*C, in which channel c returns every C
columns, so that all loads are whole cache lines. C below is that width, CHANNELS the true one.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor

from lrfdyn.ops.bn_lif.passes_triton import (
    apply_backward_kernel,
    apply_kernel,
    finish_statistics_kernel,
    finish_sums_kernel,
    repeat_rows_kernel,
    statistics_kernel,
    sums_kernel,
)
from lrfdyn.ops.bn_lif.pool_triton import pool_kernel, unpool_kernel
from lrfdyn.ops.bn_lif.reference import Integer, Norm
from lrfdyn.ops.dispatch import first_derivative_only
from lrfdyn.ops.gradient_memory import learn_reference_counts, may_overwrite
from lrfdyn.ops.lif.reference import Dynamics
from lrfdyn.ops.step_bits import attach_step_bits

MOST_STEPS = 8
# Elements of one time step per program: apply kernels, sums, statistics (several such tiles at once).
TILE, SUMS_TILE, STATISTICS_TILE, STATISTICS_UNROLL = 1024, 512, 1024, 4
# Turns of the loop whose loads are in flight together: statistics, sums.
STAGES = (1, 1)
# Partial sums and channels per turn of the kernels that finish them.
FINISH = (128, 8)
# Programs per kernel that reduces: a few for each multiprocessor of a large GPU.
REDUCERS = 1056


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
    rows = x.permute(0, 1, 3, 4, 2)
    if rows.is_contiguous():
        return x
    if rows.stride()[-1] == 1 and {rows.stride(i) for i in (0, 2, 3)} == {0}:
        # The gradient of a mean over time and space: one row per image, which the library would copy by elements.
        dense = rows.new_empty(rows.shape)
        repeat_rows_kernel[(rows.shape[0] * rows.shape[1],)](
            rows, dense, rows.stride(1), rows.shape[1], rows.shape[2] * rows.shape[3], rows.shape[4],
            BN=8, BC=triton.next_power_of_2(min(rows.shape[4], 512)),
        )  # fmt: skip
        return dense.permute(0, 1, 4, 2, 3)
    return rows.contiguous().permute(0, 1, 4, 2, 3)


def _plane(time: int) -> int:
    """Bits of a plane of the pool's codes."""
    return 4 if time <= 4 else 8


def new_like(x: Tensor, steps: int, grid: tuple[int, int] | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """An empty channels-last tensor of `steps` time steps, on `grid` or in `dtype` if they differ."""
    _, batch, channels, height, width = x.shape
    height, width = grid or (height, width)
    return x.new_empty(steps, batch, height, width, channels, dtype=dtype).permute(0, 1, 4, 2, 3)


class _BnLif(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, offset: Tensor | None, residual: Tensor | None, norm: Norm,
        d: Dynamics | Integer, repeats: int, pool: bool, pack: bool,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        learn_reference_counts()
        x = channels_last(x)
        steps, batch, channels, height, width = x.shape
        neurons = batch * height * width
        factor, bc = widened(channels, neurons)
        lines, wide = neurons // factor, channels * factor
        bm, br = TILE // bc, STATISTICS_TILE // bc
        columns = triton.cdiv(wide, bc)
        stats = torch.empty(3, channels, dtype=torch.float32, device=x.device)
        programs = min(triton.cdiv(steps * lines, br * STATISTICS_UNROLL), max(1, REDUCERS // columns))
        partial = stats.new_empty(2, programs * factor, channels)
        if norm.training:
            statistics_kernel[(programs, columns)](
                x, partial, steps * lines, wide, channels, BR=br, BC=bc, UNROLL=STATISTICS_UNROLL, STAGES=STAGES[0]
            )
        count = steps * repeats * neurons
        finish_statistics_kernel[(triton.cdiv(channels, FINISH[1]),)](
            x, partial, weight, offset, norm.running_mean, norm.running_var, stats, programs * factor, channels,
            float(steps * neurons), count / max(count - 1, 1), norm.momentum, norm.eps,
            TRAINING=norm.training, HAS_OFFSET=offset is not None, BG=FINISH[0], BC=FINISH[1],
        )  # fmt: skip

        time = steps * repeats
        dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
        out = x if pool else new_like(x, time, dtype=dtype)
        packed = x.new_empty(batch, height, width, channels, dtype=torch.uint8) if pack or pool else None
        residual = None if residual is None else channels_last(residual)
        apply_kernel[(triton.cdiv(lines, bm), columns)](
            x, stats, bias, residual, out, packed, lines, wide, channels, D=d, T=time, REPEATED=repeats > 1,
            INTEGER=isinstance(d, Integer), RESIDUAL=residual is not None, WRITE=not pool, PACK=packed is not None,
            BM=bm, BC=bc, num_warps=8,
        )  # fmt: skip
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
                unpooled, out, packed, codes, pooled, channels, height, width, *grid, T=time, PLANE=_plane(time),
                KEEP=pack, BM=TILE // bc, BC=bc, num_warps=2,
            )  # fmt: skip
        ctx.save_for_backward(x, stats, weight, bias, codes)
        ctx.given = (d, repeats, norm.training, offset if offset is None else offset.shape, count)
        if packed is not None:
            packed = packed.permute(0, 3, 1, 2)
            ctx.mark_non_differentiable(packed)
        return out, packed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        first_derivative_only()
        x, stats, weight, bias, codes = ctx.saved_tensors
        d, repeats, training, offset, count = ctx.given
        with_residual = ctx.needs_input_grad[4]
        mine = not with_residual and may_overwrite(grads[0])
        grad = channels_last(grads[0])
        steps, batch, channels, height, width = x.shape
        time, neurons = steps * repeats, batch * height * width
        if codes is not None:
            pooled, grad, mine = grad, new_like(x, time), True
            grid = pooled.shape[3:]
            bc = channel_block(channels)
            bm = max(1, min(TILE // bc, triton.next_power_of_2(grid[0] * grid[1])))
            unpool_kernel[(triton.cdiv(grid[0] * grid[1], bm), triton.cdiv(channels, bc), batch)](
                pooled, codes, grad, channels, height, width, *grid, codes.numel(), neurons * channels, T=time,
                PLANE=_plane(time), BM=bm, BC=bc, num_warps=8,
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
        sums_kernel[(programs, columns)](x, stats, bias, grad, partial, *sizes, BM=bs, STAGES=STAGES[1], **options)
        grad_weight, grad_bias, means = torch.empty_like(weight), torch.empty_like(bias), stats.new_empty(2, channels)
        finish_sums_kernel[(triton.cdiv(channels, FINISH[1]),)](
            partial, stats, grad_weight, grad_bias, means, programs * factor, channels, float(count),
            TRAINING=training, BG=FINISH[0], BC=FINISH[1],
        )  # fmt: skip
        # A gradient that nobody else holds is not needed any more: the result takes its memory.
        grad_x = grad if mine and repeats == 1 and grad.dtype == x.dtype else torch.empty_like(x)
        apply_backward_kernel[(triton.cdiv(lines, bm), columns)](
            x, stats, bias, grad, means, grad_x, *sizes, BM=bm, num_warps=8, **options
        )
        grad_offset = None
        if ctx.needs_input_grad[3]:
            # The norm takes the offset away again in training; outside it is a shift like the bias, scaled.
            grad_offset = torch.zeros_like(grad_bias) if training else grad_bias.float() * stats[2]
            grad_offset = grad_offset.reshape(offset)
        # Channels-last like everything else, or all sums along the residual stream would mix two layouts.
        residual = grad if with_residual else None
        return grad_x, grad_weight, grad_bias, grad_offset, residual, None, None, None, None, None


def bn_lif_triton(
    x: Tensor, norm: Norm, dynamics: Dynamics | Integer, offset: Tensor | None = None, repeats: int = 1,
    residual: Tensor | None = None, pool: bool = False,
) -> Tensor:  # fmt: skip
    """See `bn_lif`; up to `MOST_STEPS` time steps, and no pool of integer spikes."""
    # For backward passes, this one's and that of whoever reads the spikes; tensors of inference mode have none. Sums
    # with a residual are no spikes, and integer spikes no bits.
    pack = not torch.is_inference_mode_enabled() and residual is None and not isinstance(dynamics, Integer)
    out, packed = _BnLif.apply(x, norm.weight, norm.bias, offset, residual, norm, dynamics, repeats, pool, pack)
    attach_step_bits(out, packed)
    return out
