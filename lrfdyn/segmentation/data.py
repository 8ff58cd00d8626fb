"""ADE20K SceneParse150 as it comes: `images/{training,validation}/*.jpg` and `annotations/{training,validation}/*.png`.

A mask's 0 is no class and is ignored, 1..150 become the classes 0..149. Other data sets in the same layout are read
with another `num_classes`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lrfdyn.data.augment import Augmentation, normalise
from lrfdyn.data.base import Batch, DataSource, Step, register_data
from lrfdyn.data.loading import load_in_order, to_device
from lrfdyn.data.preprocess import IMAGENET_DEVIATION, IMAGENET_MEAN, require_pillow
from lrfdyn.errors import LrfdynError, require, require_integer
from lrfdyn.segmentation.augment import IGNORED, Pictures, photometric, random_crops
from lrfdyn.segmentation.pairs import (
    CLASSES,
    Pair,
    Picture,
    check_pair,
    find_pairs,
    find_root,
    opened,
    read_mask,
    read_pair,
)

Result = TypeVar("Result")
USED = ("flip", "scale", "photometric", "repeats")  # settings of the augmentation


def stack(arrays: Sequence[np.ndarray], fill: int) -> np.ndarray:
    """`[B, H, W, ...]`, with `fill` at the right and the bottom of what is smaller than the largest."""
    height, width = np.max([array.shape[:2] for array in arrays], 0)
    stacked = np.full((len(arrays), height, width, *arrays[0].shape[2:]), fill, np.uint8)
    for array, place in zip(arrays, stacked, strict=True):
        place[: array.shape[0], : array.shape[1]] = array
    return stacked


@dataclass(frozen=True)
class Loader(Dataset):
    """From a training step to its pictures. Runs in the worker processes, where an error can only be told."""

    pairs: list[Pair]
    classes: int

    def __getitem__(self, step: Step) -> Pictures | str:
        try:
            return Pictures.pack([read_pair(self.pairs[i], self.classes) for i in step.keys.samples])
        except LrfdynError as error:
            return str(error)


@register_data("ade20k")
class Ade20k(DataSource):
    """Training crops of `image_size`, test images whole.

    `resident`: all pictures are decoded once, by `workers` threads, and stay in the memory of the device; else
    `workers` processes decode while training runs. `test_size` is the short side that test images are scaled to (None:
    as they are; the prediction is scaled back and compared with the whole mask). `window` evaluates them in
    overlapping squares of that side, `flip` together with their mirror image.
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
        root = find_root(root)
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
            self._each(check_pair, self.test_pairs)

    def load_train(self, steps: Sequence[Step], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        for step, (pictures, index) in zip(steps, self._pictures_of(steps, device), strict=True):
            levels, mask, inside = random_crops(pictures, index, self.augment, step.keys, self.image_size)
            if self.augment.photometric:
                levels = photometric(levels, step.keys)
            # What is padded has the mean colour: zero in the normalised image.
            images = normalise(levels, self.mean, self.deviation) * inside
            yield images.contiguous(memory_format=torch.channels_last), mask

    def _pictures_of(self, steps: Sequence[Step], device: torch.device) -> Iterator[tuple[Pictures, np.ndarray]]:
        """The pictures that hold those of a step, and which of them are its own."""
        if self._resident:
            if device not in self._pictures:
                self._pictures[device] = Pictures.pack(self._each(read_pair, self._train_pairs)).to(device)
            yield from ((self._pictures[device], step.keys.samples) for step in steps)
            return
        loader = Loader(self._train_pairs, self.num_classes)
        for pictures in load_in_order(loader, steps, self._workers, device):
            require(isinstance(pictures, Pictures), str(pictures))
            yield pictures.to(device), np.arange(len(pictures.starts))

    def _train(self, steps: Sequence[Step], size: int, device: torch.device) -> Iterator[Batch]:
        for images, labels in self.load_train(steps, device):
            yield Batch(images, labels, labels, len(images))

    def load_test(self, slices: Sequence[np.ndarray], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        for pictures in self._test_pictures_of(slices):
            levels = to_device(stack([image for image, _ in pictures], 0), device).permute(0, 3, 1, 2)
            images = normalise(levels.float(), self.mean, self.deviation)
            for (image, _), padded in zip(pictures, images, strict=True):
                padded[:, image.shape[0] :], padded[:, :, image.shape[1] :] = 0, 0
            masks = to_device(stack([mask for _, mask in pictures], IGNORED), device).long()
            yield images.contiguous(memory_format=torch.channels_last), masks

    def _test_picture(self, index: int) -> Picture:
        if self._resident:
            return self._test_pictures[index]
        return read_pair(self.test_pairs[index], self.num_classes, self._test_size)

    def _test_pictures_of(self, slices: Sequence[np.ndarray]) -> Iterator[list[Picture]]:
        """A few slices ahead, so that the network does not wait for the decoder."""
        with ThreadPoolExecutor(max(1, self._workers)) as pool:
            ahead: deque[list[Future[Picture]]] = deque()
            for indices in slices:
                ahead.append([pool.submit(self._test_picture, i) for i in indices])
                if len(ahead) > self._workers:
                    yield [picture.result() for picture in ahead.popleft()]
            for pictures in ahead:
                yield [picture.result() for picture in pictures]

    def test_batches(
        self,
        *,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | str = "cpu",
        multiple: int = 1,
    ) -> Iterator[Batch]:
        """Every test image once over all ranks, as large as it is; images of one size come together. `labels` may be
        larger or smaller than the image. All ranks get the same number of batches; `count` is 0 in those that fill
        up.

        A network that pads images to a `multiple` anyway gets them padded, and so those of several sizes together.
        """
        require(batch_size >= 1, f"batch_size: expected an integer >= 1, got {batch_size}")
        whole = self._test_size is None and self.window is None and not self.flip  # else padding would be seen
        batches = self._same_size(batch_size, multiple if whole else 1)
        mine = batches[rank::world_size]
        missing = -(-len(batches) // world_size) - len(mine)
        for i, (images, labels) in enumerate(self.load_test([*mine, *batches[:missing]], torch.device(device))):
            yield Batch(images, labels, labels, len(images) if i < len(mine) else 0)

    def _same_size(self, batch_size: int, multiple: int) -> list[np.ndarray]:
        groups: dict[tuple[int, ...], list[int]] = {}
        for i in range(self.test_images):
            groups.setdefault(tuple(-(-side // multiple) for side in self._size(i)), []).append(i)
        return [
            np.array(group[i : i + batch_size]) for group in groups.values() for i in range(0, len(group), batch_size)
        ]

    def _size(self, index: int) -> tuple[int, ...]:
        """Of the mask; it decides that of the image."""
        if self._resident:
            return self._test_pictures[index][1].shape
        with opened(self.test_pairs[index].mask, "mask") as file:
            return file.size


__all__ = ["IGNORED", "Ade20k", "Pair", "find_pairs", "find_root", "read_mask", "read_pair"]
