"""Spikes as bits: over time steps, as kernels keep them for a backward pass, and over channels, to save memory.

Over time steps one byte holds a neuron, bit t for time step t. The kernels leave these bytes with the spikes they
write, and later kernels keep them instead of the spikes; a change of the spikes in place makes them stale, and then
they are not used. Over channels a byte holds eight channels of one bit plane.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lrfdyn.ops.dispatch import use_triton

# Times eight bytes of 0 or 1, seen as one integer, this leaves bit i of the highest byte where byte i was 1: the
# products 2^(8 i + 56 - 7 j) are all different, so nothing is carried.
GATHER = sum(1 << (56 - 7 * i) for i in range(8))


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version  # inference tensors do not count their changes


def attach_step_bits(spikes: Any, bits: Tensor | None) -> None:
    """Leaves the bytes `bits` `[B, ...]`, if there are any, with the spikes `[T, B, ...]` that they stand for."""
    if bits is not None:
        spikes.packed = (bits, _version(spikes))


def step_bits_of(spikes: Tensor) -> Tensor | None:
    """The bytes `[B, ...]` of `spikes` `[T, B, ...]`, if they came with any and are what they were."""
    bits, version = getattr(spikes, "packed", (None, None))
    return bits if bits is not None and version == _version(spikes) else None


def packed_width(channels: int) -> int:
    """How many bytes hold a bit of each of so many channels."""
    return -(-channels // 8)


def pack_channels(spikes: Tensor, out: Tensor | None = None) -> Tensor:
    """Bytes `[..., ceil(C / 8)]` of `spikes` `[..., C]`, where all that is not 0 is a spike. Rows of `out` must follow
    each other without a gap."""
    if use_triton(spikes):
        from lrfdyn.ops.bits_triton import pack_channels_triton

        return pack_channels_triton(spikes, out)
    fires = (spikes != 0).contiguous()
    if spikes.shape[-1] % 8:
        fires = F.pad(fires, (0, -spikes.shape[-1] % 8))
    # Flat first: strides of dimensions of size 1 are anything, and a view of other elements minds them.
    eights = fires.flatten().view(torch.int64).view(*fires.shape[:-1], -1)
    packed = eights.mul(GATHER).bitwise_right_shift_(56).to(torch.uint8)
    return packed if out is None else out.copy_(packed)


@cache
def _spread(device: torch.device, dtype: torch.dtype) -> Tensor:
    """`[256, 8]`: the bits of every byte as numbers. A look-up writes eight spikes at once."""
    with torch.inference_mode(False):
        bytes_ = torch.arange(256, device=device).unsqueeze(1)
        return ((bytes_ >> torch.arange(8, device=device)) & 1).to(dtype)


def unpack_channels(packed: Tensor, channels: int, dtype: torch.dtype) -> Tensor:
    """The spikes `[..., C]`, as 0 and 1 in `dtype`, of the bytes `packed` `[..., ceil(C / 8)]`."""
    table = _spread(packed.device, dtype)
    if use_triton(table):
        from lrfdyn.ops.bits_triton import unpack_channels_triton

        return unpack_channels_triton(packed, channels, dtype)
    return F.embedding(packed.int(), table).flatten(-2)[..., :channels]


def pack_integers(codes: Tensor, out: Tensor) -> None:
    """Puts the integers `codes` `[..., C]` into as many bit planes as `out` `[bits, ..., ceil(C / 8)]` has."""
    if out.shape[0] == 1:
        pack_channels(codes, out[0])
        return
    codes = codes.round().to(torch.uint8 if out.shape[0] <= 8 else torch.int32)
    for bit, plane in enumerate(out):
        pack_channels(codes & (1 << bit), plane)


def unpack_integers(planes: Tensor, channels: int, dtype: torch.dtype) -> Tensor:
    """The integers `[..., C]` in `dtype` of the bit planes `[bits, ..., ceil(C / 8)]`."""
    codes = unpack_channels(planes[0], channels, dtype)
    for bit, plane in enumerate(planes[1:], start=1):
        codes = codes.add_(unpack_channels(plane, channels, dtype), alpha=1 << bit)
    return codes
