"""ADE20K SceneParse150 as it comes: `images/{training,validation}/*.jpg` and `annotations/{training,validation}/*.png`.

A mask's 0 is no class and is ignored, 1..150 become the classes 0..149. Other data sets in the same layout are read
with another `num_classes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lrfdyn.data.augment import Augmentation, normalise
from lrfdyn.data.base import Batch, DataSource, register_data
from lrfdyn.data.hashed_random import Keys
from lrfdyn.data.loading import load_in_order, to_device
from lrfdyn.data.preprocess import IMAGENET_DEVIATION, IMAGENET_MEAN, eight_bits, require_pillow, scaled_size
from lrfdyn.errors import LrfdynError, require, require_integer
from lrfdyn.segmentation.augment import IGNORED, Pictures, photometric, random_crops

if TYPE_CHECKING:
    from PIL.Image import Image

FOLDER = "ADEChallengeData2016"
IMAGE_ENDINGS = (".jpg", ".jpeg", ".png")
CLASSES = 150
USED = ("flip", "scale", "photometric", "repeats")  # settings of the augmentation
Picture = tuple[np.ndarray, np.ndarray]  # image [H, W, 3], mask [H, W] of classes and IGNORED
Result = TypeVar("Result")


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
        with open_image(path) as file:
            yield file
    except Exception as error:  # damaged files make decoders fail in any way
        raise LrfdynError(f"data: cannot read the {what} {path} ({type(error).__name__}: {error})") from None


def read_mask(pair: Pair, classes: int = CLASSES) -> np.ndarray:
    """The mask `[H, W]` of bytes: classes from 0 on, IGNORED for none. Its image, which must have the same size, is not
    decoded."""
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
    """The image `[H, W, 3]` and the mask `[H, W]`; with `short_side` the image is scaled to it and the mask stays.

    Both are taken as they are stored: masks lie beside the stored pixels and know nothing of a camera that was turned.
    """
    mask = read_mask(pair, classes)
    with opened(pair.image, "image") as file:
        image = eight_bits(file).convert("RGB")
    if short_side is not None:
        from PIL.Image import Resampling

        image = image.resize(scaled_size(image.size, short_side / min(image.size)), Resampling.BILINEAR)
    return np.asarray(image), mask


@dataclass(frozen=True)
class Loader(Dataset):
    """From a training step or test indices to pictures, in the worker processes, where an error can only be told."""

    pairs: list[Pair]
    classes: int
    short_side: int | None = None

    def __getitem__(self, wanted: Keys | np.ndarray) -> Pictures | list[Picture] | str:
        samples = wanted.samples if isinstance(wanted, Keys) else wanted
        try:
            pictures = [read_pair(self.pairs[i], self.classes, self.short_side) for i in samples]
        except LrfdynError as error:
            return str(error)
        return Pictures.pack(pictures) if isinstance(wanted, Keys) else pictures


def stack(arrays: Sequence[np.ndarray], fill: int) -> np.ndarray:
    """`[B, H, W, ...]`, with `fill` at the right and the bottom of what is smaller than the largest."""
    height, width = np.max([array.shape[:2] for array in arrays], 0)
    stacked = np.full((len(arrays), height, width, *arrays[0].shape[2:]), fill, np.uint8)
    for array, place in zip(arrays, stacked, strict=True):
        place[: array.shape[0], : array.shape[1]] = array
    return stacked


@register_data("ade20k")
class Ade20k(DataSource):
    """Training crops of `image_size`, test images whole, `labels` as large as the mask.

    `resident`: all pictures are decoded once, by `workers` threads, and stay in memory, those for training on the
    device; else `workers` processes decode while training runs. `test_size` is the short side that test images are
    scaled to (None: as they are; the prediction is scaled back and compared with the whole mask). `window` evaluates
    them in overlapping squares of that side, `flip` together with their mirror image.
    """

    task = "segmentation"
    unused_settings = tuple(field.name for field in fields(Augmentation) if field.name not in USED)
    num_classes, image_size, in_channels, train_images = CLASSES, 512, 3, 20_210
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
            if side is not None:
                require_integer(name, side, 1)
        for name, on in (("resident", resident), ("flip", flip)):
            require(isinstance(on, bool), f"{name}: expected true or false, got {on!r}")
        require(num_classes <= CLASSES, f"num_classes: masks of bytes hold up to {CLASSES}, got {num_classes}")
        require_integer("workers", workers, 0)
        super().__init__(root, augment)
        self._train_pairs, self.test_pairs = find_pairs(root, "training"), find_pairs(root, "validation")
        self.train_images, self.test_images = len(self._train_pairs), len(self.test_pairs)
        self.num_classes, self.image_size = num_classes, image_size
        self.window, self.flip = window, flip
        self._workers, self._test_size, self._resident = workers, test_size, resident
        self._pictures: dict[torch.device, Pictures] = {}

    def _each(self, read: Callable[..., Result], pairs: Sequence[Pair], *arguments: Any) -> list[Result]:
        """`read(pair, classes, ...)` of all pairs, by several threads: decoders release the interpreter."""
        with ThreadPoolExecutor(max(1, self._workers)) as pool:
            return list(pool.map(lambda pair: read(pair, self.num_classes, *arguments), pairs))

    @cached_property
    def _test_pictures(self) -> list[Picture]:
        """Of resident data, decoded when they are first asked for, as those for training are."""
        return self._each(read_pair, self.test_pairs, self._test_size)

    def check_test_pairs(self) -> None:
        """Raises what the first test would, which may come after hours of training."""
        if self._resident:
            _ = self._test_pictures
        else:
            self._each(read_mask, self.test_pairs)

    def load_train(self, steps: Sequence[Keys], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        if self._resident:
            if device not in self._pictures:
                self._pictures[device] = Pictures.pack(self._each(read_pair, self._train_pairs)).to(device)
            loaded = ((self._pictures[device], keys.samples) for keys in steps)
        else:
            decoded = self._decoded(Loader(self._train_pairs, self.num_classes), steps, device)
            loaded = ((pictures.to(device), np.arange(len(pictures.starts))) for pictures in decoded)
        for keys, (pictures, index) in zip(steps, loaded, strict=True):
            levels, mask, inside = random_crops(pictures, index, self.augment, keys, self.image_size)
            if self.augment.photometric:
                levels = photometric(levels, keys)
            # What is padded has the mean colour: zero in the normalised image.
            images = normalise(levels, self.mean, self.deviation) * inside
            yield images.contiguous(memory_format=torch.channels_last), mask

    def _decoded(self, loader: Loader, wanted: Sequence[Any], device: torch.device) -> Iterator[Any]:
        for pictures in load_in_order(loader, wanted, self._workers, device):
            require(not isinstance(pictures, str), pictures)
            yield pictures

    def _train(self, steps: Sequence[Keys], size: int, device: torch.device, number: int) -> Iterator[Batch]:
        for images, labels in self.load_train(steps, device):
            yield Batch(images, labels, labels, len(images))

    def load_test(self, slices: Sequence[np.ndarray], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        loader = Loader(self.test_pairs, self.num_classes, self._test_size)
        kept = ([self._test_pictures[i] for i in indices] for indices in slices)
        for pictures in kept if self._resident else self._decoded(loader, slices, device):
            levels = to_device(stack([image for image, _ in pictures], 0), device).permute(0, 3, 1, 2)
            images = normalise(levels.float(), self.mean, self.deviation)
            for (image, _), padded in zip(pictures, images, strict=True):
                padded[:, image.shape[0] :], padded[:, :, image.shape[1] :] = 0, 0
            masks = to_device(stack([mask for _, mask in pictures], IGNORED), device).long()
            yield images.contiguous(memory_format=torch.channels_last), masks

    def _test(self, slices: Sequence[np.ndarray], batch_size: int, device: torch.device) -> Iterator[Batch]:
        shown = [indices if len(indices) else np.arange(1) for indices in slices]  # any image fills up
        for indices, (images, labels) in zip(slices, self.load_test(shown, device), strict=True):
            yield Batch(images, labels, labels, len(indices))

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
