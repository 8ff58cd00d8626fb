"""Data sets that fit in the device's memory: copied there once, as they are; batches are gathered there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from lrfdyn.data.augment import Augmentation
from lrfdyn.data.base import DataSource, Step
from lrfdyn.data.loading import to_device
from lrfdyn.errors import require


class ResidentData(DataSource):
    """`train` and `test` are images `[n, C, H, W]` with levels 0..255 of any dtype and labels `[n]`. Subclasses say
    `num_classes`, `mean` and `deviation`."""

    images_at_once = 1024

    def __init__(self, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], augment: Augmentation) -> None:
        super().__init__(None, augment)
        require(augment.crop != "resized", "crop: expected pad or none for images that are not decoded, got resized")
        self.splits = {"train": train, "test": test}
        self._resident: dict[tuple[str, torch.device], tuple[Tensor, Tensor]] = {}
        self.train_images, self.test_images = len(train[1]), len(test[1])
        self.in_channels, self.image_size = train[0].shape[1], train[0].shape[2]

    def _load(self, split: str, indices: Iterator[np.ndarray], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        key = (split, device)
        if key not in self._resident:
            images, labels = self.splits[split]
            self._resident[key] = images.to(device), labels.to(device)
        images, labels = self._resident[key]
        for index in indices:
            where = to_device(index, device)
            yield images.index_select(0, where), labels.index_select(0, where)

    def load_train(self, steps: Sequence[Step], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        return self._load("train", (step.keys.samples for step in steps), device)

    def load_test(self, slices: Sequence[np.ndarray], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        return self._load("test", iter(slices), device)
