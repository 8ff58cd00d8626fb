"""Images that are decoded while training runs, by as many processes as wanted: those of folders, and what shards share
with them. A process makes a whole batch from its list of samples, and what is random about a sample is a hash of it:
the number of processes changes nothing but the speed."""

from __future__ import annotations

import io
import logging
import math
import os
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lrfdyn.data.augment import ATTEMPTS, Augmentation
from lrfdyn.data.base import DataSource, register_data
from lrfdyn.data.hashed_random import CROP, Keys
from lrfdyn.data.loading import load_in_order, to_device
from lrfdyn.data.preprocess import CROP_SHARE, IMAGENET_DEVIATION, IMAGENET_MEAN, centre_crop, require_pillow
from lrfdyn.errors import LrfdynError, require, require_integer

ENDINGS = (".jpeg", ".jpg", ".png", ".bmp", ".webp")
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


@dataclass(frozen=True)
class Loader(Dataset):
    """From the keys of a step or a list of test indices to levels `[B, 3, size, size]` uint8, labels `[B]`, and why by
    name an image could not be read. Runs in the worker processes."""

    images: Images
    augment: Augmentation
    image_size: int
    crop_share: float
    skip: bool

    def __getitem__(self, wanted: Keys | np.ndarray) -> tuple[Tensor, Tensor, dict[str, str]]:
        keys, samples = (wanted, wanted.samples) if isinstance(wanted, Keys) else (None, wanted)
        numbers = None if keys is None or self.augment.crop != "resized" else keys.uniform(CROP, 4 * ATTEMPTS)
        # A training batch keeps its size: the next image that can be read stands in for one that cannot.
        tries = 1 if keys is None or not self.skip else MOST_REPLACEMENTS
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
        return read, torch.from_numpy(np.array(labels, np.int64)), failures

    def _decode(self, index: int, numbers: np.ndarray | None) -> np.ndarray:
        from PIL import Image

        with Image.open(io.BytesIO(self.images.read(index))) as file:
            image = file.convert("RGB")
        if numbers is None:
            return np.asarray(centre_crop(image, self.image_size, self.crop_share))
        box = resized_crop_box(*image.size, numbers, self.augment.crop_scale, self.augment.crop_ratio)
        return np.asarray(image.resize((self.image_size, self.image_size), Image.Resampling.BICUBIC, box=box))


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
            break
    else:  # the centre, in the ratio that comes nearest
        w, h = min(width, round(height * ratio[1])), min(height, round(width / ratio[0]))
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
        self.image_size = self.image_size if image_size is None else image_size
        require_integer("image_size", self.image_size, 1)
        require_integer("workers", workers, 0)
        require(on_corrupt in ("error", "skip"), f"on_corrupt: expected error or skip, got {on_corrupt!r}")
        fits = isinstance(crop_share, (int, float)) and 0 < crop_share <= 1
        require(fits, f"crop_share: expected 0 < x <= 1, got {crop_share!r}")
        self.crop_share, self._skip, self._workers = crop_share, on_corrupt == "skip", workers
        self.loaders = [Loader(images, augment, self.image_size, crop_share, self._skip) for images in (train, test)]
        self.train_images, self.test_images = len(train.labels), len(test.labels)
        self.num_classes = num_classes
        self.corrupt: dict[str, str] = {}

    def _load(self, loader: Loader, wanted: Sequence[Any], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        for levels, labels, failures in load_in_order(loader, wanted, self._workers, device):
            for name, reason in failures.items():
                hint = "on_corrupt: skip goes on without it"
                require(self._skip, f"data: cannot read the image {name} ({reason}); {hint}")
                if name not in self.corrupt:
                    self.corrupt[name] = reason
                    logger.warning("data: skipped the image %s (%s)", name, reason)
            yield to_device(levels, device), to_device(labels, device)

    def load_train(self, steps: Sequence[Keys], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        for keys, batch in zip(steps, self._load(self.loaders[0], steps, device), strict=True):
            whole, last = len(batch[1]) == len(keys.samples), next(reversed(self.corrupt), "")
            require(whole, f"data: {MOST_REPLACEMENTS} images in a row cannot be read, the last is {last}")
            yield batch

    def load_test(self, slices: Sequence[np.ndarray], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        return self._load(self.loaders[1], slices, device)


class FolderImages(Images):
    def __init__(self, folder: Path) -> None:
        require(folder.is_dir(), f"root: no such folder {folder}")
        try:
            self.classes = sorted(e.name for e in os.scandir(folder) if e.is_dir() and not e.name.startswith("."))
            require(bool(self.classes), f"root: {folder} has no class folders")
            files, labels = [], []
            for label, name in enumerate(self.classes):
                found = sorted(e.name for e in os.scandir(folder / name) if e.name.lower().endswith(ENDINGS))
                require(bool(found), f"root: the class folder {folder / name} has no images")
                files += [os.fsencode(f"{name}/{file}") for file in found]
                labels += [label] * len(found)
        except OSError as error:
            raise LrfdynError(f"root: cannot list {error.filename} ({error.strerror})") from None
        self.folder = folder
        # One array and not a million objects: every worker process would come to hold its own copy of those.
        self.files, self.labels = np.array(files), np.array(labels, np.int64)

    def name(self, index: int) -> str:
        return str(self.folder / os.fsdecode(self.files[index]))

    def read(self, index: int) -> bytes:
        return Path(self.name(index)).read_bytes()


@register_data("folder")
class ImageFolder(DecodedData):
    """ImageNet and Imagenette as they come, and any images in such folders: `train/<class>/*.JPEG` and
    `val/<class>/*.JPEG`. The class index is the place of the folder's name in their sorted order, which for ImageNet's
    synsets is the usual numbering. `options` are those of `DecodedData`."""

    def __init__(self, root: Path, augment: Augmentation, **options: Any) -> None:
        train, test = FolderImages(root / "train"), FolderImages(root / "val")
        for name in sorted(set(train.classes) ^ set(test.classes)):
            raise LrfdynError(f"root: the class folder {name} is in only one of {root}/{{train,val}}")
        super().__init__(train, test, len(train.classes), augment, **options)
        self.class_names = train.classes


@register_data("imagenet")
class ImageNet(ImageFolder):
    num_classes, train_images = 1000, 1_281_167


@register_data("imagenette")
class Imagenette(ImageFolder):
    num_classes, image_size, train_images = 10, 128, 9_469
