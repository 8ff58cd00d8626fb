"""Augmentation of images with masks: random scale, crop and flip of pictures of any size, and photometric distortion.

Pictures lie one behind another in one flat array, so a batch of crops is a few gathers whatever their sizes are. What
is random is drawn on the host and is an argument here.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lrfdyn.data.augment import Augmentation
from lrfdyn.data.hashed_random import CROP, FLIP, PHOTOMETRIC, Keys
from lrfdyn.data.loading import to_device

IGNORED = 255  # in a mask: no class, does not count


class Pictures(NamedTuple):
    """`pixels` `[n, 3]` and `masks` `[n]` of many pictures; picture i begins at `starts[i]`, row after row."""

    pixels: Tensor
    masks: Tensor
    starts: np.ndarray
    heights: np.ndarray
    widths: np.ndarray

    @classmethod
    def pack(cls, pictures: list[tuple[np.ndarray, np.ndarray]]) -> Pictures:
        """Of images `[H, W, 3]` and masks `[H, W]`."""
        heights, widths = np.array([mask.shape for _, mask in pictures]).T
        starts = np.cumsum(heights * widths) - heights * widths
        pixels = np.concatenate([image.reshape(-1, 3) for image, _ in pictures])
        masks = np.concatenate([mask.reshape(-1) for _, mask in pictures])
        return cls(torch.from_numpy(pixels), torch.from_numpy(masks), starts, heights, widths)

    def to(self, device: torch.device) -> Pictures:
        return self._replace(pixels=to_device(self.pixels, device), masks=to_device(self.masks, device))


class Line(NamedTuple):
    """Where the rows (or columns) of crops come from, `[B, size]`: two neighbours, the share of the second, the
    nearest, and whether there is a picture at all."""

    first: np.ndarray
    second: np.ndarray
    share: np.ndarray
    nearest: np.ndarray
    inside: np.ndarray

    @classmethod
    def of(cls, lengths: np.ndarray, scaled: np.ndarray, start: np.ndarray, size: int) -> Line:
        """Pixel centres of a window `size` long at `start` of pictures that were `lengths` and became `scaled`."""
        place = start[:, None] + np.arange(size)
        inside = place < scaled[:, None]
        exact = (np.minimum(place, scaled[:, None] - 1) + 0.5) * (lengths / scaled)[:, None]
        last = lengths[:, None] - 1
        below = np.clip(exact - 0.5, 0, last)
        first = np.floor(below).astype(np.int64)
        nearest = np.minimum(np.floor(exact).astype(np.int64), last)
        return cls(first, np.minimum(first + 1, last), (below - first).astype(np.float32), nearest, inside)

    def flipped(self, which: np.ndarray) -> Line:
        """What is padded stays at the end, as it is in tests."""
        length, place = self.inside.sum(1, keepdims=True), np.arange(self.inside.shape[1])
        source = np.where(which[:, None] & (place < length), length - 1 - place, place)
        return Line(*(np.take_along_axis(x, source, 1) for x in self))


def random_crops(
    pictures: Pictures, index: np.ndarray, settings: Augmentation, keys: Keys, size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Crops `[B, 3, size, size]` with levels 0..255, their masks `[B, size, size]`, and where there is a picture
    `[B, 1, size, size]`. The short side becomes `size` times a random scale; what is smaller than the crop is padded
    at the right and the bottom."""
    heights, widths = pictures.heights[index], pictures.widths[index]
    u = keys.uniform(CROP, 3)
    low, high = settings.scale
    factor = size * (low + (high - low) * u[:, 0]) / np.minimum(heights, widths)
    lines = []
    for lengths, number in ((heights, u[:, 1]), (widths, u[:, 2])):
        scaled = np.maximum(1, np.rint(lengths * factor)).astype(np.int64)
        start = np.floor(number * (np.maximum(scaled - size, 0) + 1)).astype(np.int64)
        lines.append(Line.of(lengths, scaled, start, size))
    rows, columns = lines
    columns = columns.flipped(keys.uniform(FLIP, 1)[:, 0] < settings.flip)
    return gather(pictures, index, rows, columns)


def gather(pictures: Pictures, index: np.ndarray, rows: Line, columns: Line) -> tuple[Tensor, Tensor, Tensor]:
    def down(x: np.ndarray) -> Tensor:
        return to_device(np.ascontiguousarray(x), pictures.pixels.device)[:, :, None]

    def across(x: np.ndarray) -> Tensor:
        return down(x).transpose(1, 2)

    start, width = pictures.starts[index][:, None], pictures.widths[index][:, None]
    first, second = (down(start + row * width) for row in (rows.first, rows.second))
    left, right = across(columns.first), across(columns.second)
    share = across(columns.share).unsqueeze(-1)

    def line(row: Tensor) -> Tensor:
        a, b = pictures.pixels[row + left].float(), pictures.pixels[row + right].float()
        return torch.lerp(a, b, share)

    levels = torch.lerp(line(first), line(second), down(rows.share).unsqueeze(-1)).permute(0, 3, 1, 2)
    inside = down(rows.inside) & across(columns.inside)
    mask = pictures.masks[down(start + rows.nearest * width) + across(columns.nearest)].long()
    return levels, mask.masked_fill(~inside, IGNORED), inside.unsqueeze(1)


def photometric(levels: Tensor, keys: Keys) -> Tensor:
    """Brightness by up to 32 levels, contrast and saturation by 0.5 to 1.5, hue by up to 36 degrees, each with
    probability one half; contrast comes before colour or behind it (Liu et al., 2016)."""
    u = keys.uniform(PHOTOMETRIC, 9)
    on = u[:, :4] < 0.5
    brightness = np.where(on[:, 0], 64 * u[:, 4] - 32, 0)
    contrast = np.where(on[:, 1], 0.5 + u[:, 5], 1)
    saturation = np.where(on[:, 2], 0.5 + u[:, 6], 1)
    hue = np.where(on[:, 3], 0.2 * (2 * u[:, 7] - 1) * 3, 0)  # in sixths of the circle
    early = u[:, 8] < 0.5
    values = np.stack((brightness, np.where(early, contrast, 1), saturation, hue, np.where(early, 1, contrast)), 1)
    b, first, s, h, last = to_device(values.astype(np.float32), levels.device)[:, :, None, None, None].unbind(1)
    x = ((levels + b).clamp(0, 255) * first).clamp(0, 255)
    return (shift_colour(x, s, h) * last).clamp(0, 255)


def shift_colour(x: Tensor, saturation: Tensor, hue: Tensor) -> Tensor:
    """Saturation times a factor (at most full) and hue plus sixths of the circle, in HSV."""
    high, which = x.max(1, keepdim=True)
    low = x.amin(1, keepdim=True)
    spread = high - low
    red, green, blue = x.split(1, 1)
    safe = spread.clamp(min=1e-6)
    sixth = torch.where(
        which == 0, (green - blue) / safe, torch.where(which == 1, 2 + (blue - red) / safe, 4 + (red - green) / safe)
    )
    spread = torch.minimum(spread * saturation, high)
    offsets = 5 - 2 * torch.arange(3, device=x.device).view(1, 3, 1, 1)  # of red, green and blue
    k = (offsets + sixth + hue).remainder(6)
    return high - spread * torch.minimum(k, 4 - k).clamp(0, 1)
