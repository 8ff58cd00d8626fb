"""ADE20K SceneParse150 as it comes: `images/{training,validation}/*.jpg` and `annotations/{training,validation}/*.png`.

A mask's 0 is no class and is ignored, 1..150 become the classes 0..149. Other data sets in the same layout are read
with another `num_classes`. Training sees crops after a random scale, flip and photometric distortion.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lrfdyn.data.augment import Augmentation, normalise
from lrfdyn.data.base import Batch, DataSource, register_data
from lrfdyn.data.hashed_random import CROP, FLIP, PHOTOMETRIC, Keys
from lrfdyn.data.loading import load_in_order, to_device
from lrfdyn.data.preprocess import IMAGENET_DEVIATION, IMAGENET_MEAN, eight_bits, require_pillow, scaled_size
from lrfdyn.errors import LrfdynError, require, require_integer
from lrfdyn.files import plain_file

if TYPE_CHECKING:
    from PIL.Image import Image

FOLDER = "ADEChallengeData2016"
IMAGE_ENDINGS = (".jpg", ".jpeg", ".png")
CLASSES = 150
IGNORED = 255  # in a mask: no class, does not count
USED = ("flip", "scale", "photometric", "repeats")  # settings of the augmentation
Picture = tuple[np.ndarray, np.ndarray]  # image [H, W, 3], mask [H, W] of classes and IGNORED


class Pair(NamedTuple):
    image: Path
    mask: Path


def find_pairs(root: Path, split: str) -> list[Pair]:
    """The images of a split in the order of their names, each with its mask; `root` may hold the official folder."""
    root = root / FOLDER if (root / FOLDER).is_dir() else root
    images, masks = root / "images" / split, root / "annotations" / split
    for folder in (images, masks):
        require(folder.is_dir(), f"root: no such folder {folder}")
    found = sorted(path for path in images.iterdir() if path.suffix.lower() in IMAGE_ENDINGS)
    require(bool(found), f"root: {images} has no images")
    pairs = [Pair(path, masks / f"{path.stem}.png") for path in found]
    for pair in pairs:
        require(pair.mask.is_file(), f"root: the image {pair.image} has no mask {pair.mask}")
    return pairs


@contextmanager
def opened(path: Path, what: str) -> Iterator[Image]:
    """The file of an image or a mask; whatever is wrong with it is an error that names it."""
    from PIL.Image import open as open_image

    try:
        with open_image(plain_file(path)) as file:
            yield file
    except Exception as error:  # damaged files make decoders fail in any way
        raise LrfdynError(f"data: cannot read the {what} {path} ({type(error).__name__}: {error})") from None


def read_mask(pair: Pair, classes: int = CLASSES) -> np.ndarray:
    """The mask `[H, W]` of bytes: classes from 0 on, IGNORED for none; its image is not decoded, but must fit."""
    with opened(pair.image, "image") as file:
        width, height = file.size
    with opened(pair.mask, "mask") as file:
        mode, values = file.mode, np.asarray(file)
    require(mode in ("L", "P"), f"data: the mask {pair.mask} is not of 8-bit numbers (mode {mode})")
    largest, (high, wide) = int(values.max()), values.shape
    require(largest <= classes, f"data: the mask {pair.mask} has the value {largest}, expected 0..{classes}")
    same = (wide, high) == (width, height)
    require(same, f"data: the mask {pair.mask} is {wide}x{high} pixels, its image {width}x{height}")
    return (values - np.uint8(1)).astype(np.uint8)  # 0 wraps to 255, which is IGNORED


def read_pair(pair: Pair, classes: int = CLASSES, short_side: int | None = None) -> Picture:
    """The image `[H, W, 3]` and the mask `[H, W]`, both as they are stored, whatever EXIF says of the camera; with
    `short_side` the image is scaled to it and the mask stays."""
    mask = read_mask(pair, classes)
    with opened(pair.image, "image") as file:
        image = eight_bits(file).convert("RGB")
    if short_side is not None:
        from PIL.Image import Resampling

        image = image.resize(scaled_size(image.size, short_side / min(image.size)), Resampling.BILINEAR)
    return np.asarray(image), mask


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


@register_data("ade20k")
class Ade20k(DataSource):
    """Training crops of `image_size`, test images whole, with whole masks. `resident`: all pictures are decoded once,
    by `workers` threads, and stay in memory, those for training on the device; else `workers` processes decode while
    training runs. `test_size` is the short side that test images are scaled to (None: as they are; predictions are
    scaled back), `window` evaluates them in overlapping squares of that side, `flip` with their mirror image too."""

    task = "segmentation"
    unused_settings = tuple(field.name for field in fields(Augmentation) if field.name not in USED)
    num_classes, image_size, in_channels, train_images, test_images = CLASSES, 512, 3, 20_210, 2_000
    mean, deviation = IMAGENET_MEAN, IMAGENET_DEVIATION

    def __init__(
        self,
        root: Path,
        augment: Augmentation,
        *,
        image_size: int = 512,
        num_classes: int = CLASSES,
        resident: bool = False,
        workers: int = 0,
        test_size: int | None = None,
        window: int | None = None,
        flip: bool = False,
    ) -> None:
        require_pillow("data: decoding images")
        require_integer("num_classes", num_classes, 2)  # with one there is nothing to decide
        for name, side in (("image_size", image_size), ("test_size", test_size), ("window", window)):
            require_integer(name, 1 if side is None else side, 1, most=2**14)
        for name, on in (("resident", resident), ("flip", flip)):
            require(isinstance(on, bool), f"{name}: expected true or false, got {on!r}")
        require(num_classes <= CLASSES, f"num_classes: masks of bytes hold up to {CLASSES}, got {num_classes}")
        require_integer("workers", workers, 0)
        super().__init__(root, augment)
        self._train_pairs, self.test_pairs = find_pairs(root, "training"), find_pairs(root, "validation")
        self.train_images, self.test_images = len(self._train_pairs), len(self.test_pairs)
        self.num_classes, self.image_size, self.window, self.flip = num_classes, image_size, window, flip
        self._workers, self._test_size, self._resident = workers, test_size, resident
        self._pictures: dict[torch.device, Pictures] = {}

    def _each(self, read: Callable[..., Any], pairs: Sequence[Pair], *arguments: Any) -> list[Any]:
        """`read(pair, classes, ...)` of all pairs, by several threads: decoders release the interpreter."""
        with ThreadPoolExecutor(max(1, self._workers)) as pool:
            return list(pool.map(lambda pair: read(pair, self.num_classes, *arguments), pairs))

    @cached_property
    def _test_pictures(self) -> list[Picture]:
        """Of resident data, decoded when they are first asked for."""
        return self._each(read_pair, self.test_pairs, self._test_size)

    def check_test_pairs(self) -> None:
        """Raises what the first test would, which may come after hours of training."""
        if self._resident:
            _ = self._test_pictures
        else:
            self._each(read_mask, self.test_pairs)

    def _train(self, steps: Sequence[Keys], size: int, device: torch.device, number: int) -> Iterator[Batch]:
        if self._resident:
            if device not in self._pictures:
                self._pictures[device] = Pictures.pack(self._each(read_pair, self._train_pairs)).to(device)
            loaded = ((self._pictures[device], keys.samples) for keys in steps)
        else:
            decoded = load_in_order(self._read_train, steps, self._workers, device)
            loaded = ((pictures.to(device), np.arange(len(pictures.starts))) for pictures in decoded)
        for keys, (pictures, index) in zip(steps, loaded, strict=True):
            levels, mask, inside = random_crops(pictures, index, self.augment, keys, self.image_size)
            if self.augment.photometric:
                levels = photometric(levels, keys)
            # What is padded has the mean colour: zero in the normalised image.
            images = normalise(levels, self.mean, self.deviation) * inside
            yield Batch(images.contiguous(memory_format=torch.channels_last), mask, mask, len(mask))

    def _read_train(self, keys: Keys) -> Pictures:
        return Pictures.pack([read_pair(self._train_pairs[i], self.num_classes) for i in keys.samples])

    def _test(self, slices: Sequence[np.ndarray], batch_size: int, device: torch.device) -> Iterator[Batch]:
        shown = [indices if len(indices) else np.arange(1) for indices in slices]  # any image fills up
        loaded = load_in_order(self._read_test, shown, 0 if self._resident else self._workers, device)
        for indices, (levels, masks, shapes) in zip(slices, loaded, strict=True):
            images = normalise(to_device(levels, device).permute(0, 3, 1, 2).float(), self.mean, self.deviation)
            for (height, width, _), padded in zip(shapes, images, strict=True):
                padded[:, height:], padded[:, :, width:] = 0, 0
            labels = to_device(masks, device).long()
            yield Batch(images.contiguous(memory_format=torch.channels_last), labels, labels, len(indices))

    def _read_test(self, indices: np.ndarray) -> tuple[Tensor, Tensor, list[tuple[int, ...]]]:
        if self._resident:
            pictures = [self._test_pictures[i] for i in indices]
        else:
            pictures = [read_pair(self.test_pairs[i], self.num_classes, self._test_size) for i in indices]
        images, masks = zip(*pictures, strict=True)
        return stack(images, 0), stack(masks, IGNORED), [image.shape for image in images]

    def _test_slices(self, batch_size: int, multiple: int) -> list[np.ndarray]:
        """Images of one size come together, or those that a network pads to one."""
        whole = self._test_size is None and self.window is None and not self.flip  # else padding would be seen
        step = multiple if whole else 1
        groups: dict[tuple[int, ...], list[int]] = {}
        for i in range(self.test_images):
            groups.setdefault(tuple(-(-side // step) for side in self._size(i)), []).append(i)
        return [np.array(g[i : i + batch_size]) for g in groups.values() for i in range(0, len(g), batch_size)]

    def _size(self, index: int) -> tuple[int, ...]:
        """Of the mask; it decides that of the image."""
        if self._resident:
            return self._test_pictures[index][1].shape
        with opened(self.test_pairs[index].mask, "mask") as file:
            return file.size
