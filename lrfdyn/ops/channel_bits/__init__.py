"""Spikes as bits over channels: eight channels of one bit plane in a byte. Bits over time steps are in `step_bits`."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from lrfdyn.ops.dispatch import use_triton


@cache
def _spread(device: torch.device, dtype: torch.dtype) -> Tensor:
    """`[256, 8]`: the bits of every byte as numbers. A look-up writes eight spikes at once."""
    with torch.inference_mode(False):
        bytes_ = torch.arange(256, device=device).unsqueeze(1)
        return ((bytes_ >> torch.arange(8, device=device)) & 1).to(dtype)


# Times eight bytes of 0 or 1, seen as one integer, this leaves bit i of the highest byte where byte i was 1: the
# products 2^(8 i + 56 - 7 j) are all different, so nothing is carried.
GATHER = sum(1 << (56 - 7 * i) for i in range(8))


def packed_width(channels: int) -> int:
    """How many bytes hold a bit of each of so many channels."""
    return -(-channels // 8)


def pack_channels(spikes: Tensor, out: Tensor | None = None) -> Tensor:
    """Bytes `[..., ceil(C / 8)]` of `spikes` `[..., C]`, where all that is not 0 is a spike."""
    if use_triton(spikes):
        from lrfdyn.ops.channel_bits.triton import pack_channels_triton

        return pack_channels_triton(spikes, out)
    channels = spikes.shape[-1]
    fires = (spikes != 0).contiguous()
    if channels % 8:
        fires = torch.nn.functional.pad(fires, (0, -channels % 8))
    # Flat first: strides of dimensions of size 1 are anything, and a view of other elements minds them.
    eights = fires.flatten().view(torch.int64).view(*fires.shape[:-1], -1)
    packed = eights.mul(GATHER).bitwise_right_shift_(56).to(torch.uint8)
    return packed if out is None else out.copy_(packed)


def unpack_channels(packed: Tensor, channels: int, dtype: torch.dtype) -> Tensor:
    """The spikes `[..., C]`, as 0 and 1 in `dtype`, of the bytes `packed` `[..., ceil(C / 8)]`."""
    table = _spread(packed.device, dtype)
    if use_triton(table):
        from lrfdyn.ops.channel_bits.triton import unpack_channels_triton

        return unpack_channels_triton(packed, channels, dtype)
    spread = torch.nn.functional.embedding(packed.int(), table).flatten(-2)
    return spread if spread.shape[-1] == channels else spread[..., :channels]


def pack_integers(codes: Tensor, out: Tensor) -> None:
    """Puts the integers `codes` `[..., C]` into as many bit planes as `out` `[bits, ..., ceil(C / 8)]` has."""
    if out.shape[0] == 1:
        pack_channels(codes, out[0])
        return
    codes = codes.round().to(torch.uint8)
    for bit, plane in enumerate(out):
        pack_channels(codes & (1 << bit), plane)


def unpack_integers(planes: Tensor, channels: int, dtype: torch.dtype) -> Tensor:
    """The integers `[..., C]` in `dtype` of the bit planes `[bits, ..., ceil(C / 8)]`."""
    codes = unpack_channels(planes[0], channels, dtype)
    for bit, plane in enumerate(planes[1:], start=1):
        codes = codes.add_(unpack_channels(plane, channels, dtype), alpha=1 << bit)
    return codes
