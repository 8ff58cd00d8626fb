"""Class scores of images of any size: whole or in windows, with or without the mirror image."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from lrfdyn.checks import checked
from lrfdyn.errors import require
from lrfdyn.ops.dispatch import plain_operations
from lrfdyn.segmentation.model import Segmenter

OVERLAP = 1 / 3  # of neighbouring windows
MOST_SCORES = 2**25  # that are scaled at once


def pad_to_stride(images: Tensor, stride: int) -> Tensor:
    """Pad images `[..., H, W]` with zeros, the mean colour, at the right and the bottom to whole strides."""
    height, width = images.shape[-2:]
    return F.pad(images, (0, -width % stride, 0, -height % stride))


def window_starts(length: int, window: int) -> list[int]:
    """Return where windows begin that overlap by a third at least; the last one ends with the picture."""
    if length <= window:
        return [0]
    step = max(1, round(window * (1 - OVERLAP)))
    return [*range(0, length - window, step), length - window]


def check_window(window: int | None, stride: int) -> None:
    require(window is None or window >= stride, f"window: expected at least the stride {stride}, got {window}")


@checked
def segment(
    model: Segmenter,
    images: Tensor,
    size: Sequence[int] | None = None,
    *,
    window: int | None = None,
    flip: bool = False,
) -> Tensor:
    """Compute scores `[B, classes, H, W]` of normalised images `[B, 3, h, w]`: logits, or with `flip` the logarithm of
    the mean probability. `size` is that of the scores, by default the images'.

    The fused kernels are compiled for one size each, so pictures of many sizes take the plain operations.
    """
    check_window(window, model.stride)

    def whole(x: Tensor) -> Tensor:
        logits = model(pad_to_stride(x, model.stride))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return logits[..., : x.shape[-2], : x.shape[-1]]

    look = whole if window is None else lambda x: in_windows(whole, x, window)
    with plain_operations(), any_size():
        scores = look(images)
        if flip:
            mirrored = look(images.flip(-1)).flip(-1)
            scores = ((scores.softmax(1) + mirrored.softmax(1)) / 2).clamp(min=1e-30).log()
    if size is None or scores.shape[-2:] == torch.Size(size):
        return scores
    return F.interpolate(scores, size=tuple(size), mode="bilinear")


@contextmanager
def any_size() -> Iterator[None]:
    """Turn off the search for the fastest convolutions, which training turns on: it would begin anew with each size."""
    before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def best_class(scores: Tensor, size: tuple[int, int]) -> Tensor:
    """Return the best class `[B, H, W]` after scaling to `size`, a few classes at a time: they need much memory."""
    if scores.shape[-2:] == torch.Size(size):
        return scores.argmax(1)
    at_once = max(1, MOST_SCORES // (len(scores) * size[0] * size[1]))
    best = scores.new_full((len(scores), *size), -torch.inf)
    where = torch.zeros(best.shape, dtype=torch.long, device=scores.device)
    for first, part in zip(range(0, scores.shape[1], at_once), scores.split(at_once, 1), strict=True):
        value, index = F.interpolate(part, size=size, mode="bilinear").max(1)
        where, best = torch.where(value > best, index + first, where), torch.maximum(value, best)
    return where


def in_windows(look: Callable[[Tensor], Tensor], images: Tensor, window: int) -> Tensor:
    """Return the mean of the logits of all windows that see a pixel."""
    seen, total = torch.zeros(images.shape[-2:], device=images.device), torch.zeros(0)
    for top, left in product(*(window_starts(length, window) for length in seen.shape)):
        place = (..., slice(top, top + window), slice(left, left + window))
        logits = look(images[place])
        total = total if len(total) else logits.new_zeros(*logits.shape[:2], *seen.shape)
        total[place] += logits
        seen[place] += 1
    return total / seen
