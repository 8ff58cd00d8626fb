"""scikit-learn's handwritten digits: 1,797 real 8x8 grey images that need no download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lrfdyn.data.augment import Augmentation
from lrfdyn.data.base import register_data
from lrfdyn.data.resident import ResidentData
from lrfdyn.errors import LrfdynError

TEST_IMAGES = 360


@register_data("digits")
class Digits(ResidentData):
    """A fixed split: 360 held-out images, drawn once with a fixed seed, class shares as they come. Grey values 0..16
    become whole levels 0..255, so that the images can be augmented like any other."""

    needs_root = False
    num_classes, image_size, in_channels, train_images = 10, 8, 1, 1437
    class_names = tuple("0123456789")

    def __init__(self, root: Path | None, augment: Augmentation) -> None:
        try:
            from sklearn.datasets import load_digits
        except ImportError:
            raise LrfdynError("data: digits needs scikit-learn; pip install 'lrfdyn[digits]'") from None
        raw: Any = load_digits()
        levels = (torch.tensor(raw.images, dtype=torch.float32).unsqueeze(1) * (255 / 16)).round()
        labels = torch.tensor(raw.target, dtype=torch.int64)
        order = torch.randperm(len(levels), generator=torch.Generator().manual_seed(0))
        test, train = ((levels[part], labels[part]) for part in (order[:TEST_IMAGES], order[TEST_IMAGES:]))
        self.mean, self.deviation = (float(train[0].mean()) / 255,), (float(train[0].std()) / 255,)
        super().__init__(train, test, augment)
