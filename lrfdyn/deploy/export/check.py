"""Whether an exported file computes what the model computes in PyTorch.

Two programs add the same numbers in another order, so potentials differ by a rounding, and where one lies that close to
its threshold the spike flips: a jump that later layers see. A file is therefore judged image by image. Without a flip
all logits agree within the tolerance, which is relative to the largest logit. Images with flips are counted, and are
accepted as long as they are the minority, or as long as PyTorch in float32 is as far from PyTorch in float64. The
largest logit must be the same class on nearly all images, or on about as many as in that comparison.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from lrfdyn.errors import LrfdynError
from lrfdyn.models.base import SpikingModel

TOLERANCE = 1e-3
LEAST_AGREEMENT = 0.9
ROUNDING_FACTOR = 4  # how much farther off than PyTorch's own rounding a file may be
BATCHES = (1, 3)  # the first batches of a check, so that the dynamic axis is proved; then as many as fit

Runner = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Check:
    """A comparison on `images` images, `real` of which are photographs or scans and the others random numbers."""

    images: int
    real: int
    tolerance: float  # of the largest logit
    largest_logit: float
    max_logit_difference: float
    within_tolerance: int
    argmax_agreement: float
    logit_spread: float  # largest deviation of a logit over the images; 0 where all images give the same
    float64_max_logit_difference: float | None  # of PyTorch in float32, where it was needed
    float64_within_tolerance: int | None
    float64_argmax_agreement: float | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        shown = f"{self.real} real and {self.images - self.real} random images"
        text = (
            f"{shown}: argmax equal on {round(self.argmax_agreement * self.images)} of {self.images}, "
            f"largest logit difference {self.max_logit_difference:.2g} (largest logit {self.largest_logit:.3g})"
        )
        flipped = self.images - self.within_tolerance
        if flipped:
            text += f"; a spike flipped in {flipped}"
        if self.float64_within_tolerance is not None:
            text += (
                f" (PyTorch against its own float64: in {self.images - self.float64_within_tolerance}, "
                f"largest difference {self.float64_max_logit_difference:.2g})"
            )
        if self.logit_spread <= self.tolerance * self.largest_logit:
            text += "; all images give the same logits, so this proves little"
        return text


def run_batches(run: Runner, images: np.ndarray, most: int | None) -> np.ndarray:
    """The logits `[N, classes]` of all images `[N, C, H, W]`, shown in batches of different sizes up to `most`."""
    outputs, start = [], 0
    for size in [*BATCHES, *[most or 8] * len(images)]:
        size = min(size, most or size)
        if start < len(images):
            outputs.append(run(np.ascontiguousarray(images[start : start + size])))
            start += size
    return np.concatenate(outputs)


@torch.inference_mode()
def torch_logits(model: SpikingModel, images: np.ndarray, batch: int = 8) -> np.ndarray:
    """PyTorch's logits `[N, classes]` of images `[N, C, H, W]`, in float64 whatever the type of the model."""
    like = next(model.parameters())
    parts = torch.from_numpy(images).to(like.device, like.dtype).split(batch)
    return torch.cat([model(part) for part in parts]).double().cpu().numpy()


def _compare(found: np.ndarray, expected: np.ndarray, tolerance: float) -> tuple[np.ndarray, int, float]:
    """The largest difference of each image's logits, how many images are within `tolerance`, and the share of them with
    the same largest logit."""
    off = np.abs(found - expected).max(1)
    return off, int((off <= tolerance).sum()), float((found.argmax(1) == expected.argmax(1)).mean())


def check(
    run: Runner, model: SpikingModel, images: np.ndarray, real: int, most: int | None = None,
    tolerance: float = TOLERANCE,
) -> Check:  # fmt: skip
    """Compares what `run` and `model` compute of images `[N, C, H, W]`, of which the first `real` are real ones. A file
    that does not compute the model is an error."""
    expected = torch_logits(model, images)
    found = run_batches(run, images, most)
    if found.shape != expected.shape or not np.isfinite(found).all():
        raise LrfdynError(
            f"export: the file gives {list(found.shape)} logits, {np.isfinite(found).mean():.0%} of them finite; "
            f"PyTorch gives {list(expected.shape)}"
        )
    count, scale = len(images), float(np.abs(expected).max())
    off, within, agreement = _compare(found, expected, tolerance * scale)
    own: tuple[float, int, float] | tuple[None, None, None] = (None, None, None)
    rounding, changes = False, 0.0
    if within < count:
        exact = torch_logits(copy.deepcopy(model).double(), images)
        own_off, own_within, same = _compare(exact, expected, tolerance * scale)
        own = (float(own_off.max()), own_within, same)
        rounding = bool(off.mean() <= ROUNDING_FACTOR * own_off.mean())
        changes = 2 * (1 - same) + 1 / count  # twice as many as PyTorch's own, and one by chance
    spread = float(expected.std(0).max())
    result = Check(count, real, tolerance, scale, float(off.max()), within, agreement, spread, *own)
    agrees = 1 - agreement <= max(1 - LEAST_AGREEMENT, changes)
    if not (agrees and (2 * within >= count or rounding)):
        raise LrfdynError(f"export: the file does not compute the model, so it was not kept; {result}")
    return result


def check_images(shape: Sequence[int], count: int, real: Sequence[np.ndarray]) -> np.ndarray:
    """The images `[N, *shape]` of a check: the `real` ones first, then `count` of normal random numbers, always the
    same."""
    drawn = np.random.default_rng(0).standard_normal((count, *shape)).astype(np.float32)
    return np.concatenate([np.stack(real), drawn]) if len(real) else drawn


@torch.no_grad()
def settle_norms(model: SpikingModel, images: int = 4) -> None:
    """Gives the norms of `model` the statistics of random images: a network that was never trained is silent otherwise,
    and a silent one proves nothing about a file."""
    norms = [module for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    momenta = [norm.momentum for norm in norms]
    drawn = torch.from_numpy(check_images(model.input_size, images, []))
    for norm in norms:
        norm.momentum = 1.0
        norm.train()
    model(drawn)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    model.eval()
