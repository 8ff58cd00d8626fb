"""Batched augmentation: random numbers are drawn on the host, pixels are touched on the device, and nobody waits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lrfdyn.checks import check_fields
from lrfdyn.data.hashed_random import CROP, ERASE, ERASE_NOISE, FLIP, MIX, Keys, device_normal, hashed
from lrfdyn.data.loading import to_device
from lrfdyn.data.randaugment import OPERATIONS, rand_augment
from lrfdyn.errors import require, unknown_name

Levels = tuple[float, ...]  # one number per channel
# What may happen to a recording; the order is part of the definition of every run.
EVENT_OPERATIONS = ("identity", "shear_x", "shift_x", "shift_y", "rotate", "cut_out")
ATTEMPTS = 10  # at a rectangle that fits, before the image is left alone


@dataclass(frozen=True)
class Augmentation:
    """What happens to training images; everything is off by default. The values in brackets are the usual ones."""

    crop: Annotated[
        Literal["none", "pad", "resized"],
        "pad: a random window; resized: a random part (decoded images); none: the centre.",
    ] = "none"
    crop_padding: Annotated[int, "Pixels on every side, of crop pad."] = 4
    crop_scale: Annotated[tuple[float, float], "Share of the area, of crop resized."] = (0.08, 1.0)
    crop_ratio: Annotated[tuple[float, float], "Width over height, of crop resized."] = (3 / 4, 4 / 3)
    flip: Annotated[float, "Probability of a mirror image [0.5]."] = 0.0
    rand_augment_layers: Annotated[int, "Operations of RandAugment in a row [1 or 2]; 0: off."] = 0
    rand_augment_magnitude: Annotated[float, "Strength of RandAugment, 0 to 10."] = 9.0
    rand_augment_deviation: Annotated[float, "Deviation of the magnitude, per image and layer."] = 0.5
    rand_augment_probability: Annotated[float, "Probability that a layer acts on an image (paper 1, timm 0.5)."] = 0.5
    rand_augment_operations: Annotated[tuple[str, ...] | None, "Names that a layer chooses from; null: all 14."] = None
    erase: Annotated[float, "Probability of random erasing [0.25]."] = 0.0
    erase_area: Annotated[tuple[float, float], "Share of the image that is erased."] = (0.02, 1 / 3)
    erase_fill: Annotated[Literal["noise", "mean"], "Normal noise per pixel, or the mean colour, zero."] = "noise"
    mixup: Annotated[float, "Alpha of the Beta distribution of mixup [0.8]; 0: off."] = 0.0
    cutmix: Annotated[float, "Alpha of cutmix [1.0]; 0: off."] = 0.0
    mix_probability: Annotated[float, "Probability that a step is mixed at all."] = 1.0
    cutmix_share: Annotated[float, "Share of cutmix among the mixed steps, where both are on."] = 0.5
    label_smoothing: Annotated[float, "Share of a target that is spread over all classes [0.1]."] = 0.0
    repeats: Annotated[int, "Augmentations of every image in a global batch [3]; more: fewer images per epoch."] = 1
    scale: Annotated[tuple[float, float], "Of images with masks: the short side over the crop [0.5, 2]."] = (1.0, 1.0)
    photometric: Annotated[bool, "Of images with masks: random brightness, contrast, saturation and hue."] = False
    event_operations: Annotated[
        tuple[str, ...] | None,
        f"Of recordings: every one gets one of these, the same for all frames ({', '.join(EVENT_OPERATIONS)}).",
    ] = None

    def __post_init__(self) -> None:
        check_fields(self)
        pairs = ("crop_scale", "crop_ratio", "erase_area", "scale")
        operations = {"rand_augment_operations": OPERATIONS, "event_operations": EVENT_OPERATIONS}
        for name in (*pairs, *(name for name in operations if getattr(self, name) is not None)):
            object.__setattr__(self, name, tuple(getattr(self, name)))  # lists, as configuration files have them
        probabilities = ("flip", "erase", "mix_probability", "cutmix_share", "rand_augment_probability")
        amounts = ("crop_padding", "rand_augment_layers", "rand_augment_deviation", "mixup", "cutmix")
        checks: tuple[tuple[Sequence[str], Callable[[Any], bool], str], ...] = (
            (pairs, lambda v: len(v) == 2 and 0 < v[0] <= v[1], "two positive numbers, the smaller first"),
            (("crop_scale", "erase_area"), lambda v: v[1] <= 1, "shares up to 1"),
            (probabilities, lambda v: 0 <= v <= 1, "a probability"),
            (amounts, lambda v: v >= 0, "a number >= 0"),
            (["rand_augment_magnitude"], lambda v: 0 <= v <= 10, "0..10"),
            ([*operations], lambda v: v is None or len(v) > 0, "at least one name"),
            (["label_smoothing"], lambda v: 0 <= v < 1, "0 <= x < 1"),
            (["repeats"], lambda v: v >= 1, "an integer >= 1"),
        )
        for names, fits, expected in checks:
            for name in names:
                value = getattr(self, name)
                require(fits(value), f"{name}: expected {expected}, got {value!r}")
        for setting, known in operations.items():
            for name in getattr(self, setting) or ():
                if name not in known:
                    raise unknown_name(setting, name, known)

    @property
    def mixes(self) -> bool:
        return (self.mixup > 0 or self.cutmix > 0) and self.mix_probability > 0


def augment_images(levels: Tensor, settings: Augmentation, keys: Keys, mean: Levels, deviation: Levels) -> Tensor:
    """Normalised channels-last images of images with levels 0..255: all that happens to an image by itself."""
    levels = random_window(levels, settings, keys)
    if settings.rand_augment_layers:
        levels = rand_augment(levels.float(), keys, settings, [round(255 * m) for m in mean])
    images = normalise(levels, mean, deviation)
    if settings.erase:
        boxes = erase_boxes(keys, settings.erase, settings.erase_area, *levels.shape[-2:])
        noise = keys.bits(ERASE_NOISE)[:, 0].view(np.int64) if settings.erase_fill == "noise" else None
        images = erase(images, boxes, noise)
    return laid_out(images)


def random_window(images: Tensor, settings: Augmentation, keys: Keys) -> Tensor:
    """The windows and mirror images that the settings `crop` and `flip` ask for."""
    if settings.crop != "pad" and not settings.flip:
        return images
    padding = settings.crop_padding if settings.crop == "pad" else 0
    offsets = np.floor(keys.uniform(CROP, 2) * (2 * padding + 1)).astype(np.int64)
    return crop_flip(images, offsets, keys.uniform(FLIP, 1)[:, 0] < settings.flip, padding)


@lru_cache
def _constants(mean: Levels, deviation: Levels, device: torch.device) -> tuple[Tensor, Tensor]:
    """Kept on the device: a copy in every step would be one more thing to launch."""
    shift, scale = torch.tensor(mean) * 255, 1 / (torch.tensor(deviation) * 255)
    return shift.view(-1, 1, 1).to(device), scale.view(-1, 1, 1).to(device)


def normalise(levels: Tensor, mean: Levels, deviation: Levels) -> Tensor:
    shift, scale = _constants(mean, deviation, levels.device)
    return (levels - shift) * scale


def crop_flip(images: Tensor, offsets: np.ndarray, flipped: np.ndarray, padding: int) -> Tensor:
    """The window at `offsets` `[B, 2]` (row, column) of the image with `padding` zeros around it, then mirrored."""
    height, width = images.shape[-2:]
    columns = np.where(flipped[:, None], np.arange(width)[::-1], np.arange(width)) + offsets[:, 1:]
    r, c = (to_device(x, images.device) for x in (offsets[:, :1] + np.arange(height), columns))
    sample = torch.arange(len(images), device=images.device)[:, None, None]
    padded = F.pad(images, (padding,) * 4).permute(0, 2, 3, 1)
    return padded[sample, r[:, :, None], c[:, None, :]].permute(0, 3, 1, 2)


def erase_boxes(
    keys: Keys, probability: float, area: tuple[float, float], height: int, width: int, narrowest: float = 0.3
) -> np.ndarray:
    """`[B, 4]` top, bottom, left, right; empty where nothing is erased (Zhong et al., 2020). `narrowest` is the least
    ratio of two sides; 1: squares."""
    u = keys.uniform(ERASE, 1 + 4 * ATTEMPTS)
    chosen, u = u[:, 0] < probability, u[:, 1:].reshape(len(u), ATTEMPTS, 4)
    target = (area[0] + (area[1] - area[0]) * u[..., 0]) * height * width
    ratio = np.exp(math.log(narrowest) + (math.log(1 / narrowest) - math.log(narrowest)) * u[..., 1])
    h, w = np.rint(np.sqrt(target * ratio)).astype(int), np.rint(np.sqrt(target / ratio)).astype(int)
    fits = (h < height) & (w < width)
    pick = np.arange(len(u)), fits.argmax(1)
    chosen &= fits[pick]
    h, w = h[pick] * chosen, w[pick] * chosen
    top = np.floor(u[..., 2][pick] * (height - h + 1)).astype(int)
    left = np.floor(u[..., 3][pick] * (width - w + 1)).astype(int)
    return np.stack((top, top + h, left, left + w), 1)


def erase(images: Tensor, boxes: np.ndarray, noise_keys: np.ndarray | None) -> Tensor:
    """Normal noise in the boxes, or zeros where there are no keys for it."""
    device, (hit,) = images.device, np.nonzero((boxes[:, 1] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 2]))
    if not len(hit):
        return images
    index, box = to_device(hit, device), to_device(boxes[hit], device)
    part = images.index_select(0, index)
    fill = torch.zeros((), dtype=images.dtype, device=device)
    if noise_keys is not None:
        fill = device_normal(to_device(noise_keys[hit], device), part[0].numel()).view(part.shape).to(images.dtype)
    rows, columns = (torch.arange(side, device=device) for side in images.shape[2:])
    inside_rows = (rows >= box[:, 0:1]) & (rows < box[:, 1:2])
    inside_columns = (columns >= box[:, 2:3]) & (columns < box[:, 3:4])
    inside = (inside_rows[:, :, None] & inside_columns[:, None, :])[:, None]
    return images.index_copy(0, index, torch.where(inside, fill, part))


@dataclass(frozen=True)
class Mix:
    """How a step is mixed: `weight` of the image itself; a box (top, bottom, left, right) is the partner's alone."""

    weight: float
    box: tuple[int, int, int, int] | None = None


