"""Batch norm and neuron in the fewest passes over memory.

Tensors are `[T, M, C]`: channels are the fast axis, M = B*H*W neurons per channel, time has a constant stride.

    forward    statistics: read x          apply: read x, write spikes
    backward   sums: read x, g             apply: read x, g, write the gradient of x

Each statistics or sums kernel leaves one partial result per program, and a small kernel adds them in a fixed order:
no atomics, the same bits every time. Potentials and spikes are computed again from x in both backward kernels. The
max pool behind the neuron (`pool_triton.py`) reads spikes as bits, so that those before the pool never exist in memory.

A max pool in front of the neuron only chooses: of every window it leaves x where the norm gives the most. Forward and
sums then go over these maxima alone, since no other x has a gradient at the output of the norm.

Without a neuron nothing joins the time steps, and they are so many more images.

Narrow layers are seen as wider ones: F rows of C channels are one row of F*C, in which channel c returns every C
columns, so that all loads are whole cache lines. C below is that width, CHANNELS the true one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lrfdyn.ops.bn_lif import passes_triton as passes
from lrfdyn.ops.bn_lif.pool_triton import maxima_kernel, pool_kernel, unpool_kernel
from lrfdyn.ops.bn_lif.reference import Integer, Norm, has_bits
from lrfdyn.ops.dispatch import first_derivative_only
from lrfdyn.ops.gradient_memory import learn_reference_counts, may_overwrite
from lrfdyn.ops.lif.reference import Dynamics
from lrfdyn.ops.machine import machine_of, next_power_of_two, programs_for
from lrfdyn.ops.spike_conv import channels_last
from lrfdyn.ops.tuning import Options, choices, launch_tuned

# Elements of one time step per program: apply kernels, sums, statistics (several such tiles at once).
TILE, SUMS_TILE, STATISTICS_TILE, STATISTICS_UNROLL = 1024, 512, 1024, 4
# Partial sums and channels per turn of the kernels that finish them.
FINISH = {"BG": 128, "BC": 8}
# Of programs that add up. Like the sizes above it decides the order of their sums, so nothing else is tried for those.
REDUCING_LANES = 128
TILES = (TILE, 512, 2048)  # what is taken, and what may be tried, where nothing is added up
# A program of apart steps (see `is_apart`) takes as many elements as one of four steps.
APART = 4


def _tiles(
    x: Tensor, columns: int, lanes: tuple[int, ...], most: int | None = None, apart: bool = False
) -> Sequence[Options]:
    """Rows and lanes for programs that take tiles of so many columns, of at most so many rows."""
    rows = (max(1, tile // columns) * (APART if apart else 1) for tile in TILES)
    return choices(x.device, BM=tuple(n if most is None else min(n, most) for n in rows), lanes=lanes)


def channel_block(channels: int) -> int:
    """Channels per program: whole cache lines, and no idle lanes where the width allows."""
    fitting = (block for block in (128, 64, 32) if channels % block == 0)
    return next(fitting, min(64, next_power_of_two(channels)))


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
        BN=8, BC=next_power_of_two(min(channels, 512)), num_warps=machine_of(x.device).warps(128),
    )  # fmt: skip
    return dense.permute(0, 1, 4, 2, 3)


def new_like(x: Tensor, steps: int, grid: tuple[int, int] | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """An empty channels-last tensor of `steps` time steps, on `grid` or in `dtype` if they differ."""
    _, batch, channels, height, width = x.shape
    height, width = grid or (height, width)
    return x.new_empty(steps, batch, height, width, channels, dtype=dtype).permute(0, 1, 4, 2, 3)


def is_apart(d: Dynamics | Integer | None, repeats: int) -> bool:
    """Whether the kernels take time steps for more images: without a neuron, where all of them are there."""
    return d is None and repeats == 1


@dataclass(frozen=True)
class _Sizes:
    """How a kernel sees rows of channels: F of them as one (see above), and the columns per program."""

    factor: int
    lines: int
    wide: int
    channels: int
    columns: int

    @classmethod
    def of(cls, x: Tensor, apart: bool = False) -> _Sizes:
        steps, batch, channels, height, width = x.shape
        neurons = batch * height * width * (steps if apart else 1)
        factor, columns = widened(channels, neurons)
        return cls(factor, neurons // factor, channels * factor, channels, columns)

    @property
    def arguments(self) -> tuple[int, int, int]:
        return self.lines, self.wide, self.channels

    @property
    def blocks(self) -> int:
        return programs_for(self.wide, self.columns)


def options_of(x: Tensor, d: Dynamics | Integer | None, repeats: int) -> dict[str, Any]:
    """What the kernels that know the neuron are compiled for."""
    apart, integer = is_apart(d, repeats), isinstance(d, Integer)
    columns, steps = _Sizes.of(x, apart).columns, 1 if apart else x.shape[0] * repeats
    return {"D": d, "T": steps, "REPEATED": repeats > 1, "INTEGER": integer, "BC": columns}


def launch_statistics(x: Tensor, norm: Norm, offset: Tensor | None, repeats: int) -> Tensor:
    """Mean, deviation and scale of dense rows, `[3, C]`; in training the running statistics are updated."""
    steps, sizes = x.shape[0], _Sizes.of(x)
    br, channels, rows = STATISTICS_TILE // sizes.columns, sizes.channels, steps * sizes.lines
    stats = torch.empty(3, channels, dtype=torch.float32, device=x.device)
    machine = machine_of(x.device)
    programs = min(programs_for(rows, br * STATISTICS_UNROLL), max(1, machine.reducers // sizes.blocks))
    warps = machine.warps(REDUCING_LANES)
    partial = stats.new_empty(2, programs * sizes.factor, channels)
    if norm.training:
        passes.statistics_kernel[(programs, sizes.blocks)](
            x, partial, rows, sizes.wide, channels, BR=br, BC=sizes.columns, UNROLL=STATISTICS_UNROLL, num_warps=warps
        )
    count = x.numel() // channels
    everything = count * repeats
    passes.finish_statistics_kernel[(programs_for(channels, FINISH["BC"]),)](
        x, partial, norm.weight, offset, norm.running_mean, norm.running_var, stats, programs * sizes.factor, channels,
        float(count), everything / max(everything - 1, 1), norm.momentum, norm.eps, TRAINING=norm.training, **FINISH,
        num_warps=warps,
    )  # fmt: skip
    return stats


def half_grid(x: Tensor) -> tuple[int, int]:
    """The grid behind the pool."""
    return (x.shape[3] + 1) // 2, (x.shape[4] + 1) // 2


def new_codes(x: Tensor, time: int, apart: bool = False) -> Tensor:
    """Empty codes of the windows of the pool: which neurons were their maxima at each of `time` steps."""
    (height, width), images = half_grid(x), x.shape[1] * (x.shape[0] if apart else 1)
    return x.new_empty(images * height * width, x.shape[2], dtype=torch.int16 if time <= 4 else torch.int32)


def _take_maxima(x: Tensor, stats: Tensor, apart: bool, keep: bool) -> tuple[Tensor, Tensor | None]:
    """x where the windows of a pool have the maxima of what the norm gives, and the codes of these places."""
    steps, batch, channels, height, width = x.shape
    time, images = (1, steps * batch) if apart else (steps, batch)
    grid, bc = half_grid(x), channel_block(channels)
    maxima, codes = new_like(x, steps, grid), new_codes(x, time, apart) if keep else None
    pooled = images * grid[0] * grid[1]
    launch_tuned(
        maxima_kernel, lambda o: (programs_for(pooled, o["BM"]), programs_for(channels, bc)), _tiles(x, bc, (256, 128)),
        x, stats, maxima, codes, pooled, channels, height, width, *grid, images * height * width * channels, T=time,
        BC=bc,
    )  # fmt: skip
    return maxima, codes


def _unpool(
    grad: Tensor, codes: Tensor, x: Tensor, time: int, stats: Tensor | None = None, means: Tensor | None = None
) -> Tensor:
    """The gradient of what was pooled, `time` steps at once, on the grid of x; of x itself, if a norm stood between."""
    _, batch, channels, height, width = x.shape
    images = grad.shape[0] * batch // time
    out, windows, block = new_like(x, grad.shape[0]), grad.shape[3] * grad.shape[4], channel_block(channels)
    launch_tuned(
        unpool_kernel, lambda o: (programs_for(windows, o["BM"]), programs_for(channels, block), images),
        _tiles(x, block, (256, 128, 64), most=next_power_of_two(windows)), grad, codes, out, x, stats, means,
        channels, height, width, *grad.shape[3:], codes.numel(), images * height * width * channels, T=time, BC=block,
    )  # fmt: skip
    return out


def launch(
    x: Tensor, stats: Tensor, bias: Tensor, residual: Tensor | None, d: Dynamics | Integer | None, repeats: int,
    pool: bool, pool_first: bool, keep: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Of dense rows: what comes out, its bits `[B, C, H, W]`, and of a pool its codes and, where it comes first, x at
    the maxima; what only a backward pass or a reader of bits takes is None without `keep`."""
    codes = maxima = None
    apart, pack = is_apart(d, repeats), keep and has_bits(d, residual)
    if pool_first:
        x, codes = _take_maxima(x, stats, apart, keep)
        maxima = x if keep else None
    _, batch, channels, height, width = x.shape
    sizes, options = _Sizes.of(x, apart), options_of(x, d, repeats)
    time = options["T"]
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    out = None if pool else new_like(x, x.shape[0] * repeats, dtype=dtype)
    packed = x.new_empty(batch, height, width, channels, dtype=torch.uint8) if pack or pool else None
    residual = None if residual is None else dense_rows(residual)
    launch_tuned(
        passes.apply_kernel, lambda o: (programs_for(sizes.lines, o["BM"]), sizes.blocks),
        _tiles(x, sizes.columns, (256, 128), apart=apart), x, stats, bias, residual, out, packed, *sizes.arguments,
        **options,
    )  # fmt: skip
    if pool:
        grid = half_grid(x)
        out = new_like(x, time, grid)
        pooled = batch * grid[0] * grid[1]
        unpooled, packed = packed, None
        if pack:
            codes = new_codes(x, time)
            packed = x.new_empty(batch, *grid, channels, dtype=torch.uint8)
        bc = channel_block(channels)
        launch_tuned(
            pool_kernel, lambda o: (programs_for(pooled, o["BM"]), programs_for(channels, bc)),
            _tiles(x, bc, (64, 128, 256)), unpooled, out, packed, codes, pooled, channels, height, width, *grid,
            T=time, BC=bc,
        )  # fmt: skip
    return out, None if packed is None else packed.permute(0, 3, 1, 2), codes, maxima


