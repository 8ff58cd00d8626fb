"""Spikes as bits: over time steps, as kernels keep them for a backward pass, and over channels, to save memory.

Over time steps one byte holds a neuron, bit t for time step t. The kernels leave these bytes with the spikes they
write, and later kernels keep them instead of the spikes. Over channels a byte holds eight channels of one bit plane.

Bits over time steps travel as an attribute of the very tensor that one module hands to the next, which is an ordinary
tensor to everybody else. `with_step_bits` sets it and `step_bits_of` reads it; nothing else knows of it. What is
computed from spikes, views included, is another tensor without bits. With them stands how often the spikes had been
changed in place: after one more change they are stale and not used. A copy and what is read from a file were filled in
place, so they count as changed. A compiler follows the attribute while it traces a network: in the graph the bits are a
result of one operator and an argument of the next, and none go in or out (`TracedSpikes`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lrfdyn.ops.dispatch import as_operator, use_triton
from lrfdyn.ops.gradient_memory import split_channels
from lrfdyn.ops.operators import NAMESPACE, operator

# The spikes of one neuron, a bit per step, fit a byte up to here.
MOST_PACKED_STEPS = 8

# Times eight bytes of 0 or 1, seen as one integer, this leaves bit i of the highest byte where byte i was 1: the
# products 2^(8 i + 56 - 7 j) are all different, so nothing is carried.
GATHER = sum(1 << (56 - 7 * i) for i in range(8))


def _version(x: Tensor) -> int | None:
    """How often `x` was changed in place; tensors of inference mode do not count it."""
    return None if x.is_inference() else x._version


class TracedSpikes(Tensor):
    """Spikes with bits in a graph that is being traced: there alone `packed` is what it is set to. What leaves the
    graph is set for real, and becomes an ordinary tensor: nobody counts the changes that a graph makes.

    Outside of graphs spikes have no such type, since compiled functions refuse inputs of it.
    """

    # What is computed from spikes is no spikes.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def packed(self) -> tuple[Tensor, int | None] | None:
        return None

    @packed.setter
    def packed(self, bits: tuple[Tensor, int | None]) -> None:
        self.__class__ = Tensor  # type: ignore[assignment]


# Before, later kernels keep the spikes. Up to 2.10 a traced tensor had no attributes, or the tracer ran the setter; in
# 2.11 a compiled network under activation checkpointing fails ("Node output referenced nonexistent value bits_").
TRACED_BITS = torch.__version__ >= "2.12"
_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_library.define("unchanged_bits(Tensor spikes, Tensor(a) bits) -> Tensor(a)")


def _unchanged_bits(spikes: Tensor, bits: Tensor) -> Tensor:
    """The bits, or nothing if the spikes were changed in place. Runs while a graph is traced, and is not in it."""
    return bits.view_as(bits) if _version(spikes) == 0 else bits[:0]


_library.impl("unchanged_bits", _unchanged_bits, "CompositeImplicitAutograd")
_unchanged = getattr(torch.ops, NAMESPACE).unchanged_bits


def with_step_bits(spikes: Tensor, bits: Tensor | None) -> Tensor:
    """The spikes `[T, B, ...]`, with the bytes `bits` `[B, ...]` that stand for them, if there are any."""
    traced = torch.compiler.is_dynamo_compiling()
    if bits is None or (traced and not TRACED_BITS):
        return spikes
    given: Any = spikes.as_subclass(TracedSpikes) if traced else spikes
    given.packed = (bits, 0 if traced else _version(spikes))
    return given


def step_bits_of(spikes: Tensor) -> Tensor | None:
    """The bytes `[B, ...]` of `spikes` `[T, B, ...]`, if they came with any and are what they were."""
    traced = torch.compiler.is_dynamo_compiling()
    if traced and not isinstance(spikes, TracedSpikes):
        return None  # from outside the graph, which may run again with others
    bits, version = getattr(spikes, "packed", None) or (None, None)
    if bits is None or version is None:
        return None
    if traced:
        bits = _unchanged(spikes, bits)
        return bits if bits.shape[0] else None
    return bits if version == _version(spikes) else None


def split_spikes(spikes: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """The channels of `[T, B, C, ...]` in parts of these sizes, each with its bits."""
    parts, bits = split_channels(spikes, sizes, 2), step_bits_of(spikes)
    if bits is None:
        return parts
    return tuple(with_step_bits(*pair) for pair in zip(parts, bits.split(list(sizes), 1), strict=True))


def packed_width(channels: int) -> int:
    """How many bytes hold a bit of each of so many channels."""
    return -(-channels // 8)


@operator("pack_channels", "(Tensor spikes) -> Tensor")
def pack_operator(spikes: Tensor) -> Tensor:
    """See `pack_channels`."""
    from lrfdyn.ops.bits_triton import pack_channels_triton

    return pack_channels_triton(spikes)


@pack_operator.register_fake
def _(spikes: Tensor) -> Tensor:
    return spikes.new_empty(*spikes.shape[:-1], packed_width(spikes.shape[-1]), dtype=torch.uint8)


@operator("unpack_channels", "(Tensor packed, SymInt channels, ScalarType dtype) -> Tensor")
def unpack_operator(packed: Tensor, channels: int, dtype: torch.dtype) -> Tensor:
    """See `unpack_channels`."""
    from lrfdyn.ops.bits_triton import unpack_channels_triton

    return unpack_channels_triton(packed, channels, dtype)


@unpack_operator.register_fake
def _(packed: Tensor, channels: int, dtype: torch.dtype) -> Tensor:
    return packed.new_empty(*packed.shape[:-1], channels, dtype=dtype)


def pack_channels(spikes: Tensor, out: Tensor | None = None) -> Tensor:
    """Bytes `[..., ceil(C / 8)]` of `spikes` `[..., C]`, where all that is not 0 is a spike. Rows of `out` must follow
    each other without a gap."""
    if use_triton(spikes):
        if as_operator():
            packed = pack_operator(spikes)
            return packed if out is None else out.copy_(packed)
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
    if as_operator() and use_triton(packed.new_empty(1, dtype=dtype)):
        return unpack_operator(packed, channels, dtype)
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
