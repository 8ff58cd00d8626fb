"""scikit-learn's handwritten digits: 1,797 real 8x8 grey images that need no download."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lrfdyn.data.augment import Augmentation
from lrfdyn.data.base import register_data
from lrfdyn.data.resident import ResidentData
from lrfdyn.errors import LrfdynError

TEST_IMAGES = 360


@dataclass(frozen=True)
class Split:
    """Images `[n, 1, 8, 8]` normalised by the training images' mean and deviation, and labels 0..9."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def raw_digits() -> Split:
    """The fixed split with its grey values 0..16."""
    try:
        from sklearn.datasets import load_digits as load
    except ImportError:
        raise LrfdynError("data: digits needs scikit-learn; pip install 'lrfdyn[digits]'") from None
    raw: Any = load()
    images = torch.tensor(raw.images, dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(raw.target, dtype=torch.int64)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    test, train = order[:TEST_IMAGES], order[TEST_IMAGES:]
    return Split(images[train], labels[train], images[test], labels[test])


def load_digits() -> Split:
    """The fixed split: 360 held-out images, drawn once with a fixed seed, class shares as they come."""
    raw = raw_digits()
    mean, deviation = raw.train_images.mean(), raw.train_images.std()
    train, test = ((images - mean) / deviation for images in (raw.train_images, raw.test_images))
    return Split(train, raw.train_labels, test, raw.test_labels)


@register_data("digits")
class Digits(ResidentData):
    """The same split as a data source: whole levels 0..255, so that it can be augmented like any other."""

    needs_root = False
    num_classes, image_size, in_channels, train_images = 10, 8, 1, 1437
    class_names = tuple("0123456789")

    def __init__(self, root: Path | None, augment: Augmentation) -> None:
        raw = raw_digits()
        train, test = ((images * (255 / 16)).round() for images in (raw.train_images, raw.test_images))
        self.mean, self.deviation = (float(train.mean()) / 255,), (float(train.std()) / 255,)
        super().__init__((train, raw.train_labels), (test, raw.test_labels), augment)
