"""A model as a file that runs without this package, checked before it is kept.

Two programs add the same numbers in another order, so potentials differ by a rounding, and where one lies that close to
its threshold the spike flips: a jump that later layers see. A file is therefore judged image by image. Without a flip
all logits agree within the tolerance, which is relative to the largest logit. Images with flips are counted, and are
accepted as long as they are the minority, or as long as PyTorch in float32 is as far from PyTorch in float64. The
largest logit must be the same class on nearly all images, or on about as many as in that comparison.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lrfdyn.checks import checked
from lrfdyn.data.preprocess import Preprocessing, reason, require_pillow
from lrfdyn.deploy.export.exportable import exportable_model
from lrfdyn.deploy.export.formats import ExecutorchRunner, OnnxRunner, write_executorch, write_onnx
from lrfdyn.deploy.export.nir_file import NirRunner, write_nir
from lrfdyn.deploy.export.nir_graph import TIME_STEP
from lrfdyn.errors import LrfdynError, first_line, require, require_integer, unknown_name
from lrfdyn.files import expanded, temporary_folder, writable_folder
from lrfdyn.models import SpikingModel
from lrfdyn.sources import EXPORTED
from lrfdyn.version import __version__

LEAST_AGREEMENT = 0.9
ROUNDING_FACTOR = 4  # how much farther off than PyTorch's own rounding a file may be
BATCHES = (1, 3)  # the first batches of a check, so that the dynamic axis is proved; then as many as fit, or
BATCH = 8

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

    def __str__(self) -> str:
        text = (
            f"{self.real} real and {self.images - self.real} random images: "
            f"argmax equal on {round(self.argmax_agreement * self.images)} of {self.images}, "
            f"largest logit difference {self.max_logit_difference:.2g} (largest logit {self.largest_logit:.3g})"
        )
        if self.float64_within_tolerance is not None:
            text += (
                f"; a spike flipped in {self.images - self.within_tolerance} (PyTorch against its own float64: "
                f"in {self.images - self.float64_within_tolerance}, "
                f"largest difference {self.float64_max_logit_difference:.2g})"
            )
        if self.logit_spread <= self.tolerance * self.largest_logit:
            text += "; all images give the same logits, so this proves little"
        return text


@dataclass(frozen=True)
class Exported:
    """A file that `export_model` wrote, "onnx", "executorch" or "nir", and what its comparison with PyTorch found."""

    path: Path
    format: str
    bytes: int
    check: Check


@checked
def export_model(
    model: SpikingModel,
    out: str | os.PathLike[str],
    *,
    format: str | None = None,
    weights: str | None = None,
    images: Sequence[Path] = (),
    random_images: int = 8,
    most_images: int = 8,
    frames: bool = False,
    dense: bool = False,
    tolerance: float = 1e-3,
) -> Exported:
    """Writes a classifier as an ONNX, ExecuTorch or NIR file and checks the file against PyTorch.

    A file that does not compute the model is an error, and none is left.

    - `model`: A classifier in evaluation mode.
    - `out`: The file to write, which ends in .onnx, .pte or .nir. It takes images `[B, C, size, size]` in float32 of
      the size that the model's preprocessing states, and gives logits `[B, classes]`; a NIR graph takes the same image
      at every time step, and its outputs have to be averaged.
    - `format`: "onnx", "executorch" or "nir"; without it the ending of `out` says which.
    - `weights`: Where the weights are from, for the file's own description.
    - `images`: Image files for the check; without any, scikit-learn's digits where it is installed.
    - `random_images`: How many random images the check shows beside them.
    - `most_images`: The largest B of an ExecuTorch file; that of the others is free.
    - `frames`: An ONNX or ExecuTorch file takes event frames `[B, T, C, size, size]`, as many as the model has time
      steps, in the place of images. The file states `frames` and, of a model that was trained on recordings, its
      `framing`, and no preprocessing.
    - `dense`: In a NIR file, convolutions without groups, for readers that know none: depth-wise ones get zeros
      between the channels.
    - `tolerance`: How far logits may be off where no spike flipped, relative to the largest logit.

    Returns the file's path, format and size in bytes, and the check's numbers.

    Example:

        made = export_model(model.eval(), "model.onnx")
        print(made.bytes, made.check)
    """
    path = expanded(out, "out")
    numbers = {name: ending for name, ending in EXPORTED.items() if name != "native"}  # which is in integers
    if format not in (None, *numbers):
        raise unknown_name("format", format, numbers)
    kinds = {ending: name for name, ending in numbers.items() if format in (None, name)}
    require(path.suffix in kinds, f"out: expected a name that ends in {' or '.join(kinds)}, got {path}")
    format = kinds[path.suffix]
    require(not model.training, "model: expected evaluation mode")
    require(model.pipeline_tag == "image-classification", "model: expected a classifier, got a segmentation model")
    require(model.num_classes > 0, "model: expected a classifier (num_classes is 0)")
    require_integer("random_images", random_images, 1)
    require_integer("most_images", most_images, 1)
    require(format == "nir" or not dense, f"dense: only for NIR files, got {path}")
    require(format != "nir" or not frames, f"frames: a NIR graph has one frame for every time step anyway, got {path}")
    framing = model.framing if frames or format == "nir" else None
    films = frames or framing is not None  # go in, and no images
    require(not (films and images), "images: a film has no image files to check on")
    if framing is not None:
        steps = f"expected its time_steps, {model.time_steps}, got {framing.steps}"
        require(framing.steps == model.time_steps, f"model: steps of its framing: {steps}")
    require(not path.is_dir(), f"out: expected a file, got the folder {path}")
    writable_folder(path.parent, "out")
    preprocessing = model.preprocessing or Preprocessing.usual(*model.input_size[:2])
    film = (model.time_steps,) if frames else ()
    size = preprocessing.size if framing is None else framing.size
    shape = (*film, model.in_channels, size, size)
    real = [] if films else real_images(preprocessing, images)
    own: dict[str, dict[str, Any]] = {
        "executorch": {"most_images": most_images},
        "nir": {"time_step_s": TIME_STEP, "dense": dense},
    }
    facts = model_facts(model, weights) | own.get(format, {})
    facts |= recording_facts(model) if films else {}
    facts |= {"frames": model.time_steps} if frames else {}
    model = copy.deepcopy(model).float().cpu()  # the caller's stays where it is
    form = model if format == "nir" else exportable_model(model, shape[-2:])
    ways: dict[str, tuple[Any, Any]] = {
        "onnx": (write_onnx, OnnxRunner),
        "executorch": (write_executorch, ExecutorchRunner),
        "nir": (write_nir, NirRunner),
    }
    write, run = ways[format]
    try:
        with temporary_folder(path.parent) as folder:
            made = folder / path.name
            try:
                write(form, torch.zeros(2, *shape), made, facts)
            except (LrfdynError, OSError):
                raise
            except Exception as error:  # the exporters have many kinds
                raise LrfdynError(f"model: {format} cannot express it ({first_line(error)})") from error
            shown = check_images(shape, random_images, real)
            result = check(run(made), model, shown, len(real), facts.get("most_images"), tolerance)
            for file in sorted(made.parent.iterdir(), reverse=True):  # what describes a program before the program
                file.replace(path.with_name(file.name))
    except OSError as error:
        raise LrfdynError(f"out: cannot write {path} ({error.strerror or error})") from None
    return Exported(path, format, path.stat().st_size, result)


def model_facts(model: SpikingModel, weights: str | None) -> dict[str, Any]:
    """What an exported file says about itself, as plain values."""
    preprocessing = model.preprocessing or Preprocessing.usual(*model.input_size[:2])
    return {
        "format": 1,  # of these facts
        "lrfdyn_version": __version__,
        "model": model.name or type(model).__name__,
        "host": type(model).__name__,
        "attention": model.config.get("attention"),
        "attention_options": model.config.get("attention_options"),
        "time_steps": model.time_steps,
        "weights": weights,
        "num_classes": model.num_classes,
        "class_names": None if model.class_names is None else list(model.class_names),
        "preprocessing": preprocessing.as_dict(),
        "preprocessing_assumed": model.preprocessing is None,
    }


def recording_facts(model: SpikingModel) -> dict[str, Any]:
    """What stands in the place of a preprocessing where frames go in and no images: how they are made, if known."""
    framing = None if model.framing is None else model.framing.as_dict()
    return {"framing": framing, "preprocessing": None, "preprocessing_assumed": False}


def real_images(preprocessing: Preprocessing, paths: Sequence[Path]) -> list[np.ndarray]:
    """Images `[C, size, size]` of the given files, or without any of the first eight of scikit-learn's digits; none
    where that is not installed."""
    if paths:
        require_pillow()
    found = []
    for path in paths:
        try:
            found.append(preprocessing.load(path))
        except Exception as error:  # damaged files make decoders fail in any way
            raise LrfdynError(f"images: cannot read {path} ({reason(error)})") from None
    if found or preprocessing.channels not in (1, 3):
        return found
    try:
        from PIL import Image
        from sklearn.datasets import load_digits
    except ImportError:
        return []
    digits: Any = load_digits()
    levels = (digits.images[:8] * (255 / 16)).round().astype(np.uint8)
    return [preprocessing.apply(Image.fromarray(digit)) for digit in levels]


def run_batches(run: Runner, images: np.ndarray, most: int | None) -> np.ndarray:
    """The logits `[N, classes]` of all images `[N, C, H, W]`, shown in batches of different sizes up to `most`."""
    sizes = [min(size, most or size) for size in (*BATCHES, *[most or BATCH] * len(images))]
    parts = np.split(images, np.cumsum(sizes))
    return np.concatenate([run(np.ascontiguousarray(part)) for part in parts if len(part)])


@torch.inference_mode()
def torch_logits(model: SpikingModel, images: np.ndarray) -> np.ndarray:
    """PyTorch's logits `[N, classes]` of images `[N, C, H, W]` or films `[N, T, C, H, W]`, in float64 whatever the type
    of the model."""
    like = next(model.parameters())
    parts = torch.from_numpy(images).to(like.device, like.dtype).split(BATCH)
    logits = [model(part.transpose(0, 1) if part.dim() == 5 else part) for part in parts]
    return torch.cat(logits).double().cpu().numpy()


def _compare(found: np.ndarray, expected: np.ndarray, tolerance: float) -> tuple[np.ndarray, int, float]:
    """The largest difference of each image's logits, how many are within `tolerance`, and the share of equal argmax."""
    off = np.abs(found - expected).max(1)
    return off, int((off <= tolerance).sum()), float((found.argmax(1) == expected.argmax(1)).mean())


