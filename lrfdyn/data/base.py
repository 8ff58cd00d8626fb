"""What training needs of a data set: batches that depend on seed, epoch and step, and on nothing else.

A step is one global batch, of which process `rank` of `world_size` takes its contiguous slice. What is random about an
image is a function of (seed, epoch, sample, repeat); mixing draws one strength and box per step and pairs the
neighbours (2i, 2i+1), which every even slice keeps together. No state is carried along: an epoch can start anywhere.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lrfdyn.checks import checked
from lrfdyn.data.augment import Augmentation, augment_images, draw_mix, laid_out, mix, normalise, smooth_targets
from lrfdyn.data.hashed_random import Keys, permutation
from lrfdyn.data.recordings import Framing
from lrfdyn.errors import LrfdynError, require, require_integer, unknown_name
from lrfdyn.files import expanded
from lrfdyn.registry import Registry

Device = torch.device | str


@dataclass(frozen=True)
class Batch:
    """Images with their labels and targets, on the device."""

    images: Tensor  # [B, C, H, W] float, normalised, on the device, channels-last; or frames [T, B, C, H, W]
    labels: Tensor  # [B] class indices
    targets: Tensor  # [B, classes] smoothed and mixed for training, one-hot for evaluation
    count: int  # images that are real: an evaluation batch is filled up to its size behind them


class DataSource:
    """A data set. Subclasses load images; order, slicing and augmentation are the same for all.

    A class that is registered with `register_data` is made by `cls(root, augment, **options)`; the options are the
    keyword-only arguments of its constructor. What is the same for every copy of the data set (classes, size, channels,
    numbers of images) is a class attribute, which serves a dry run without a copy.
    """

    task: ClassVar[str] = "classification"  # what a run on this data trains for, by its name among the tasks
    needs_root: ClassVar[bool] = True  # whether it is read from a folder
    framed: ClassVar[bool] = False  # whether a batch has frames [T, B, C, H, W]; T is then the option `frames`
    # Of the augmentation: those for masks and for recordings.
    unused_settings: ClassVar[Sequence[str]] = ("scale", "photometric", "event_operations")
    num_classes: int
    image_size: int
    in_channels: int
    train_images: int
    test_images: int
    augment: Augmentation
    mean: tuple[float, ...]  # of the levels 0..1
    deviation: tuple[float, ...]
    class_names: Sequence[str] | None = None  # not every data set has them
    framing: Framing | None = None  # of recordings: how their frames are made
    images_at_once = 0  # small batches are augmented together up to this size: launching costs the same for all

    def __init__(self, root: Path | None, augment: Augmentation, **options: Any) -> None:
        self.augment = augment

    @classmethod
    def options(cls) -> list[str]:
        """The names of the constructor's options, those that it passes on to the classes above it included."""
        names: list[str] = []
        for constructor in (vars(base)["__init__"] for base in cls.__mro__ if "__init__" in vars(base)):
            parameters = inspect.signature(constructor).parameters.values()
            names += [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
            if not any(p.kind is p.VAR_KEYWORD for p in parameters):
                break
        return names

    def load(self, split: str, steps: Sequence[Keys], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        """Images as levels 0..255 `[B, C, H, W]` (any dtype) and labels `[B]` of every step's `samples`, on the device.
        `split` is "train" or "test"; a test may leave out images that cannot be read."""
        raise NotImplementedError

    def picture(self, split: str, index: int) -> tuple[np.ndarray, int | np.ndarray]:
        """A whole picture as it is stored, `[H, W, C]` of bytes, and its class, or its mask `[H, W]` of bytes: classes,
        and 255 for none. It is what `lrfdyn data pack` writes."""
        raise LrfdynError(f"source: {type(self).__name__} has no pictures that could be packed")

    def augmented(self, levels: Tensor, keys: Keys) -> Tensor:
        """What training sees of loaded images."""
        return augment_images(levels, self.augment, keys, self.mean, self.deviation)

    def normalised(self, levels: Tensor) -> Tensor:
        """What a test sees of loaded images."""
        return normalise(levels, self.mean, self.deviation)

    def order(self, seed: int, epoch: int) -> np.ndarray:
        """The samples of an epoch in the order in which they are used."""
        return permutation(self.train_images, seed, epoch)

    @checked
    def hold_out(self, images: int) -> None:
        """The last images of every class of the training images, so many in all, take the test images' place, and are
        no longer trained on: choices that are made on them leave the test images unseen."""
        raise LrfdynError(f"held_out: {type(self).__name__} cannot hold out training images, got {images}")

    def steps_per_epoch(self, batch_size: int, world_size: int = 1) -> int:
        """Whole global batches; the rest of the images sit an epoch out, others in every epoch."""
        require_integer("batch_size", batch_size, 1)
        require_integer("world_size", world_size, 1)
        steps, asked = self.train_images // (batch_size * world_size), f"{batch_size} images x {world_size} processes"
        require(steps > 0, f"batch_size: {asked} are more than the {self.train_images} training images")
        return steps

    @checked
    def train_batches(
        self,
        *,
        epoch: int,
        seed: int,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        device: Device = "cpu",
        start_step: int = 0,
    ) -> Iterator[Batch]:
        """The batches of one process (`batch_size` images each) in one epoch, from `start_step` on."""
        stop = self.steps_per_epoch(batch_size, world_size)
        require(0 <= rank < world_size, f"rank: expected 0..{world_size - 1}, got {rank}")
        require(0 <= start_step <= stop, f"start_step: expected 0..{stop}, got {start_step}")
        fits = not self.augment.mixes or batch_size % 2 == 0
        require(fits, f"batch_size: mixup and cutmix pair neighbours; expected an even number, got {batch_size}")
        order, at_once = self.order(seed, epoch), max(1, self.images_at_once // batch_size)
        # Repeats of an image lie far apart in the global batch: a mixing pair should not hold the same image twice.
        distinct = -(-batch_size * world_size // self.augment.repeats)
        repeat, place = np.divmod(np.arange(batch_size) + rank * batch_size, distinct)
        steps = []
        for first in range(start_step, stop, at_once):
            numbers = np.arange(first, min(first + at_once, stop))
            samples = order[numbers[:, None] * distinct + place].ravel()
            steps.append(Keys(seed, epoch, samples, np.tile(repeat, len(numbers))))
        return self._train(steps, batch_size, torch.device(device), start_step)

    def _train(self, steps: Sequence[Keys], size: int, device: torch.device, number: int) -> Iterator[Batch]:
        """Batches of `size` images from step `number` on; `steps` holds a few together where they are small."""
        for keys, (levels, labels) in zip(steps, self.load("train", steps, device), strict=True):
            images = self.augmented(levels, keys).split(size, -4)  # of frames [T, B, C, H, W] too
            targets = smooth_targets(labels, self.num_classes, self.augment.label_smoothing)
            for x, y, t in zip(images, labels.split(size), targets.split(size), strict=True):
                if self.augment.mixes:
                    x, t = mix(x, t, draw_mix(self.augment, keys.seed, keys.epoch, number, *x.shape[-2:]))
                yield Batch(x, y, t, size)
                number += 1

    @checked
    def test_batches(
        self, *, batch_size: int, rank: int = 0, world_size: int = 1, device: Device = "cpu", multiple: int = 1
    ) -> Iterator[Batch]:
        """Every test image once over all ranks, which get the same number of batches of the same shape; only the first
        `count` images are real. Where sizes differ, images that a network pads to the same `multiple` come together."""
        require_integer("batch_size", batch_size, 1)
        require(0 <= rank < world_size, f"rank: expected 0..{world_size - 1}, got {rank}")
        require_integer("world_size", world_size, 1, most=2**20)
        slices = self._test_slices(batch_size, multiple)
        slices += [np.arange(0)] * (-len(slices) % world_size)
        return self._test(slices[rank::world_size], batch_size, torch.device(device))

    def _test_slices(self, batch_size: int, multiple: int) -> list[np.ndarray]:
        return np.split(np.arange(self.test_images), range(batch_size, self.test_images, batch_size))

    def pick_test_images(self, indices: np.ndarray, device: Device = "cpu") -> Batch:
        """The test images `indices` as one batch; `count` is smaller where some of them cannot be read."""
        return next(self._test([indices], len(indices), torch.device(device)))

    def _test(self, slices: Sequence[np.ndarray], batch_size: int, device: torch.device) -> Iterator[Batch]:
        steps = [Keys(0, 0, indices, np.zeros_like(indices)) for indices in slices]
        for levels, labels in self.load("test", steps, device):
            fill = (0, batch_size - len(labels))
            images, padded = laid_out(F.pad(self.normalised(levels), (0, 0) * 3 + fill)), F.pad(labels, fill)
            yield Batch(images, padded, smooth_targets(padded, self.num_classes, 0.0), len(labels))


def last_of_classes(labels: np.ndarray, classes: int, images: int) -> np.ndarray:
    """Of samples with these `labels`, the last `images / classes` of every class, as a mask `[n]`."""
    share, rest = divmod(images, classes)
    require(share >= 1 and rest == 0, f"held_out: expected a multiple of the {classes} classes, got {images}")
    chosen = np.zeros(len(labels), bool)
    for label in range(classes):
        (there,) = np.nonzero(labels == label)
        words = f"expected less than the {len(there)} images of class {label}"
        require(share < len(there), f"held_out: {words}, got {share} of each")
        chosen[there[-share:]] = True
    return chosen


class NumberedData(DataSource):
    """The samples of both splits have one numbering: `labels` are those of all, `rows` the numbers of each split's."""

    labels: np.ndarray
    rows: dict[str, np.ndarray]

    def number(self, labels: Sequence[int] | np.ndarray, train: int) -> None:
        """Takes the labels of all samples, of which the first `train` are for training."""
        self.labels = np.asarray(labels, np.int64)
        self.rows = {"train": np.arange(train), "test": np.arange(train, len(self.labels))}
        self.train_images, self.test_images = train, len(self.labels) - train

    @checked
    def hold_out(self, images: int) -> None:
        train = self.rows["train"]
        held = last_of_classes(self.labels[train], self.num_classes, images)
        self.rows = {"train": train[~held], "test": train[held]}
        self.train_images, self.test_images = len(train) - images, images


def place(root: Path, folders: Sequence[str], needed: str) -> Path:
    """`root`, or the folder in it that an archive made, whichever holds `needed`."""
    for folder in (root, *(root / name for name in folders)):
        if (folder / needed).exists():
            return folder
    raise LrfdynError(f"root: {root} has no {needed}")


DATA: Registry[type[DataSource]] = Registry("data")
Source = TypeVar("Source", bound=DataSource)


@checked
def register_data(name: str) -> Callable[[type[Source]], type[Source]]:
    """Makes a data set known by `name`: in recipes, on the command line and to `create_data`. A class decorator:

    ```python
    @register_data("mine")
    class Mine(DataSource):
        num_classes, image_size, in_channels = 3, 64, 3
        ...
    ```
    """

    def add(source: type[Source]) -> type[Source]:
        known = isinstance(source, type) and issubclass(source, DataSource)
        require(known, f"register_data: expected a subclass of lrfdyn.data.DataSource, got {source!r}")
        DATA.add(name, source)
        return source

    return add


@checked
def data_class(name: str) -> type[DataSource]:
    """The class that is registered as `name`; its attributes say what is known without the data's files."""
    return DATA[name]


@checked
def create_data(name: str, root: Path | str | None, augment: Augmentation, **options: Any) -> DataSource:
    """The data set `name` from the folder `root`, with options of its class, which `data_class(name).options()` lists.

    ```python
    source = create_data("cifar100", "data", Augmentation(crop="pad", flip=0.5))
    for batch in source.train_batches(epoch=0, seed=0, batch_size=128):
        batch.images, batch.targets  # [128, 3, 32, 32], [128, 100]
    ```
    """
    source = data_class(name)
    for key in source.unused_settings:
        given = getattr(augment, key)
        require(given == getattr(Augmentation, key), f"augmentation.{key}: is not for images of {name}, got {given}")
    check_options(name, options)
    if root is not None and not source.needs_root:
        warnings.warn(f"root: {name} is read from no folder, so {root} is not used", stacklevel=3)
        root = None
    require(root is not None or not source.needs_root, f"root: {name} needs the folder of its files")
    folder = None if root is None else expanded(root, "root")
    require(folder is None or folder.is_dir(), f"root: no such folder {folder}")
    return source(folder, augment, **options)


def check_options(name: str, options: Iterable[str]) -> None:
    """Whether the data set has options of these names, which needs none of its files."""
    known = data_class(name).options()
    for option in options:
        require(bool(known), f"data: {name} has no option {option!r}, and no others")
        if option not in known:
            raise unknown_name(f"data: option of {name}", option, known)
