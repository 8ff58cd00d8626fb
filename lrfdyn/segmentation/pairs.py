"""Pictures with a mask each, read from files or from shards."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lrfdyn.data.decode import failure
from lrfdyn.data.preprocess import eight_bits, scaled_size
from lrfdyn.data.shards import Member
from lrfdyn.errors import LrfdynError, require
from lrfdyn.files import plain_file

if TYPE_CHECKING:
    from PIL.Image import Image

CLASSES = 150  # of ADE20K, and at most
IGNORED = 255  # in a mask: no class, does not count
Picture = tuple[np.ndarray, np.ndarray]  # image [H, W, 3], mask [H, W] of classes and IGNORED


class Pair(NamedTuple):
    image: Path | Member
    mask: Path | Member


@contextmanager
def opened(file: Path | Member, what: str) -> Iterator[Image]:
    """The file of an image or a mask; whatever is wrong with it is an error that names it."""
    from PIL.Image import open as open_image

    try:
        with open_image(plain_file(file) if isinstance(file, Path) else io.BytesIO(file.read())) as image:
            yield image
    except Exception as error:  # damaged files make decoders fail in any way
        raise LrfdynError(f"data: cannot read the {what} {file} ({failure(error)})") from None


def read_mask(pair: Pair, classes: int = CLASSES, ignored: Sequence[int] = ()) -> np.ndarray:
    """The mask `[H, W]` of bytes: classes from 0 on, IGNORED for none, which is stored as 0 or as one of `ignored`; its
    image is not decoded, but must fit."""
    with opened(pair.image, "image") as file:
        width, height = file.size
    with opened(pair.mask, "mask") as file:
        mode, values = file.mode, np.asarray(file)
    require(mode in ("L", "P"), f"data: the mask {pair.mask} is not of 8-bit numbers (mode {mode})")
    most, largest, (high, wide) = max(classes, *ignored, 0), int(values.max()), values.shape
    require(largest <= most, f"data: the mask {pair.mask} has the value {largest}, expected 0..{most}")
    same = (wide, high) == (width, height)
    require(same, f"data: the mask {pair.mask} is {wide}x{high} pixels, its image {width}x{height}")
    mask = (values - np.uint8(1)).astype(np.uint8)  # 0 wraps to 255, which is IGNORED
    mask[np.isin(values, ignored)] = IGNORED
    return mask


def read_pair(
    pair: Pair, classes: int = CLASSES, short_side: int | None = None, ignored: Sequence[int] = ()
) -> Picture:
    """The image `[H, W, 3]` and the mask `[H, W]`, both as they are stored, whatever EXIF says of the camera; with
    `short_side` the image is scaled to it and the mask stays."""
    mask = read_mask(pair, classes, ignored)
    with opened(pair.image, "image") as file:
        image = eight_bits(file).convert("RGB")
    if short_side is not None:
        from PIL.Image import Resampling

        image = image.resize(scaled_size(image.size, short_side / min(image.size)), Resampling.BILINEAR)
    return np.asarray(image), mask
