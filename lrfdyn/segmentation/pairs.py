"""The files of ADE20K's layout: an image and its mask in two folders of the same shape."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lrfdyn.data.preprocess import eight_bits
from lrfdyn.errors import LrfdynError, require

if TYPE_CHECKING:
    from PIL.Image import Image

FOLDER = "ADEChallengeData2016"
IMAGE_ENDINGS = (".jpg", ".jpeg", ".png")
CLASSES = 150

Picture = tuple[np.ndarray, np.ndarray]  # image [H, W, 3], mask [H, W] of classes and IGNORED


@dataclass(frozen=True)
class Pair:
    image: Path
    mask: Path


def find_root(root: Path) -> Path:
    return root / FOLDER if (root / FOLDER).is_dir() else root


def find_pairs(root: Path, split: str) -> list[Pair]:
    """The images of a split in the order of their names, each with its mask."""
    images, masks = root / "images" / split, root / "annotations" / split
    for folder in (images, masks):
        require(folder.is_dir(), f"root: no such folder {folder}")
    found = sorted(path for path in images.iterdir() if path.suffix.lower() in IMAGE_ENDINGS)
    require(bool(found), f"root: {images} has no images")
    pairs = [Pair(path, masks / f"{path.stem}.png") for path in found]
    for pair in pairs:
        require(pair.mask.is_file(), f"root: the image {pair.image} has no mask {pair.mask}")
    return pairs


@contextmanager
def opened(path: Path, what: str) -> Iterator[Image]:
    """The file of an image or a mask; whatever is wrong with it is an error that names it."""
    from PIL.Image import open as open_image

    try:
        with open_image(path) as file:
            yield file
    except Exception as error:  # damaged files make decoders fail in any way
        raise LrfdynError(f"data: cannot read the {what} {path} ({type(error).__name__}: {error})") from None


def read_mask(path: Path, classes: int = CLASSES) -> np.ndarray:
    """The mask `[H, W]` of bytes in a file: classes from 0 on, IGNORED for none."""
    with opened(path, "mask") as file:
        mode, values = file.mode, np.asarray(file)
    require(mode in ("L", "P"), f"data: the mask {path} is not of 8-bit numbers (mode {mode})")
    largest = int(values.max())
    require(largest <= classes, f"data: the mask {path} has the value {largest}, expected 0..{classes}")
    return (values - np.uint8(1)).astype(np.uint8)  # 0 wraps to 255, which is IGNORED


def _fitting_mask(pair: Pair, size: tuple[int, int], classes: int) -> np.ndarray:
    mask = read_mask(pair.mask, classes)
    require(
        size == mask.shape[::-1],
        f"data: the mask {pair.mask} is {mask.shape[1]}x{mask.shape[0]} pixels, its image {size[0]}x{size[1]}",
    )
    return mask


def check_pair(pair: Pair, classes: int) -> None:
    """Raises what `read_pair` would, without decoding the image."""
    with opened(pair.image, "image") as file:
        size = file.size
    _fitting_mask(pair, size, classes)


def read_pair(pair: Pair, classes: int = CLASSES, short_side: int | None = None) -> Picture:
    """The image `[H, W, 3]` and the mask `[H, W]`; with `short_side` the image is scaled to it and the mask stays.

    Both are taken as they are stored: masks lie beside the stored pixels and know nothing of a camera that was turned.
    """
    with opened(pair.image, "image") as file:
        image = eight_bits(file).convert("RGB")
    mask = _fitting_mask(pair, image.size, classes)
    if short_side is not None:
        from PIL.Image import Resampling

        factor = short_side / min(image.size)
        wide, high = (max(1, round(side * factor)) for side in image.size)
        image = image.resize((wide, high), Resampling.BILINEAR)
    return np.asarray(image), mask