def launch_backward(
    x: Tensor, stats: Tensor, weight: Tensor, bias: Tensor, codes: Tensor | None, maxima: Tensor | None, grad: Tensor,
    d: Dynamics | Integer | None, repeats: int, training: bool, mine: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of dense rows, of the weight and of the bias. That of what came out is overwritten if it is `mine`."""
    whole, apart, count = x, is_apart(d, repeats), x.numel() // x.shape[2] * repeats
    if maxima is not None:
        # The means are subtracted from the gradient of a step that stands for all.
        x, count = maxima, count // repeats
    sizes, options = _Sizes.of(x, apart), options_of(x, d, repeats)
    channels, bc = sizes.channels, sizes.columns
    if codes is not None and maxima is None:
        grad, mine = _unpool(grad, codes, x, options["T"]), True
    bs = SUMS_TILE // bc * (APART if apart else 1)
    machine = machine_of(x.device)
    programs = min(programs_for(sizes.lines, bs), max(1, machine.reducers // sizes.blocks))
    warps = machine.warps(REDUCING_LANES)
    partial = stats.new_empty(2, programs * sizes.factor, channels)
    passes.sums_kernel[(programs, sizes.blocks)](
        x, stats, bias, grad, partial, *sizes.arguments, BM=bs, num_warps=warps, **options
    )
    grad_weight, grad_bias, means = torch.empty_like(weight), torch.empty_like(bias), stats.new_empty(2, channels)
    passes.finish_sums_kernel[(programs_for(channels, FINISH["BC"]),)](
        partial, stats, grad_weight, grad_bias, means, programs * sizes.factor, channels, float(count),
        TRAINING=training, **FINISH, num_warps=warps,
    )  # fmt: skip
    # A gradient that nobody else holds is not needed any more: the result takes its memory.
    grad_x = grad if mine and not options["REPEATED"] and grad.dtype == x.dtype else torch.empty_like(x)
    if maxima is not None and apart:
        grad_x = grad  # what comes out is the norm's own output
    else:
        launch_tuned(
            passes.apply_backward_kernel, lambda o: (programs_for(sizes.lines, o["BM"]), sizes.blocks),
            _tiles(x, bc, (256, 128), apart=apart), x, stats, bias, grad, means if maxima is None else None, grad_x,
            *sizes.arguments, **options,
        )  # fmt: skip
    if maxima is not None:
        assert codes is not None
        grad_x = _unpool(grad_x, codes, whole, 1 if apart else whole.shape[0], stats, means if training else None)
    return grad_x, grad_weight, grad_bias


def offset_gradient(grad_bias: Tensor, stats: Tensor, training: bool, shape: torch.Size) -> Tensor:
    """The norm takes the offset away again in training; outside it is a shift like the bias, scaled."""
    return (torch.zeros_like(grad_bias) if training else grad_bias.float() * stats[2]).reshape(shape)


class BnLif(torch.autograd.Function):
    """See `bn_lif`; up to eight steps, or no neuron, and no pool behind integer spikes. Returns what comes out, and the
    bits of spikes or None."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, offset: Tensor | None, residual: Tensor | None, norm: Norm,
        d: Dynamics | Integer | None, repeats: int, pool: bool, pool_first: bool,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        learn_reference_counts()
        # For this backward pass and that of whoever reads the spikes; tensors of inference mode have none.
        keep = not torch.is_inference_mode_enabled()
        x = dense_rows(x)
        stats = launch_statistics(x, norm, offset, repeats)
        out, packed, codes, maxima = launch(x, stats, bias, residual, d, repeats, pool, pool_first, keep)
        ctx.save_for_backward(x, stats, weight, bias, codes, maxima)
        ctx.given = (d, repeats, norm.training)
        ctx.offset = None if offset is None else offset.shape
        return out, packed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        first_derivative_only()
        saved, (d, repeats, training) = ctx.saved_tensors, ctx.given
        with_residual = ctx.needs_input_grad[4]
        mine = not with_residual and may_overwrite(grads[0])
        grad = dense_rows(grads[0])
        grad_x, *parameters = launch_backward(*saved, grad, d, repeats, training, mine)
        offset = None
        if ctx.needs_input_grad[3]:
            offset = offset_gradient(parameters[1], saved[1], training, ctx.offset)
        # Channels-last like everything else, or all sums along the residual stream would mix two layouts.
        return grad_x, *parameters, offset, grad if with_residual else None, None, None, None, None, None
