"""From an image file to the numbers that a model takes: what the data of its training did to test images."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lrfdyn.checks import checked
from lrfdyn.errors import LrfdynError, needs, require, require_integer
from lrfdyn.files import plain_file

if TYPE_CHECKING:
    from PIL.Image import Image

    from lrfdyn.data.base import DataSource

IMAGENET_MEAN, IMAGENET_DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CROP_SHARE = 0.875
INTERPOLATIONS = ("bicubic", "bilinear")
MOST_PIXELS = 2**27  # of a scaled picture: one that is far wider than high grows as its short side does


def open_picture(path: Path, mode: str) -> Image:
    """The picture of a file in Pillow's `mode`, turned as the camera was held, 16-bit levels as 8-bit ones."""
    from PIL import Image, ImageOps

    with warnings.catch_warnings():
        # Cameras make pictures beyond the size that Pillow warns of; twice that is an error still.
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        with Image.open(plain_file(path)) as file:
            return eight_bits(ImageOps.exif_transpose(file)).convert(mode)


def eight_bits(image: Image) -> Image:
    """16-bit levels scaled to 8 bits: Pillow's own conversion cuts off all above 255."""
    if image.mode != "F" and not image.mode.startswith("I"):
        return image
    from PIL.Image import fromarray

    levels = np.asarray(image)
    low, high = levels.min(), levels.max()
    known = image.mode != "F" and low >= 0 and high < 2**16
    require(known, f"images: expected 8 or 16 bits a level, got mode {image.mode} from {low} to {high}")
    return fromarray((levels / 257).round().astype(np.uint8))


def scaled_size(size: tuple[int, int], scale: float, most: int = MOST_PIXELS) -> tuple[int, int]:
    """Width and height times `scale`; an error for a picture so thin that this would fill the memory."""
    width, height = (max(1, round(side * scale)) for side in size)
    thin = f"{size[0]} x {size[1]} pixels are too thin: scaled by {scale:g} they would be {width} x {height}"
    require(width * height <= most, f"images: {thin}")
    return width, height


def centre_crop(image: Image, size: int, crop_share: float, interpolation: str = "bicubic") -> Image:
    """The centre of the image, scaled so that `size` is `crop_share` of its shorter side."""
    from PIL.Image import Resampling

    scale = round(size / crop_share) / min(image.size)
    width, height = (max(size, side) for side in scaled_size(image.size, scale))
    left, top = (width - size) // 2, (height - size) // 2
    scaled = image.resize((width, height), Resampling[interpolation.upper()])
    return scaled.crop((left, top, left + size, top + size))


@checked
@dataclass(frozen=True)
class Preprocessing:
    """Scale the shorter side to `size / crop_share`, take the centre, then (levels / 255 - mean) / std. Segmentation
    takes the whole picture."""

    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop_share: float = CROP_SHARE
    interpolation: str = "bicubic"

    @property
    def channels(self) -> int:
        return len(self.mean)

    @classmethod
    def of_data(cls, source: DataSource) -> Preprocessing:
        """That of a data set's test images."""
        share = getattr(source, "crop_share", 1.0)  # data that is not decoded is not cropped either
        return cls(source.image_size, tuple(source.mean), tuple(source.deviation), share)

    @classmethod
    def usual(cls, channels: int, size: int) -> Preprocessing:
        """What is assumed of a model that does not say: ImageNet's statistics, or levels from -1 to 1."""
        mean, std = (IMAGENET_MEAN, IMAGENET_DEVIATION) if channels == 3 else ((0.5,) * channels,) * 2
        return cls(size, mean, std)

    @classmethod
    def from_dict(cls, values: object, where: str) -> Preprocessing:
        """From JSON; a wrong value is an error that names `where` it is."""
        try:
            if not isinstance(values, Mapping):
                raise LrfdynError(f"expected an object, got {values!r}")
            unknown = sorted(set(values) - set(cls.__dataclass_fields__))
            require(not unknown, f"unknown entry {', '.join(map(repr, unknown))}")
            lists = {key: tuple(float(v) for v in values[key]) for key in ("mean", "std")}
            made = cls(**{**values, **lists})
            require_integer("size", made.size, 1)
            fits = len(made.mean) == len(made.std) >= 1 and min(made.std) > 0
            require(fits, f"expected a mean and a positive std of every channel, got {lists}")
            require(0 < made.crop_share <= 1, f"crop_share: expected 0 < x <= 1, got {made.crop_share!r}")
            known, names = made.interpolation in INTERPOLATIONS, " or ".join(INTERPOLATIONS)
            require(known, f"interpolation: expected {names}, got {made.interpolation!r}")
        except (ArithmeticError, KeyError, TypeError, ValueError) as error:
            raise LrfdynError(f"{where}: preprocessing: {error}") from None
        return made

    def as_dict(self) -> dict[str, Any]:
        return {key: list(v) if isinstance(v, tuple) else v for key, v in asdict(self).items()}

    def load(self, path: Path) -> np.ndarray:
        """The image in `path` as `[C, size, size]`, float32. Whatever is wrong with it raises."""
        return self.apply(open_picture(path, self.mode))

    @property
    def mode(self) -> str:
        require(self.channels in (1, 3), f"images: expected 1 or 3 channels to read files, got {self.channels}")
        return "L" if self.channels == 1 else "RGB"

    def apply(self, image: Image) -> np.ndarray:
        """A picture as `[C, size, size]`, float32."""
        image = centre_crop(image.convert(self.mode), self.size, self.crop_share, self.interpolation)
        levels = np.asarray(image, np.float32).reshape(self.size, self.size, self.channels).transpose(2, 0, 1)
        mean, std = (np.array(v, np.float32).reshape(-1, 1, 1) for v in (self.mean, self.std))
        return np.ascontiguousarray((levels / np.float32(255) - mean) / std)

    def levels(self, images: np.ndarray) -> np.ndarray:
        """The levels from 0 to 255, uint8, of images `[B, C, H, W]` that `apply` gave."""
        mean, std = (np.array(v, np.float64).reshape(-1, 1, 1) for v in (self.mean, self.std))
        return np.rint((images * std + mean) * 255).clip(0, 255).astype(np.uint8)


def reason(error: Exception) -> str:
    """Why a picture could not be read, in a few words."""
    if isinstance(error, LrfdynError):
        return str(error)
    return getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"


def require_pillow(what: str = "images: reading images") -> None:
    with needs(f"{what} needs Pillow; pip install 'lrfdyn[data]'"):
        import PIL  # noqa: F401
