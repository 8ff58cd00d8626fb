"""Images that are decoded while training runs, by as many processes as wanted, which changes nothing but the speed:
those of folders, and what shards share with them."""

from __future__ import annotations

import io
import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from lrfdyn.checks import checked
from lrfdyn.data import preprocess
from lrfdyn.data.augment import ATTEMPTS, Augmentation
from lrfdyn.data.base import DataSource, last_of_classes, register_data
from lrfdyn.data.hashed_random import CROP, Keys
from lrfdyn.data.loading import load_in_order, to_device
from lrfdyn.data.preprocess import CROP_SHARE, IMAGENET_DEVIATION, IMAGENET_MEAN, centre_crop, require_pillow
from lrfdyn.errors import LrfdynError, require, require_integer
from lrfdyn.files import plain_file

if TYPE_CHECKING:
    from PIL.Image import Image

ENDINGS = (".jpeg", ".jpg", ".png", ".bmp", ".webp")
MOST_REPLACEMENTS = 100  # bad images in a row, before this is no longer a matter of single files

logger = logging.getLogger(__name__)


class Images(Protocol):
    """The encoded images of one split and their labels; `name` is for messages: the file, and the place in it."""

    labels: np.ndarray

    def read(self, index: int) -> bytes: ...

    def name(self, index: int) -> str: ...


class Part(Images):
    """Those of `images` at the places `chosen`."""

    def __init__(self, images: Images, chosen: np.ndarray) -> None:
        self.images, self.chosen, self.labels = images, chosen, images.labels[chosen]

    def read(self, index: int) -> bytes:
        return self.images.read(int(self.chosen[index]))

    def name(self, index: int) -> str:
        return self.images.name(int(self.chosen[index]))


def resized_crop_box(
    width: int, height: int, numbers: np.ndarray, scale: tuple[float, float], ratio: tuple[float, float]
) -> tuple[int, int, int, int]:
    """Left, top, right, bottom of a random part (Szegedy et al., 2015); `numbers` are four uniform ones per attempt."""
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


def decoded(encoded: bytes) -> Image:
    """The picture as it is stored, in colour."""
    from PIL.Image import open as open_image

    return preprocess.eight_bits(open_image(io.BytesIO(encoded))).convert("RGB")


