"""Random crops of pictures with masks, and what else happens to them in training, in batches on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lrfdyn.data.augment import Augmentation
from lrfdyn.data.hashed_random import CROP, FLIP, PHOTOMETRIC, Keys
from lrfdyn.data.loading import to_device
from lrfdyn.segmentation.pairs import IGNORED, Picture


class Pictures(NamedTuple):
    """`pixels` `[n, 3]` and `masks` `[n]` of many pictures; picture i begins at `starts[i]`, row after row. So a batch
    of crops is a few gathers, whatever the sizes are."""

    pixels: Tensor
    masks: Tensor
    starts: np.ndarray
    heights: np.ndarray
    widths: np.ndarray

    @classmethod
    def pack(cls, pictures: list[Picture]) -> Pictures:
        heights, widths = np.array([mask.shape for _, mask in pictures]).T
        starts = np.cumsum(heights * widths) - heights * widths
        pixels = np.concatenate([image.reshape(-1, 3) for image, _ in pictures])
        masks = np.concatenate([mask.reshape(-1) for _, mask in pictures])
        return cls(torch.from_numpy(pixels), torch.from_numpy(masks), starts, heights, widths)

    def to(self, device: torch.device) -> Pictures:
        return self._replace(pixels=to_device(self.pixels, device), masks=to_device(self.masks, device))


def neighbours(
    lengths: np.ndarray, factor: np.ndarray, number: np.ndarray, flipped: np.ndarray, size: int
) -> tuple[np.ndarray, ...]:
    """Where the rows (or columns) of crops come from, `[B, size]`: two neighbours, the nearest, the share of the
    second, whether there is a picture at all. `lengths` are scaled by `factor`; `number` chooses the window."""
    scaled = np.maximum(1, np.rint(lengths * factor)).astype(np.int64)
    start = np.floor(number * (np.maximum(scaled - size, 0) + 1)).astype(np.int64)
    place, shown, last = np.arange(size), np.minimum(scaled - start, size)[:, None], lengths[:, None] - 1
    inside = place < shown  # what is padded stays at the end, flipped or not
    place = start[:, None] + np.where(flipped[:, None] & inside, shown - 1 - place, place)
    centre = (np.minimum(place, scaled[:, None] - 1) + 0.5) * (lengths / scaled)[:, None]
    below = np.clip(centre - 0.5, 0, last)
    first = np.floor(below).astype(np.int64)
    nearest = np.minimum(np.floor(centre).astype(np.int64), last)
    return first, np.minimum(first + 1, last), nearest, (below - first).astype(np.float32), inside


def random_crops(
    pictures: Pictures, index: np.ndarray, settings: Augmentation, keys: Keys, size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Crops `[B, 3, size, size]` with levels 0..255, their masks `[B, size, size]`, and where there is a picture
    `[B, 1, size, size]`. The short side becomes `size` times a random scale, padded at the right and the bottom."""
    heights, widths, (low, high) = pictures.heights[index], pictures.widths[index], settings.scale
    u, flipped = keys.uniform(CROP, 3), keys.uniform(FLIP, 1)[:, 0] < settings.flip
    factor = size * (low + (high - low) * u[:, 0]) / np.minimum(heights, widths)
    *rows, row_share, row_inside = neighbours(heights, factor, u[:, 1], np.zeros_like(flipped), size)
    columns = neighbours(widths, factor, u[:, 2], flipped, size)
    starts = [pictures.starts[index][:, None] + row * widths[:, None] for row in rows]
    device = pictures.pixels.device
    top, bottom, row, down, high_enough = (to_device(x, device)[:, :, None] for x in (*starts, row_share, row_inside))
    left, right, column, across, wide_enough = (to_device(x, device)[:, None] for x in columns)

    def line(row: Tensor) -> Tensor:
        a, b = pictures.pixels[row + left].float(), pictures.pixels[row + right].float()
        return torch.lerp(a, b, across.unsqueeze(-1))

    levels = torch.lerp(line(top), line(bottom), down.unsqueeze(-1)).permute(0, 3, 1, 2)
    inside = high_enough & wide_enough
    mask = pictures.masks[row + column].long().masked_fill(~inside, IGNORED)
    return levels, mask, inside.unsqueeze(1)


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
    spread = high - x.amin(1, keepdim=True)
    (red, green, blue), safe = x.split(1, 1), spread.clamp(min=1e-6)
    other = torch.where(which == 1, 2 + (blue - red) / safe, 4 + (red - green) / safe)
    sixth = torch.where(which == 0, (green - blue) / safe, other)
    spread = torch.minimum(spread * saturation, high)
    offsets = 5 - 2 * torch.arange(3, device=x.device).view(1, 3, 1, 1)  # of red, green and blue
    k = (offsets + sixth + hue).remainder(6)
    return high - spread * torch.minimum(k, 4 - k).clamp(0, 1)


def stack(arrays: Sequence[np.ndarray], fill: int) -> Tensor:
    """`[B, H, W, ...]`, with `fill` at the right and the bottom of what is smaller than the largest."""
    height, width = np.max([array.shape[:2] for array in arrays], 0)
    stacked = np.full((len(arrays), height, width, *arrays[0].shape[2:]), fill, np.uint8)
    for array, place in zip(arrays, stacked, strict=True):
        place[: array.shape[0], : array.shape[1]] = array
    return torch.from_numpy(stacked)
