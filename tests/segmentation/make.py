"""Pictures of shapes in ADE20K's layout, and the smallest segmentation network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lrfdyn.segmentation import Segmenter, create_segmenter
from lrfdyn.training.config import TrainConfig
from lrfdyn.training.recipes import merge, parse_config

ROOT = Path(__file__).parent.parent.parent
CLASSES = 3  # ground, disc, square
TINY_HOST: dict[str, Any] = {"widths": [8, 16, 16, 16], "depths": [1, 1, 1, 1, 1], "heads": 2, "mlp_ratio": 2}
TINY_HEAD: dict[str, Any] = {"width": 16, "dropout": 0.0}
COLOURS = np.array([[60, 110, 60], [200, 60, 50], [60, 80, 210]])
RECIPE: dict[str, Any] = {
    "model": {"name": "sdt_v3_t", "attention": "lrf_dyn", "options": TINY_HOST, "head": TINY_HEAD},
    "data": {"name": "ade20k", "image_size": 32, "options": {"num_classes": CLASSES, "resident": True}},
    "augmentation": {"flip": 0.5, "scale": [0.8, 1.25]},
    "optimizer": {"learning_rate": 0.01, "weight_decay": 0.01, "head_rate": 2.0},
    "schedule": {"epochs": 2, "warmup_epochs": 0.5, "minimum_rate": 0, "decay": "poly", "power": 0.9},
    "run": {"batch_size": 16, "test_batch_size": 4, "device": "cpu", "test_epochs": 100},
}


def shapes(seed: int, height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """An image and its mask as it is stored: 0 nothing, 1..3 the classes. Every colour is noisy; a stripe has none."""
    draw = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    label = np.ones((height, width), np.uint8)
    for kind in draw.permutation([2, 3]):
        radius = draw.integers(height // 6, height // 3)
        cy, cx = draw.integers(0, height), draw.integers(0, width)
        far = np.hypot(y - cy, x - cx) if kind == 2 else np.maximum(abs(y - cy), abs(x - cx))
        label[far < radius] = kind
    pixels = COLOURS[label - 1] + draw.normal(0, 25, (height, width, 3))
    label[:, : width // 10] = 0
    return pixels.clip(0, 255).astype(np.uint8), label


def write_pair(root: Path, split: str, name: str, image: np.ndarray, mask: np.ndarray) -> None:
    for kind, ending, pixels in (("images", "jpg", image), ("annotations", "png", mask)):
        folder = root / kind / split
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / f"{name}.{ending}", **({"quality": 95} if ending == "jpg" else {}))


def turned_pair(root: Path, split: str, name: str) -> tuple[np.ndarray, np.ndarray]:
    """A pair whose image says that the camera was turned by a quarter; the mask lies on the stored pixels."""
    image, mask = shapes(5, 36, 60)
    write_pair(root, split, name, image, mask)
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(image).save(root / "images" / split / f"{name}.jpg", quality=95, exif=exif)
    return image, mask


def write_shapes(root: Path, train: int = 24, validation: int = 6) -> Path:
    for split, count, first in (("training", train, 0), ("validation", validation, 1000)):
        for i in range(count):
            height, width = 36 + 4 * (i % 3), 40 + 7 * (i % 2)
            write_pair(root, split, f"scene_{i:03d}", *shapes(first + i, height, width))
    return root


def tiny_model(**options: Any) -> Segmenter:
    given = {"attention": "ssa", "num_classes": CLASSES, "image_size": 32, "head_options": TINY_HEAD, **TINY_HOST}
    return create_segmenter("sdt_v3_t", **{**given, **options})


def tiny_config(root: Path, **sections: dict[str, Any]) -> TrainConfig:
    return parse_config(merge(RECIPE, merge({"data": {"root": str(root)}}, sections)))