def check(
    run: Runner, model: SpikingModel, images: np.ndarray, real: int, most: int | None = None, tolerance: float = 1e-3
) -> Check:
    """Compares what `run` and `model` compute of images `[N, C, H, W]`, of which the first `real` are real ones. A file
    that does not compute the model is an error."""
    expected = torch_logits(model, images)
    found = run_batches(run, images, most)
    finite = np.isfinite(found).mean()
    got = f"{list(found.shape)} logits, {finite:.0%} of them finite; PyTorch gives {list(expected.shape)}"
    require(found.shape == expected.shape and finite == 1, f"export: the file gives {got}")
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
    """The images `[N, *shape]` of a check: the `real` ones, then `count` of random numbers, always the same."""
    drawn = np.random.default_rng(0).standard_normal((count, *shape)).astype(np.float32)
    return np.stack([*real, *drawn])


@torch.no_grad()
def settle_norms(model: SpikingModel) -> None:
    """Gives the norms of `model` the statistics of random images: a network that was never trained is silent otherwise,
    and a silent one proves nothing about a file."""
    momenta = {module: module.momentum for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d)}
    for norm in momenta:
        norm.momentum = 1.0
        norm.train()
    model(torch.from_numpy(check_images(model.input_size, 4, [])))
    for norm, momentum in momenta.items():
        norm.momentum = momentum
    model.eval()
