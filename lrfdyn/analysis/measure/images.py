"""The images that an analysis looks at."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lrfdyn.data import Augmentation, create_data
from lrfdyn.data.base import DATA
from lrfdyn.errors import require, unknown_name
from lrfdyn.models import SpikingModel

RANDOM = "random"


@dataclass
class Images:
    """Test images of a data set, in batches on the device, or noise of the size that a model wants."""

    name: str
    count: int
    batch_size: int
    device: torch.device
    facts: dict[str, int]  # options of a model for them: classes, size and channels; for noise the size, if asked for
    batches: list[Tensor]
    labels: list[Tensor]
    train: int | None = None  # training images of the data set

    def of(self, model: SpikingModel) -> list[Tensor]:
        """Return the batches `[B, C, H, W]` for a model, which must be made for their channels and size."""
        takes, made_for, _ = model.input_size
        channels, size = self.facts.get("in_channels", takes), self.facts.get("image_size", made_for)
        require(channels == takes, f"data: {self.name} has {channels} channels, the model takes {takes}")
        sizes = f"{self.name} has images of {size} pixels, the model was made for {made_for}; pass --image-size"
        require("image_size" not in model.config or size == made_for, f"data: {sizes}")
        if self.name != RANDOM:
            return self.batches
        noise = torch.randn(self.count, channels, size, size, generator=torch.Generator().manual_seed(0))
        return list(noise.to(self.device).split(self.batch_size))

    def accuracy(self, model: SpikingModel) -> float | None:
        """Return the top-1 accuracy on these images; None for noise and for a model with other classes."""
        if not self.labels or model.num_classes != self.facts["num_classes"]:
            return None
        model.eval()
        with torch.inference_mode():
            right = sum(int((model(x).argmax(1) == y).sum()) for x, y in zip(self.batches, self.labels, strict=True))
        return right / self.count


def load_images(
    name: str, root: Path | None, count: int, batch_size: int, device: torch.device, image_size: int | None = None
) -> Images:
    """Load `count` test images of the data set `name` in the folder `root`, or noise for "random".

    They are spread evenly over the test set, because sorted sets begin with one class. `image_size` is that of the data
    set (or, for noise, that of each model) without one.
    """
    for argument, value in {"images": count, "batch_size": batch_size, "image_size": image_size}.items():
        require(value is None or value >= 1, f"{argument}: expected an integer >= 1, got {value}")
    size = {} if image_size is None else {"image_size": image_size}
    if name == RANDOM:
        return Images(name, count, batch_size, device, size, [], [])
    if name not in DATA:
        raise unknown_name("data", name, [*DATA, RANDOM])
    source = create_data(name, root, Augmentation(), **size)
    require(count <= source.test_images, f"images: {name} has {source.test_images} test images, got {count}")
    batch = source.pick_test_images(np.linspace(0, source.test_images - 1, count).round().astype(np.int64), device)
    require(batch.count > 0, f"data: no test image of {name} could be read")
    facts = {"num_classes": source.num_classes, "image_size": source.image_size, "in_channels": source.in_channels}
    images, labels = (list(t[: batch.count].contiguous().split(batch_size)) for t in (batch.images, batch.labels))
    return Images(name, batch.count, batch_size, device, facts, images, labels, source.train_images)
