"""Semantic segmentation: what all data sets with masks share, and ADE20K SceneParse150 as it comes. Training sees crops
after a random scale, flip and photometric distortion."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lrfdyn.data.augment import Augmentation, normalise
from lrfdyn.data.base import Batch, DataSource, register_data
from lrfdyn.data.hashed_random import Keys
from lrfdyn.data.loading import load_in_order, to_device
from lrfdyn.data.preprocess import IMAGENET_DEVIATION, IMAGENET_MEAN, require_pillow
from lrfdyn.errors import require, require_integer
from lrfdyn.segmentation.crops import Pictures, photometric, random_crops, stack
from lrfdyn.segmentation.pairs import CLASSES, IGNORED, Pair, Picture, opened, read_mask, read_pair

FOLDER = "ADEChallengeData2016"
IMAGE_ENDINGS = (".jpg", ".jpeg", ".png")
USED = ("flip", "scale", "photometric", "repeats")  # settings of the augmentation


class MaskedData(DataSource):
    """Pictures with masks: training crops of `image_size`, test images whole, with whole masks. `resident`: all
    pictures are decoded once, by `workers` threads, and stay in memory, those for training on the device; else
    `workers` processes decode while training runs. `test_size` is the short side that test images are scaled to (None:
    as they are; predictions are scaled back), `window` evaluates them in overlapping squares of that side, `flip` with
    their mirror image too. In a stored mask 0 is no class, 1 the first one; `ignored` lists what else is no class."""

    task = "segmentation"
    unused_settings = tuple(field.name for field in fields(Augmentation) if field.name not in USED)
    image_size, in_channels = 512, 3
    mean: tuple[float, ...] = IMAGENET_MEAN
    deviation: tuple[float, ...] = IMAGENET_DEVIATION
    ignored: Sequence[int] = ()

    def __init__(
        self,
        train: Sequence[Pair],
        test: Sequence[Pair],
        num_classes: int,
        augment: Augmentation,
        *,
        image_size: int | None = None,
        resident: bool = False,
        workers: int = 0,
        test_size: int | None = None,
        window: int | None = None,
        flip: bool = False,
    ) -> None:
        require_pillow("data: decoding images")
        image_size = self.image_size if image_size is None else image_size
        require_integer("num_classes", num_classes, 2)  # with one there is nothing to decide
        for name, side in (("image_size", image_size), ("test_size", test_size), ("window", window)):
            require_integer(name, 1 if side is None else side, 1, most=2**14)
        for name, on in (("resident", resident), ("flip", flip)):
            require(isinstance(on, bool), f"{name}: expected true or false, got {on!r}")
        require(num_classes <= CLASSES, f"num_classes: masks of bytes hold up to {CLASSES}, got {num_classes}")
        require_integer("workers", workers, 0)
        super().__init__(None, augment)
        self.train_pairs, self.test_pairs = train, test
        self.train_images, self.test_images = len(train), len(test)
        self.num_classes, self.image_size, self.window, self.flip = num_classes, image_size, window, flip
        self._workers, self._test_size, self._resident = workers, test_size, resident
        self._pictures: dict[torch.device, Pictures] = {}

    def _each(self, read: Callable[[Pair], Any], pairs: Sequence[Pair]) -> list[Any]:
        """What `read` gives of all pairs, by several threads: decoders release the interpreter."""
        with ThreadPoolExecutor(max(1, self._workers)) as pool:
            return list(pool.map(read, pairs))

    def _read(self, pair: Pair, short_side: int | None = None) -> Picture:
        return read_pair(pair, self.num_classes, short_side, self.ignored)

    def _read_mask(self, pair: Pair) -> np.ndarray:
        return read_mask(pair, self.num_classes, self.ignored)

    def picture(self, split: str, index: int) -> Picture:
        return self._read((self.train_pairs if split == "train" else self.test_pairs)[index])

    @cached_property
    def _test_pictures(self) -> list[Picture]:
        """Of resident data, decoded when they are first asked for."""
        return self._each(lambda pair: self._read(pair, self._test_size), self.test_pairs)

    def check_test_pairs(self) -> None:
        """Raises what the first test would, which may come after hours of training."""
        if self._resident:
            _ = self._test_pictures
        else:
            self._each(self._read_mask, self.test_pairs)

    def _train(self, steps: Sequence[Keys], size: int, device: torch.device, number: int) -> Iterator[Batch]:
        if self._resident:
            if device not in self._pictures:
                self._pictures[device] = Pictures.pack(self._each(self._read, self.train_pairs)).to(device)
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
        return Pictures.pack([self._read(self.train_pairs[i]) for i in keys.samples])

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
            pictures = [self._read(self.test_pairs[i], self._test_size) for i in indices]
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


def find_pairs(root: Path, split: str) -> list[Pair]:
    """The images of a split in the order of their names, each with its mask; `root` may hold the official folder."""
    root = root / FOLDER if (root / FOLDER).is_dir() else root
    images, masks = root / "images" / split, root / "annotations" / split
    for folder in (images, masks):
        require(folder.is_dir(), f"root: no such folder {folder}")
    found = sorted(path for path in images.iterdir() if path.suffix.lower() in IMAGE_ENDINGS)
    require(bool(found), f"root: {images} has no images")
    pairs = [(path, masks / f"{path.stem}.png") for path in found]
    for image, mask in pairs:
        require(mask.is_file(), f"root: the image {image} has no mask {mask}")
    return [Pair(*pair) for pair in pairs]


@register_data("ade20k")
class Ade20k(MaskedData):
    """ADE20K SceneParse150: `images/{training,validation}/*.jpg` and `annotations/{training,validation}/*.png`. In a
    mask 0 is no class and is ignored, 1..150 become the classes 0..149. Other data sets in the same layout are read
    with another `num_classes`. Further `options` are those of `MaskedData`."""

    num_classes, train_images, test_images = CLASSES, 20_210, 2_000

    def __init__(self, root: Path, augment: Augmentation, *, num_classes: int = CLASSES, **options: Any) -> None:
        train, test = find_pairs(root, "training"), find_pairs(root, "validation")
        super().__init__(train, test, num_classes, augment, **options)
