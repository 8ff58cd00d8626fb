"""Feature maps in as few bytes as their values need, all in one buffer that is planned beforehand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lrfdyn.errors import require
from lrfdyn.ops.bits import pack_channels, packed_width, unpack_channels

ALIGNMENT = 64


@dataclass(frozen=True)
class FeatureMapShape:
    """The shape of a feature map `[T, B, C, H, W]`, and how its values are held: as "bits" (spikes), "integers" (8-bit
    sums of spikes) or "numbers" of `dtype`."""

    holds: str
    time: int
    batch: int
    channels: int
    height: int
    width: int
    dtype: torch.dtype

    @property
    def stored(self) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and type in memory: channels last, so that rows and pixels are whole."""
        channels = packed_width(self.channels) if self.holds == "bits" else self.channels
        dtype = self.dtype if self.holds == "numbers" else torch.uint8
        return (self.time, self.batch, self.height, self.width, channels), dtype

    @property
    def nbytes(self) -> int:
        shape, dtype = self.stored
        return math.prod(shape) * dtype.itemsize


class FeatureMap:
    """A feature map inside `memory`, a buffer of bytes."""

    def __init__(self, shape: FeatureMapShape, memory: Tensor) -> None:
        self.shape = shape
        stored, dtype = shape.stored
        self.data = memory[: shape.nbytes].view(dtype).view(stored)

    def load(self, first: int = 0, last: int | None = None, time: slice = slice(None)) -> Tensor:
        """The rows from `first` to `last` as `[T, B, C, rows, W]` in channels-last memory."""
        rows = self.data[time, :, first:last]
        if self.shape.holds == "bits":
            values = unpack_channels(rows, self.shape.channels, self.shape.dtype)
        else:
            values = rows.to(self.shape.dtype).contiguous()
        return values.permute(0, 1, 4, 2, 3)

    def store(self, values: Tensor, first: int, time: slice = slice(None)) -> None:
        """Puts `values` `[T, B, C, rows, W]` into the rows from `first` on."""
        values = values.permute(0, 1, 3, 4, 2)
        rows = self.data[time, :, first : first + values.shape[2]]
        if self.shape.holds == "bits":
            pack_channels(values, rows)
        else:
            rows.copy_(values)


def buffer_bytes(shapes: Sequence[FeatureMapShape]) -> int:
    """The bytes of a buffer for maps of these shapes in turn: each but the first is made while the one before is still
    read."""
    sizes = [-(-shape.nbytes // ALIGNMENT) * ALIGNMENT for shape in shapes]
    return max(a + b for a, b in zip([0, *sizes], sizes, strict=False))


def place_maps(shapes: Sequence[FeatureMapShape], buffer: Tensor) -> list[FeatureMap]:
    """Feature maps of these shapes in one buffer of bytes: in turn from its start and at its end."""
    require(
        buffer.numel() >= buffer_bytes(shapes), f"buffer: expected {buffer_bytes(shapes)} bytes, got {buffer.numel()}"
    )
    maps = []
    for i, shape in enumerate(shapes):
        size = -(-shape.nbytes // ALIGNMENT) * ALIGNMENT
        maps.append(FeatureMap(shape, buffer if i % 2 == 0 else buffer[buffer.numel() - size :]))
    return maps
