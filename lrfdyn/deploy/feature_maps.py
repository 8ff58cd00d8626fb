"""Feature maps in as few bytes as their values need, all in one buffer that is planned beforehand."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lrfdyn.ops.bits import pack_channels, packed_width, unpack_channels

ALIGNMENT = 64


class FeatureMap:
    """A feature map `[T, B, C, H, W]` of `dtype`, held as "bits" (spikes), "integers" (sums of spikes up to `most`, in
    8 bits where they fit) or "numbers" of that type; `place_maps` gives it memory."""

    data: Tensor

    def __init__(self, holds: str, shape: Sequence[int], dtype: torch.dtype, most: int = 255) -> None:
        self.holds, self.dtype = holds, dtype
        self.time, batch, self.channels, self.height, width = shape
        held = packed_width(self.channels) if holds == "bits" else self.channels
        self.stored = (self.time, batch, self.height, width, held)  # channels last: rows and pixels are whole
        wide = holds == "numbers" or (holds == "integers" and most > torch.iinfo(torch.uint8).max)
        self.stored_dtype = dtype if wide else torch.uint8
        self.nbytes = math.prod(self.stored) * self.stored_dtype.itemsize

    def load(self, first: int = 0, last: int | None = None, time: slice = slice(None)) -> Tensor:
        """The rows from `first` to `last` as `[T, B, C, rows, W]` in channels-last memory."""
        rows = self.data[time, :, first:last]
        bits = self.holds == "bits"
        values = unpack_channels(rows, self.channels, self.dtype) if bits else rows.to(self.dtype).contiguous()
        return values.permute(0, 1, 4, 2, 3)

    def store(self, values: Tensor, first: int, time: slice = slice(None)) -> None:
        """Puts `values` `[T, B, C, rows, W]` into the rows from `first` on."""
        values = values.permute(0, 1, 3, 4, 2)
        rows = self.data[time, :, first : first + values.shape[2]]
        if self.holds == "bits":
            pack_channels(values, rows)
        else:
            rows.copy_(values)


def buffer_bytes(maps: Sequence[FeatureMap]) -> int:
    """The bytes of a buffer for maps in turn: each but the first is made while the one before is still read."""
    sizes = [-(-held.nbytes // ALIGNMENT) * ALIGNMENT for held in maps]
    return max(a + b for a, b in zip([0, *sizes], sizes, strict=False))


def place_maps(maps: Sequence[FeatureMap], buffer: Tensor) -> None:
    """Gives maps memory in one buffer of at least `buffer_bytes`: in turn from its start and at its end."""
    for i, held in enumerate(maps):
        start = 0 if i % 2 == 0 else buffer.numel() - -(-held.nbytes // ALIGNMENT) * ALIGNMENT
        held.data = buffer[start : start + held.nbytes].view(held.stored_dtype).view(held.stored)
