"""Spikes to bits and back, in one pass over memory each; see `bits.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lrfdyn.ops.machine import programs_for
from lrfdyn.ops.tiles_triton import block_of_program, spike_values
from lrfdyn.ops.tuning import choices, launch_tuned

# Bytes per program, over channels and over time steps, and its lanes: what is taken, then what may be tried.
BLOCKS, STEP_BLOCKS, LANES = (256, 128, 512), (2048, 1024, 4096), (128, 256)


@triton.jit
def _places(n, C: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """For a block of bytes of one frame: their pixels and places in a pixel, the channels of their bits, and which of
    them exist."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    pixel = at // WIDTH
    byte = at % WIDTH
    channel = byte[:, None] * 8 + tl.arange(0, 8)[None, :]
    return pixel, byte, channel, at < n * WIDTH, (at < n * WIDTH)[:, None] & (channel < C)


@triton.jit
def _pack_channels(
    spikes, out, n, frames, st, sb, sn, sc, ot, ob, on, C: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    frame = tl.program_id(1).to(tl.int64)
    pixel, byte, channel, inside, exists = _places(n, C, WIDTH, BLOCK)
    spikes += (frame // frames) * st + (frame % frames) * sb
    value = tl.load(spikes + pixel[:, None] * sn + channel * sc, mask=exists, other=0)
    bits = (value != 0).to(tl.int32) << tl.arange(0, 8)[None, :]
    out += (frame // frames) * ot + (frame % frames) * ob
    tl.store(out + pixel * on + byte, tl.sum(bits, 1).to(tl.uint8), mask=inside)


@triton.jit
def _unpack_channels(packed, out, n, frames, st, sb, sn, sw, C: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    frame = tl.program_id(1).to(tl.int64)
    pixel, byte, channel, inside, exists = _places(n, C, WIDTH, BLOCK)
    packed += (frame // frames) * st + (frame % frames) * sb
    bits = tl.load(packed + pixel * sn + byte * sw, mask=inside, other=0).to(tl.int32)
    value = (bits[:, None] >> tl.arange(0, 8)[None, :]) & 1
    out += frame * n * C
    tl.store(out + pixel[:, None] * C + channel, value.to(tl.float32).to(out.dtype.element_ty), mask=exists)


def _frames(x: Tensor) -> Tensor:
    """`[..., C]` as `[A, B, N, C]`, without a copy where the memory allows: rows of an image and their pixels are one
    axis."""
    if x.dim() >= 5:
        x = x.flatten(2, -2)
    return x[(None,) * (4 - x.dim())]


def pack_channels_triton(spikes: Tensor, out: Tensor | None = None) -> Tensor:
    given = _frames(spikes)
    outer, frames, n, channels = given.shape
    if out is None:
        out = torch.empty(*spikes.shape[:-1], -(-channels // 8), dtype=torch.uint8, device=spikes.device)
    taken = out.view(outer, frames, n, -1)
    width = taken.shape[-1]
    launch_tuned(
        _pack_channels, lambda o: (programs_for(n * width, o["BLOCK"]), outer * frames),
        choices(spikes.device, BLOCK=BLOCKS, lanes=LANES),
        given, taken, n, frames, *given.stride(), *taken.stride()[:3], C=channels, WIDTH=width,
    )  # fmt: skip
    return out


def unpack_channels_triton(packed: Tensor, channels: int, dtype: torch.dtype) -> Tensor:
    out = torch.empty(*packed.shape[:-1], channels, dtype=dtype, device=packed.device)
    given = _frames(packed)
    outer, frames, n, width = given.shape
    launch_tuned(
        _unpack_channels, lambda o: (programs_for(n * width, o["BLOCK"]), outer * frames),
        choices(packed.device, BLOCK=BLOCKS, lanes=LANES),
        given, out, n, frames, *given.stride(), C=channels, WIDTH=width,
    )  # fmt: skip
    return out


@triton.jit
def _unpack_steps(packed, out, n, T: tl.constexpr, BLOCK: tl.constexpr):
    start, at, mask = block_of_program(n, BLOCK)
    bits = tl.load(packed + start + at, mask=mask, other=0)
    out += start
    for t in tl.static_range(T):
        tl.store(out + at, spike_values(bits, t, True).to(out.dtype.element_ty), mask=mask)
        out += n


def unpack_steps(packed: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """Spikes `[T, B, C, H, W]` of one byte per neuron, `[B, C, H, W]`, both in channels-last memory."""
    rows = packed.permute(0, 2, 3, 1).contiguous()
    out = torch.empty(steps, *rows.shape, dtype=dtype, device=packed.device)
    n = rows.numel()
    offered = choices(packed.device, BLOCK=STEP_BLOCKS, lanes=LANES)
    launch_tuned(_unpack_steps, lambda o: (programs_for(n, o["BLOCK"]),), offered, rows, out, n, T=steps)
    return out.permute(0, 1, 4, 2, 3)