def draw_mix(settings: Augmentation, seed: int, epoch: int, step: int, height: int, width: int) -> Mix:
    generator = np.random.Generator(np.random.Philox(key=int(hashed(seed, epoch, MIX, step)[0])))
    mixed, cut, row, column = generator.random(4)
    if mixed >= settings.mix_probability:
        return Mix(1.0)
    if cut >= (settings.cutmix_share if settings.mixup and settings.cutmix else float(settings.cutmix > 0)):
        return Mix(generator.beta(settings.mixup, settings.mixup))
    # Yun et al. (2019): a box of the image's shape around a uniform centre, cut off at the borders.
    side = math.sqrt(1 - generator.beta(settings.cutmix, settings.cutmix))
    (top, bottom), (left, right) = (
        (max(0, int(u * length) - int(length * side) // 2), min(length, int(u * length) + int(length * side) // 2))
        for u, length in ((row, height), (column, width))
    )
    return Mix(1 - (bottom - top) * (right - left) / (height * width), (top, bottom, left, right))


def mix(images: Tensor, targets: Tensor, how: Mix) -> tuple[Tensor, Tensor]:
    """Images 2i and 2i+1 are each other's partners (the batch is even), `[B, C, H, W]` or frames `[T, B, C, H, W]`."""
    if how.weight == 1:
        return images, targets
    partner, other = images.unflatten(-4, (-1, 2)).flip(-4).flatten(-5, -4), targets.unflatten(0, (-1, 2)).flip(1)
    if how.box is None:
        images = how.weight * images + (1 - how.weight) * partner
    else:
        top, bottom, left, right = how.box
        images = images.clone()
        images[..., top:bottom, left:right] = partner[..., top:bottom, left:right]
    return laid_out(images), how.weight * targets + (1 - how.weight) * other.flatten(0, 1)


def laid_out(images: Tensor) -> Tensor:
    """In memory as the models like it: images channels-last; frames `[T, B, C, H, W]` have no such form."""
    return images.contiguous(memory_format=torch.channels_last if images.dim() == 4 else torch.contiguous_format)


def smooth_targets(labels: Tensor, classes: int, smoothing: float) -> Tensor:
    # Not torch's one_hot: it may look at the labels on the host first.
    hit = labels[:, None] == torch.arange(classes, device=labels.device)
    return hit.float() * (1 - smoothing) + smoothing / classes
