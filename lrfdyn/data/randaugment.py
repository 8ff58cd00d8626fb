"""RandAugment (Cubuk et al., 2020) of levels 0..255 `[B, C, H, W]`, with the strength and the rounding of Pillow's 14
operations. The host decides which image gets which, so each runs once per layer, on its own images only."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lrfdyn.data.hashed_random import RAND_AUGMENT, Keys, normal
from lrfdyn.data.loading import to_device

if TYPE_CHECKING:
    from lrfdyn.data.augment import Augmentation

NUMBERS = 6  # uniform numbers per image and layer

# The order is part of the definition of every run. The affine ones are last and run together.
OPERATIONS = (
    "identity", "autocontrast", "equalize", "solarize", "posterize", "color", "contrast", "brightness", "sharpness",
    "rotate", "shear_x", "shear_y", "translate_x", "translate_y",
)  # fmt: skip
FIRST_AFFINE = OPERATIONS.index("rotate")


def rand_augment(levels: Tensor, keys: Keys, settings: Augmentation, fill: Sequence[int]) -> Tensor:
    """`levels` float. `fill` is the colour of what an affine operation moves in from outside."""
    chosen_from = np.array([OPERATIONS.index(name) for name in settings.rand_augment_operations or OPERATIONS])
    numbers = keys.uniform(RAND_AUGMENT, NUMBERS * settings.rand_augment_layers)
    for choice, applied, first, second, sign, _ in numbers.T.reshape(-1, NUMBERS, len(numbers)):
        operation = chosen_from[np.floor(choice * len(chosen_from)).astype(int)]
        operation = np.where(applied < settings.rand_augment_probability, operation, OPERATIONS.index("identity"))
        magnitude = settings.rand_augment_magnitude + settings.rand_augment_deviation * normal(first, second)
        levels = apply_layer(levels, operation, np.clip(magnitude, 0, 10) / 10, np.where(sign < 0.5, -1.0, 1.0), fill)
    return levels


def apply_layer(
    levels: Tensor, operation: np.ndarray, strength: np.ndarray, sign: np.ndarray, fill: Sequence[int]
) -> Tensor:
    """Image i gets `OPERATIONS[operation[i]]` with `strength[i]` in 0..1 and direction `sign[i]`."""
    levels = levels.clone()

    def run(chosen: np.ndarray, function: Callable[[Tensor, Tensor], Tensor], parameters: np.ndarray) -> None:
        (index,) = np.nonzero(chosen)
        if len(index):
            where = to_device(index, levels.device)
            values = to_device(parameters[index].astype(np.float32), levels.device)
            values = values.view(len(index), *parameters.shape[1:], *(1,) * (4 - parameters.ndim))
            levels.index_copy_(0, where, function(levels.index_select(0, where), values))

    parameters = {
        **dict.fromkeys((autocontrast, equalize), strength),
        solarize: 256 * (1 - strength),
        posterize: 8 - np.rint(4 * strength),
        **dict.fromkeys((color, contrast, brightness, sharpness), 1 + sign * 0.9 * strength),
    }
    for function, values in parameters.items():
        run(operation == OPERATIONS.index(function.__name__), function, values)
    matrices = affine_matrices(operation, strength * sign, *levels.shape[-2:])
    run(operation >= FIRST_AFFINE, lambda x, m: affine(x, m[..., 0], fill), matrices)
    return levels


def autocontrast(x: Tensor, _: Tensor | None = None) -> Tensor:
    low, high = x.amin((2, 3), keepdim=True), x.amax((2, 3), keepdim=True)
    stretched = torch.floor((x - low) * (255 / (high - low).clamp(min=1)) + 1e-3)
    return torch.where(high > low, stretched, x)


def equalize(x: Tensor, _: Tensor | None = None) -> Tensor:
    rows = x.long().flatten(2).flatten(0, 1)  # one histogram per image and channel
    count, pixels = rows.shape
    # In one dimension, because that form has a deterministic version wherever one is asked for.
    slots = (rows + 256 * torch.arange(count, device=x.device)[:, None]).flatten()
    histogram = torch.zeros(count * 256, dtype=torch.long, device=x.device)
    histogram = histogram.scatter_add_(0, slots, torch.ones_like(slots)).view(count, 256)
    last = rows.amax(1, keepdim=True)
    step = (pixels - histogram.gather(1, last)) // 255
    below = histogram.cumsum(1) - histogram
    table = ((step // 2 + below) // step.clamp(min=1)).clamp(max=255)
    return torch.where(step > 0, table.gather(1, rows), rows).view(x.shape).to(x.dtype)


def solarize(x: Tensor, threshold: Tensor) -> Tensor:
    return torch.where(x < threshold, x, 255 - x)


def posterize(x: Tensor, bits: Tensor) -> Tensor:
    step = torch.exp2(8 - bits).round()
    return torch.floor(x / step) * step


def _blend(degenerate: Tensor, x: Tensor, factor: Tensor) -> Tensor:
    return torch.floor((degenerate + factor * (x - degenerate)).clamp(0, 255) + 1e-3)


def _grey(x: Tensor) -> Tensor:
    if x.shape[1] == 1:
        return x
    red, green, blue = x.unbind(1)
    return torch.floor((19595 * red + 38470 * green + 7471 * blue + 32768) / 65536)[:, None]


def color(x: Tensor, factor: Tensor) -> Tensor:
    return _blend(_grey(x), x, factor)


def contrast(x: Tensor, factor: Tensor) -> Tensor:
    # A sum of whole numbers in float64 is exact, so it does not depend on how the batch is split.
    mean = _grey(x).mean((2, 3), keepdim=True, dtype=torch.float64)
    return _blend(torch.floor(mean + 0.5).float(), x, factor)


def brightness(x: Tensor, factor: Tensor) -> Tensor:
    return _blend(torch.zeros_like(x), x, factor)


def sharpness(x: Tensor, factor: Tensor) -> Tensor:
    """The smooth version keeps the border as it is."""
    inner = F.avg_pool2d(x, 3, 1) * (9 / 13) + x[:, :, 1:-1, 1:-1] * (4 / 13)
    smooth = x.clone()
    smooth[:, :, 1:-1, 1:-1] = torch.floor(inner + 0.5)
    return _blend(smooth, x, factor)


def affine_matrices(operation: np.ndarray, strength: np.ndarray, height: int, width: int) -> np.ndarray:
    """`[B, 2, 3]`: from a point of the new image to the point of the old one, in pixels from the top left corner."""
    matrices = np.tile(np.eye(2, 3), (len(operation), 1, 1))
    for name, row, column, most in (
        ("shear_x", 0, 1, 0.3),
        ("shear_y", 1, 0, 0.3),
        ("translate_x", 0, 2, 0.45 * width),
        ("translate_y", 1, 2, 0.45 * height),
    ):
        matrices[:, row, column] += np.where(operation == OPERATIONS.index(name), most * strength, 0)
    turned = operation == OPERATIONS.index("rotate")
    matrices[turned] = about_centre(rotations(math.radians(30) * strength[turned]), height, width)
    return matrices


def rotations(angles: np.ndarray) -> np.ndarray:
    """`[n, 2, 2]` of angles `[n]`."""
    cos, sin = np.cos(angles), np.sin(angles)
    return np.array([[cos, -sin], [sin, cos]]).transpose(2, 0, 1)


def about_centre(linear: np.ndarray, height: int, width: int) -> np.ndarray:
    """`[n, 2, 3]` of maps `[n, 2, 2]` that leave the centre of the image where it is."""
    centre = np.array([width / 2, height / 2])
    return np.concatenate((linear, (centre - linear @ centre)[..., None]), 2)


def old_points(matrices: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """The points `[B, H, W]` of the old images, their x and y, that come to the middles of the pixels."""
    columns = torch.arange(width, device=matrices.device) + 0.5
    rows = torch.arange(height, device=matrices.device)[:, None] + 0.5
    m = matrices[..., None, None]
    old_x = m[:, 0, 0] * columns + m[:, 0, 1] * rows + m[:, 0, 2]
    old_y = m[:, 1, 0] * columns + m[:, 1, 1] * rows + m[:, 1, 2]
    return old_x, old_y


def sample(x: Tensor, old_x: Tensor, old_y: Tensor, mode: str, outside: str) -> Tensor:
    """The images at these points, by `mode` "bilinear" or "nearest"; `outside` of them "border" or "zeros"."""
    height, width = x.shape[-2:]
    grid = torch.stack((old_x * (2 / width) - 1, old_y * (2 / height) - 1), -1)
    return F.grid_sample(x, grid, mode=mode, padding_mode=outside, align_corners=False)


def affine(x: Tensor, matrices: Tensor, fill: Sequence[int]) -> Tensor:
    """Bilinear; what lies outside the old image gets the colour `fill`."""
    height, width = x.shape[-2:]
    old_x, old_y = old_points(matrices, height, width)
    moved = sample(x, old_x, old_y, "bilinear", "border").round()
    outside = (old_x < 0) | (old_x >= width) | (old_y < 0) | (old_y >= height)
    # One number per channel is an argument of the kernel; a tensor of them would be copied from the host first.
    return torch.stack([moved[:, c].masked_fill(outside, level) for c, level in enumerate(fill)], 1)
