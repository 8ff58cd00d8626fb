"""Data sets that fit in the device's memory: copied there once, as they are; batches are gathered there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from lrfdyn.data.augment import Augmentation
from lrfdyn.data.base import DataSource, Step
from lrfdyn.data.device import to_device
from lrfdyn.errors import require


class ResidentData(DataSource):
    """Images `[n, C, H, W]` with levels 0..255 of any dtype, and labels `[n]`."""

    images_at_once = 1024

    def __init__(
        self,
        train: tuple[Tensor, Tensor],
        test: tuple[Tensor, Tensor],
        num_classes: int,
        mean: tuple[float, ...],
        deviation: tuple[float, ...],
        augment: Augmentation,
    ) -> None:
        require(augment.crop != "resized", "crop: expected pad or none for images that are not decoded, got resized")
        self._splits = {"train": train, "test": test}
        self._resident: dict[tuple[str, torch.device], tuple[Tensor, Tensor]] = {}
        self.train_images, self.test_images = len(train[1]), len(test[1])
        self.in_channels, self.image_size = train[0].shape[1], train[0].shape[2]
        self.num_classes, self.mean, self.deviation, self.augment = num_classes, mean, deviation, augment

    def _load(self, split: str, indices: Iterator[np.ndarray], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        key = (split, device)
        if key not in self._resident:
            images, labels = self._splits[split]
            self._resident[key] = images.to(device), labels.to(device)
        images, labels = self._resident[key]
        for index in indices:
            where = to_device(index, device)
            yield images.index_select(0, where), labels.index_select(0, where)

    def _load_train(self, steps: Sequence[Step], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        return self._load("train", (step.samples for step in steps), device)

    def _load_test(self, slices: Sequence[np.ndarray], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        return self._load("test", iter(slices), device)