def decoded_crop(encoded: bytes, size: int, box: Callable[[int, int], tuple[int, int, int, int]], draft: bool) -> Image:
    """The part `box(width, height)` of a picture at `size` a side. With `draft` a JPEG of which it is at least twice as
    large is decoded at a half, a quarter or an eighth of its sides, in a fraction of the time."""
    from PIL.Image import Resampling
    from PIL.Image import open as open_image

    picture = open_image(io.BytesIO(encoded))
    width, height = picture.size
    part = box(width, height)
    times = min(part[2] - part[0], part[3] - part[1]) // size
    scale = 2 ** min(3, max(1, times).bit_length() - 1) if draft else 1
    if scale > 1:
        picture.draft("RGB", (width // scale, height // scale))
        scale = scale if picture.size != (width, height) else 1  # other formats have no such way
    image = preprocess.eight_bits(picture).convert("RGB")
    left, top, right, bottom = (place / scale for place in part)
    return image.resize((size, size), Resampling.BICUBIC, box=(left, top, right, bottom))


def failure(error: Exception) -> str:
    """Pillow names the buffer, which tells nobody anything."""
    return f"{type(error).__name__}: {str(error).partition(' <_io.')[0]}"


class DecodedData(DataSource):
    """`workers` processes decode (0: this one). An image that cannot be read is an error, or with `on_corrupt="skip"`
    listed in `corrupt`, replaced in training and left out in tests. `crop_share` is the evaluated part of a side. With
    `draft` large JPEG files are decoded at a reduced size for random crops that need no more; tests never are."""

    image_size, in_channels = 224, 3
    mean: tuple[float, ...] = IMAGENET_MEAN
    deviation: tuple[float, ...] = IMAGENET_DEVIATION

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
        draft: bool = False,
    ) -> None:
        require_pillow("data: decoding images")
        super().__init__(None, augment)
        self.image_size = self.image_size if image_size is None else image_size
        require_integer("image_size", self.image_size, 1, most=2**14)
        require_integer("workers", workers, 0)
        require(on_corrupt in ("error", "skip"), f"on_corrupt: expected error or skip, got {on_corrupt!r}")
        fits = isinstance(crop_share, (int, float)) and 0 < crop_share <= 1
        require(fits, f"crop_share: expected 0 < x <= 1, got {crop_share!r}")
        require(isinstance(draft, bool), f"draft: expected true or false, got {draft!r}")
        self.num_classes, self.crop_share, self._workers, self._draft = num_classes, crop_share, workers, draft
        self.splits, self._skip = {"train": train, "test": test}, on_corrupt == "skip"
        self.train_images, self.test_images = len(train.labels), len(test.labels)
        self.corrupt: dict[str, str] = {}

    @checked
    def hold_out(self, images: int) -> None:
        train = self.splits["train"]
        held = last_of_classes(train.labels, self.num_classes, images)
        self.splits = {name: Part(train, np.flatnonzero(mask)) for name, mask in (("train", ~held), ("test", held))}
        self.train_images, self.test_images = len(train.labels) - images, images

    def _decode_batch(self, split: str, keys: Keys) -> tuple[Tensor, Tensor, dict[str, str]]:
        """Levels `[B, 3, size, size]` uint8, labels `[B]`, and why by name an image could not be read."""
        training = split == "train"
        numbers = keys.uniform(CROP, 4 * ATTEMPTS) if training and self.augment.crop == "resized" else None
        # A training batch keeps its size: the next image that can be read stands in for one that cannot.
        tries = MOST_REPLACEMENTS if training and self._skip else 1
        levels = np.zeros((len(keys.samples), self.image_size, self.image_size, 3), np.uint8)
        images, labels = self.splits[split], list[int]()
        failures: dict[str, str] = {}
        for i, sample in enumerate(keys.samples):
            for index in (np.arange(sample, sample + tries) % len(images.labels)).tolist():
                try:
                    levels[len(labels)] = self._decode(images.read(index), None if numbers is None else numbers[i])
                    labels.append(images.labels[index])
                    break
                except Exception as error:  # damaged files make decoders fail in any way
                    failures[images.name(index)] = failure(error)
            if failures and not self._skip:
                break
        read = torch.from_numpy(levels[: len(labels)]).permute(0, 3, 1, 2)
        return read, torch.from_numpy(np.array(labels, np.int64)), failures

    def picture(self, split: str, index: int) -> tuple[np.ndarray, int]:
        images = self.splits[split]
        try:
            return np.asarray(decoded(images.read(index))), int(images.labels[index])
        except Exception as error:  # as above
            raise LrfdynError(f"data: cannot read the image {images.name(index)} ({failure(error)})") from None

    def _decode(self, encoded: bytes, numbers: np.ndarray | None) -> np.ndarray:
        if numbers is None:
            return np.asarray(centre_crop(decoded(encoded), self.image_size, self.crop_share))
        scale, ratio = self.augment.crop_scale, self.augment.crop_ratio
        box = partial(resized_crop_box, numbers=numbers, scale=scale, ratio=ratio)
        return np.asarray(decoded_crop(encoded, self.image_size, box, self._draft))

    def load(self, split: str, steps: Sequence[Keys], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        batches = load_in_order(partial(self._decode_batch, split), steps, self._workers, device)
        for keys, (levels, labels, failures) in zip(steps, batches, strict=True):
            for name, reason in failures.items():
                hint = "on_corrupt: skip goes on without it"
                require(self._skip, f"data: cannot read the image {name} ({reason}); {hint}")
                if name not in self.corrupt:
                    self.corrupt[name] = reason
                    logger.warning("data: skipped the image %s (%s)", name, reason)
            whole, last = split == "test" or len(labels) == len(keys.samples), next(reversed(self.corrupt), "")
            require(whole, f"data: {MOST_REPLACEMENTS} images in a row cannot be read, the last is {last}")
            yield to_device(levels, device), to_device(labels, device)


class FolderImages(Images):
    def __init__(self, folder: Path, endings: tuple[str, ...] = ENDINGS, what: str = "images") -> None:
        require(folder.is_dir(), f"root: no such folder {folder}")
        try:
            self.classes = sorted(e.name for e in os.scandir(folder) if e.is_dir() and not e.name.startswith("."))
            require(bool(self.classes), f"root: {folder} has no class folders")
            files, labels = [], []
            for label, name in enumerate(self.classes):
                found = sorted(e.name for e in os.scandir(folder / name) if e.name.lower().endswith(endings))
                require(bool(found), f"root: the class folder {folder / name} has no {what}")
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
        return plain_file(Path(self.name(index))).read_bytes()


@register_data("folder")
class ImageFolder(DecodedData):
    """ImageNet and Imagenette as they come, and any images in such folders: `train/<class>/*.JPEG` and
    `val/<class>/*.JPEG`, numbered in the sorted order of their names. `options` are those of `DecodedData`."""

    def __init__(self, root: Path, augment: Augmentation, **options: Any) -> None:
        train, test = FolderImages(root / "train"), FolderImages(root / "val")
        for name in sorted(set(train.classes) ^ set(test.classes)):
            raise LrfdynError(f"root: the class folder {name} is in only one of {root}/{{train,val}}")
        super().__init__(train, test, len(train.classes), augment, **options)
        self.class_names = train.classes


@register_data("imagenet")
class ImageNet(ImageFolder):
    num_classes, train_images, test_images = 1000, 1_281_167, 50_000


@register_data("imagenette")
class Imagenette(ImageFolder):
    num_classes, image_size, train_images, test_images = 10, 128, 9_469, 3_925
