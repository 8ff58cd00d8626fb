"""scikit-learn's handwritten digits: 1,797 real 8x8 grey images that need no download."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lrfdyn.errors import LrfdynError

TEST_IMAGES = 360


@dataclass(frozen=True)
class Split:
    """Images `[n, 1, 8, 8]` normalised by the training images' mean and deviation, and labels 0..9."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load_digits() -> Split:
    """The fixed split: 360 held-out images, drawn once with a fixed seed, class shares as they come."""
    try:
        from sklearn.datasets import load_digits as load
    except ImportError:
        raise LrfdynError("data: digits needs scikit-learn; pip install 'lrfdyn[digits]'") from None
    raw: Any = load()
    images = torch.tensor(raw.images, dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(raw.target, dtype=torch.int64)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    test, train = order[:TEST_IMAGES], order[TEST_IMAGES:]
    mean, deviation = images[train].mean(), images[train].std()
    images = (images - mean) / deviation
    return Split(images[train], labels[train], images[test], labels[test])
