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
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from lrfdyn.ops.bn_lif import passes_triton as passes
from lrfdyn.ops.bn_lif.pool_triton import pool_kernel, unpool_kernel
from lrfdyn.ops.bn_lif.reference import Integer, Norm, has_bits
from lrfdyn.ops.dispatch import first_derivative_only
from lrfdyn.ops.gradient_memory import learn_reference_counts, may_overwrite
from lrfdyn.ops.lif.reference import Dynamics
from lrfdyn.ops.machine import machine_of
from lrfdyn.ops.spike_conv import channels_last
from lrfdyn.ops.tuning import choices, launch_tuned

# Elements of one time step per program: apply kernels, sums, statistics (several such tiles at once).
TILE, SUMS_TILE, STATISTICS_TILE, STATISTICS_UNROLL = 1024, 512, 1024, 4
# Partial sums and channels per turn of the kernels that finish them.
FINISH = {"BG": 128, "BC": 8}
# Of programs that add up. Like the sizes above it decides the order of their sums, so nothing else is tried for those.
REDUCING_LANES = 128
TILES = (TILE, 512, 2048)  # what is taken, and what may be tried, where nothing is added up


def _tiles(x: Tensor, columns: int, lanes: tuple[int, ...], most: int | None = None) -> Any:
    """Rows and lanes for programs that take tiles of so many columns, of at most so many rows."""
    rows = (max(1, tile // columns) for tile in TILES)
    return choices(x.device, BM=tuple(n if most is None else min(n, most) for n in rows), lanes=lanes)


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
        BN=8, BC=triton.next_power_of_2(min(channels, 512)), num_warps=machine_of(x.device).warps(128),
    )  # fmt: skip
    return dense.permute(0, 1, 4, 2, 3)


def new_like(x: Tensor, steps: int, grid: tuple[int, int] | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """An empty channels-last tensor of `steps` time steps, on `grid` or in `dtype` if they differ."""
    _, batch, channels, height, width = x.shape
    height, width = grid or (height, width)
    return x.new_empty(steps, batch, height, width, channels, dtype=dtype).permute(0, 1, 4, 2, 3)


@dataclass(frozen=True)
class _Sizes:
    """How a kernel sees rows of channels: F of them as one (see above), and the columns per program."""

    factor: int
    lines: int
    wide: int
    channels: int
    columns: int

    @classmethod
    def of(cls, x: Tensor) -> _Sizes:
        _, batch, channels, height, width = x.shape
        neurons = batch * height * width
        factor, columns = widened(channels, neurons)
        return cls(factor, neurons // factor, channels * factor, channels, columns)

    @property
    def arguments(self) -> tuple[int, int, int]:
        return self.lines, self.wide, self.channels

    @property
    def blocks(self) -> int:
        return triton.cdiv(self.wide, self.columns)


def options_of(x: Tensor, d: Dynamics | Integer, repeats: int) -> dict[str, Any]:
    """What the kernels that know the neuron are compiled for."""
    columns, integer = _Sizes.of(x).columns, isinstance(d, Integer)
    return {"D": d, "T": x.shape[0] * repeats, "REPEATED": repeats > 1, "INTEGER": integer, "BC": columns}


def launch_statistics(x: Tensor, norm: Norm, offset: Tensor | None, repeats: int) -> Tensor:
    """Mean, deviation and scale of dense rows, `[3, C]`; in training the running statistics are updated."""
    steps, sizes = x.shape[0], _Sizes.of(x)
    br, channels, rows = STATISTICS_TILE // sizes.columns, sizes.channels, steps * sizes.lines
    stats = torch.empty(3, channels, dtype=torch.float32, device=x.device)
    machine = machine_of(x.device)
    programs = min(triton.cdiv(rows, br * STATISTICS_UNROLL), max(1, machine.reducers // sizes.blocks))
    warps = machine.warps(REDUCING_LANES)
    partial = stats.new_empty(2, programs * sizes.factor, channels)
    if norm.training:
        passes.statistics_kernel[(programs, sizes.blocks)](
            x, partial, rows, sizes.wide, channels, BR=br, BC=sizes.columns, UNROLL=STATISTICS_UNROLL, num_warps=warps
        )
    count = x.numel() // channels
    everything = count * repeats
    passes.finish_statistics_kernel[(triton.cdiv(channels, FINISH["BC"]),)](
        x, partial, norm.weight, offset, norm.running_mean, norm.running_var, stats, programs * sizes.factor, channels,
        float(count), everything / max(everything - 1, 1), norm.momentum, norm.eps, TRAINING=norm.training, **FINISH,
        num_warps=warps,
    )  # fmt: skip
    return stats


def half_grid(x: Tensor) -> tuple[int, int]:
    """The grid behind the pool."""
    return (x.shape[3] + 1) // 2, (x.shape[4] + 1) // 2


def new_codes(x: Tensor, time: int) -> Tensor:
    """Empty codes of the windows of the pool: which neurons were their maxima."""
    height, width = half_grid(x)
    return x.new_empty(x.shape[1] * height * width, x.shape[2], dtype=torch.int16 if time <= 4 else torch.int32)


def launch(
    x: Tensor, stats: Tensor, bias: Tensor, residual: Tensor | None, d: Dynamics | Integer, repeats: int, pool: bool,
    pack: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Of dense rows: spikes, their bits `[B, C, H, W]` if they are to be packed, and the codes of the pool."""
    _, batch, channels, height, width = x.shape
    sizes, options = _Sizes.of(x), options_of(x, d, repeats)
    time = options["T"]
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    out = None if pool else new_like(x, time, dtype=dtype)
    packed = x.new_empty(batch, height, width, channels, dtype=torch.uint8) if pack or pool else None
    residual = None if residual is None else dense_rows(residual)
    launch_tuned(
        passes.apply_kernel, lambda o: (triton.cdiv(sizes.lines, o["BM"]), sizes.blocks),
        _tiles(x, sizes.columns, (256, 128)), x, stats, bias, residual, out, packed, *sizes.arguments, **options,
    )  # fmt: skip
    codes = None
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
            pool_kernel, lambda o: (triton.cdiv(pooled, o["BM"]), triton.cdiv(channels, bc)),
            _tiles(x, bc, (64, 128, 256)), unpooled, out, packed, codes, pooled, channels, height, width, *grid,
            T=time, BC=bc,
        )  # fmt: skip
    return out, None if packed is None else packed.permute(0, 3, 1, 2), codes


def launch_backward(
    x: Tensor, stats: Tensor, weight: Tensor, bias: Tensor, codes: Tensor | None, grad: Tensor, d: Dynamics | Integer,
    repeats: int, training: bool, mine: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of dense rows, of the weight and of the bias. That of the spikes is overwritten if it is `mine`."""
    sizes, options = _Sizes.of(x), options_of(x, d, repeats)
    channels, time, bc = sizes.channels, options["T"], sizes.columns
    if codes is not None:
        pooled, grad, mine = grad, new_like(x, time), True
        windows, block = pooled.shape[3] * pooled.shape[4], channel_block(channels)
        launch_tuned(
            unpool_kernel, lambda o: (triton.cdiv(windows, o["BM"]), triton.cdiv(channels, block), x.shape[1]),
            _tiles(x, block, (256, 128, 64), most=triton.next_power_of_2(windows)), pooled, codes, grad, channels,
            *x.shape[3:], *pooled.shape[3:], codes.numel(), sizes.lines * sizes.wide, T=time, BC=block,
        )  # fmt: skip
    bs = SUMS_TILE // bc
    machine = machine_of(x.device)
    programs = min(triton.cdiv(sizes.lines, bs), max(1, machine.reducers // sizes.blocks))
    warps = machine.warps(REDUCING_LANES)
    partial = stats.new_empty(2, programs * sizes.factor, channels)
    passes.sums_kernel[(programs, sizes.blocks)](
        x, stats, bias, grad, partial, *sizes.arguments, BM=bs, num_warps=warps, **options
    )
    grad_weight, grad_bias, means = torch.empty_like(weight), torch.empty_like(bias), stats.new_empty(2, channels)
    passes.finish_sums_kernel[(triton.cdiv(channels, FINISH["BC"]),)](
        partial, stats, grad_weight, grad_bias, means, programs * sizes.factor, channels,
        float(x.numel() // channels * repeats), TRAINING=training, **FINISH, num_warps=warps,
    )  # fmt: skip
    # A gradient that nobody else holds is not needed any more: the result takes its memory.
    grad_x = grad if mine and not options["REPEATED"] and grad.dtype == x.dtype else torch.empty_like(x)
    launch_tuned(
        passes.apply_backward_kernel, lambda o: (triton.cdiv(sizes.lines, o["BM"]), sizes.blocks),
        _tiles(x, bc, (256, 128)), x, stats, bias, grad, means, grad_x, *sizes.arguments, **options,
    )  # fmt: skip
    return grad_x, grad_weight, grad_bias


def offset_gradient(grad_bias: Tensor, stats: Tensor, training: bool, shape: torch.Size) -> Tensor:
    """The norm takes the offset away again in training; outside it is a shift like the bias, scaled."""
    return (torch.zeros_like(grad_bias) if training else grad_bias.float() * stats[2]).reshape(shape)


class BnLif(torch.autograd.Function):
    """See `bn_lif`; up to eight steps, no pool of integer spikes. Returns spikes, and their bits or None."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, offset: Tensor | None, residual: Tensor | None, norm: Norm,
        d: Dynamics | Integer, repeats: int, pool: bool,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        learn_reference_counts()
        # For this backward pass and that of whoever reads the spikes; tensors of inference mode have none.
        pack = not torch.is_inference_mode_enabled() and has_bits(d, residual)
        x = dense_rows(x)
        stats = launch_statistics(x, norm, offset, repeats)
        out, packed, codes = launch(x, stats, bias, residual, d, repeats, pool, pack)
        ctx.save_for_backward(x, stats, weight, bias, codes)
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
        return grad_x, *parameters, offset, grad if with_residual else None, None, None, None, None
