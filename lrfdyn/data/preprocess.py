"""From an image file to the numbers that a model takes: what the data of its training did to test images."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lrfdyn.errors import LrfdynError, require

if TYPE_CHECKING:
    from PIL.Image import Image

    from lrfdyn.data.base import DataSource
    from lrfdyn.models import SpikingModel

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_DEVIATION = (0.229, 0.224, 0.225)
CROP_SHARE = 0.875
MODES = {1: "L", 3: "RGB"}  # what Pillow calls images of so many channels


def centre_crop(image: Image, size: int, crop_share: float) -> Image:
    """The centre of the image, scaled so that `size` is `crop_share` of its shorter side."""
    from PIL.Image import Resampling

    width, height = image.size
    scale = round(size / crop_share) / min(width, height)
    width, height = max(size, round(width * scale)), max(size, round(height * scale))
    image = image.resize((width, height), Resampling.BICUBIC)
    left, top = (width - size) // 2, (height - size) // 2
    return image.crop((left, top, left + size, top + size))


@dataclass(frozen=True)
class Preprocessing:
    """Scale the shorter side to `size / crop_share`, take the centre, then (levels / 255 - mean) / std."""

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
    def usual(cls, model: SpikingModel) -> Preprocessing:
        """What is assumed of a model that does not say: ImageNet's statistics, or levels from -1 to 1."""
        channels, size, _ = model.input_size
        if channels == 3:
            return cls(size, IMAGENET_MEAN, IMAGENET_DEVIATION)
        return cls(size, (0.5,) * channels, (0.5,) * channels)

    @classmethod
    def from_dict(cls, values: object, where: str) -> Preprocessing:
        """From JSON; a wrong value is an error that names `where` it is."""
        require(isinstance(values, Mapping), f"{where}: preprocessing: expected an object, got {values!r}")
        assert isinstance(values, Mapping)
        unknown = sorted(set(values) - set(cls.__dataclass_fields__))
        require(not unknown, f"{where}: preprocessing: unknown entry {', '.join(map(repr, unknown))}")
        try:
            lists = {key: tuple(float(v) for v in values[key]) for key in ("mean", "std")}
            made = cls(**{**values, **lists})
        except (TypeError, ValueError, KeyError) as error:
            raise LrfdynError(f"{where}: preprocessing: {error}") from None
        whole = isinstance(made.size, int) and made.size >= 1 and not isinstance(made.size, bool)
        require(whole, f"{where}: preprocessing: size: expected an integer >= 1, got {made.size!r}")
        numbers = [*made.mean, *made.std, made.crop_share]
        fits = len(made.mean) == len(made.std) >= 1 and all(map(_is_number, numbers)) and min(made.std) > 0
        require(fits, f"{where}: preprocessing: expected a mean and a positive std of every channel, got {lists}")
        require(
            0 < made.crop_share <= 1,
            f"{where}: preprocessing: crop_share: expected 0 < x <= 1, got {made.crop_share!r}",
        )
        require(
            made.interpolation == "bicubic",
            f"{where}: preprocessing: interpolation: expected bicubic, got {made.interpolation!r}",
        )
        return made

    def as_dict(self) -> dict[str, Any]:
        return {key: list(v) if isinstance(v, tuple) else v for key, v in asdict(self).items()}

    def load(self, path: Path) -> np.ndarray:
        """The image in `path` as `[C, size, size]`, float32. Whatever is wrong with it raises."""
        from PIL import Image

        with Image.open(path) as file:
            return self.apply(file)

    def apply(self, image: Image) -> np.ndarray:
        require(
            self.channels in MODES, f"images: expected 1 or 3 channels to read files, the model has {self.channels}"
        )
        image = centre_crop(image.convert(MODES[self.channels]), self.size, self.crop_share)
        levels = np.asarray(image, np.float32).reshape(self.size, self.size, self.channels).transpose(2, 0, 1)
        mean, std = (np.array(v, np.float32).reshape(-1, 1, 1) for v in (self.mean, self.std))
        return np.ascontiguousarray((levels / np.float32(255) - mean) / std)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def require_pillow() -> None:
    try:
        import PIL  # noqa: F401
    except ImportError:
        raise LrfdynError("images: reading images needs Pillow; pip install 'lrfdyn[data]'") from None
