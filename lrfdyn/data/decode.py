"""Images that are decoded while training runs, by as many processes as wanted. A process makes a whole batch from
its list of samples, and what is random about a sample is a hash of it: their number changes nothing but the speed."""

from __future__ import annotations

import io
import logging
import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lrfdyn.data.augment import ATTEMPTS, Augmentation
from lrfdyn.data.base import DataSource, Step
from lrfdyn.data.hashed_random import CROP
from lrfdyn.data.loading import load_in_order, to_device
from lrfdyn.data.preprocess import CROP_SHARE, IMAGENET_DEVIATION, IMAGENET_MEAN, centre_crop, require_pillow
from lrfdyn.errors import require, require_integer

MOST_REPLACEMENTS = 100  # bad images in a row, before this is no longer a matter of single files

logger = logging.getLogger(__name__)


class Images:
    """The encoded images of one split and their labels."""

    labels: np.ndarray

    @abstractmethod
    def read(self, index: int) -> bytes: ...

    @abstractmethod
    def name(self, index: int) -> str:
        """For messages: the file, and the place in it."""


class Decoded(NamedTuple):  # a tuple, because the DataLoader pins the memory of tuples
    levels: Tensor  # [B, 3, size, size] uint8
    labels: Tensor
    failures: dict[str, str]  # name of an image that could not be read: why


@dataclass(frozen=True)
class Loader(Dataset):
    """From a step or a list of test indices to a batch. Runs in the worker processes."""

    images: Images
    augment: Augmentation
    image_size: int
    crop_share: float
    skip: bool

    def __getitem__(self, wanted: Step | np.ndarray) -> Decoded:
        keys = wanted.keys if isinstance(wanted, Step) else None
        samples = wanted.keys.samples if isinstance(wanted, Step) else wanted
        numbers = None
        if keys is not None and self.augment.crop == "resized":
            numbers = keys.uniform(CROP, 4 * ATTEMPTS)
        # A training batch keeps its size: the next image that can be read stands in for one that cannot. A test image
        # has no substitute.
        tries = MOST_REPLACEMENTS if keys is not None and self.skip else 1
        levels = np.zeros((len(samples), self.image_size, self.image_size, 3), np.uint8)
        labels: list[int] = []
        failures: dict[str, str] = {}
        for i, sample in enumerate(samples):
            for index in (np.arange(sample, sample + tries) % len(self.images.labels)).tolist():
                try:
                    levels[len(labels)] = self._decode(index, None if numbers is None else numbers[i])
                    labels.append(self.images.labels[index])
                    break
                except Exception as error:  # damaged files make decoders fail in any way
                    reason = str(error).partition(" <_io.")[0]  # Pillow names the buffer, which tells nobody anything
                    failures[self.images.name(index)] = f"{type(error).__name__}: {reason}"
            if failures and not self.skip:
                break
        read = torch.from_numpy(levels[: len(labels)]).permute(0, 3, 1, 2)
        return Decoded(read, torch.from_numpy(np.array(labels, np.int64)), failures)

    def _decode(self, index: int, numbers: np.ndarray | None) -> np.ndarray:
        from PIL import Image

        with Image.open(io.BytesIO(self.images.read(index))) as file:
            image = file.convert("RGB")
        size = self.image_size
        if numbers is not None:
            box = resized_crop_box(*image.size, numbers, self.augment.crop_scale, self.augment.crop_ratio)
            return np.asarray(image.resize((size, size), Image.Resampling.BICUBIC, box=box))
        return np.asarray(centre_crop(image, size, self.crop_share))


def resized_crop_box(
    width: int, height: int, numbers: np.ndarray, scale: tuple[float, float], ratio: tuple[float, float]
) -> tuple[int, int, int, int]:
    """A random part of the image, left, top, right, bottom: its share of the area is uniform, the logarithm of its
    ratio too (Szegedy et al., 2015). `numbers`: four uniform ones per attempt."""
    for share, shape, x, y in numbers.reshape(-1, 4):
        area = width * height * (scale[0] + (scale[1] - scale[0]) * share)
        aspect = math.exp(math.log(ratio[0]) + math.log(ratio[1] / ratio[0]) * shape)
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(x * (width - w + 1)), int(y * (height - h + 1))
            return left, top, left + w, top + h
    # The centre, in the ratio that comes nearest.
    w = min(width, round(height * ratio[1]))
    h = min(height, round(width / ratio[0]))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


class DecodedData(DataSource):
    """`workers` processes decode (0: this one). An image that cannot be read is an error, or with
    `on_corrupt="skip"` is reported by name once, replaced in training and left out in tests; `corrupt` lists them.
    `crop_share` is the side of the evaluated centre in the scaled image."""

    image_size, in_channels = 224, 3
    mean, deviation = IMAGENET_MEAN, IMAGENET_DEVIATION

    def __init__(
        self,
        train: Images,
        test: Images,
        num_classes: int,
        augment: Augmentation,
        *,
        image_size: int | None = None,
        workers: int = 0,
        on_corrupt: Literal["error", "skip"] = "error",
        crop_share: float = CROP_SHARE,
    ) -> None:
        require_pillow("data: decoding images")
        super().__init__(None, augment)
        if image_size is not None:
            require_integer("image_size", image_size, 1)
            self.image_size = image_size
        require_integer("workers", workers, 0)
        require(on_corrupt in ("error", "skip"), f"on_corrupt: expected error or skip, got {on_corrupt!r}")
        fits = isinstance(crop_share, (int, float)) and 0 < crop_share <= 1
        require(fits, f"crop_share: expected 0 < x <= 1, got {crop_share!r}")
        self.crop_share, self._skip, self._workers = crop_share, on_corrupt == "skip", workers
        self.loaders = [Loader(images, augment, self.image_size, crop_share, self._skip) for images in (train, test)]
        self.train_images, self.test_images = len(train.labels), len(test.labels)
        self.num_classes = num_classes
        self.corrupt: dict[str, str] = {}

    def _load(self, loader: Loader, wanted: Sequence[Any], device: torch.device) -> Iterator[Decoded]:
        for batch in load_in_order(loader, wanted, self._workers, device):
            for name, reason in batch.failures.items():
                message = f"data: cannot read the image {name} ({reason}); on_corrupt: skip goes on without it"
                require(self._skip, message)
                if name not in self.corrupt:
                    self.corrupt[name] = reason
                    logger.warning("data: skipped the image %s (%s)", name, reason)
            yield batch._replace(levels=to_device(batch.levels, device), labels=to_device(batch.labels, device))

    def load_train(self, steps: Sequence[Step], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        for step, batch in zip(steps, self._load(self.loaders[0], steps, device), strict=True):
            last = next(reversed(self.corrupt), "")
            whole = len(batch.labels) == len(step.keys)
            require(whole, f"data: {MOST_REPLACEMENTS} images in a row cannot be read, the last is {last}")
            yield batch.levels, batch.labels

    def load_test(self, slices: Sequence[np.ndarray], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in self._load(self.loaders[1], slices, device):
            yield batch.levels, batch.labels
