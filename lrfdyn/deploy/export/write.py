"""A model as a file that runs without this package, checked before it is kept."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lrfdyn.data.preprocess import Preprocessing, reason, require_pillow
from lrfdyn.deploy.export.check import TOLERANCE, Check, check, check_images
from lrfdyn.deploy.export.executorch import ExecutorchRunner, sidecar, write_executorch
from lrfdyn.deploy.export.exportable import exportable_model
from lrfdyn.deploy.export.onnx import OnnxRunner, write_onnx
from lrfdyn.errors import LrfdynError, first_line, require, require_integer, unknown_name
from lrfdyn.files import writable_folder
from lrfdyn.models import SpikingModel
from lrfdyn.sources import EXPORTED
from lrfdyn.version import __version__

FACTS_FORMAT = 1


@dataclass(frozen=True)
class Exported:
    """A file that `export_model` wrote: `format` is "onnx" or "executorch", `check` what its comparison with PyTorch
    found."""

    path: Path
    format: str
    bytes: int
    check: Check


def export_model(
    model: SpikingModel,
    out: str | os.PathLike[str],
    *,
    format: str | None = None,
    weights: str | None = None,
    images: Sequence[Path] = (),
    random_images: int = 8,
    most_images: int = 8,
    tolerance: float = TOLERANCE,
) -> Exported:
    """Writes a classifier as an ONNX or ExecuTorch file and checks the file against PyTorch.

    A file that does not compute the model is an error, and none is left.

    - `model`: A classifier in evaluation mode.
    - `out`: The file to write, which ends in .onnx or .pte. It takes images `[B, C, size, size]` in float32 of the
      size that the model's preprocessing states, and gives logits `[B, classes]`.
    - `format`: "onnx" or "executorch"; without it the ending of `out` says which.
    - `weights`: Where the weights are from, for the file's own description.
    - `images`: Image files for the check; without any, scikit-learn's digits where it is installed.
    - `random_images`: How many random images the check shows beside them.
    - `most_images`: The largest B of an ExecuTorch file; that of an ONNX file is free.
    - `tolerance`: How far logits may be off where no spike flipped, relative to the largest logit.

    Returns the file's path, format and size in bytes, and the check's numbers.

    Example:

        made = export_model(model.eval(), "model.onnx")
        print(made.bytes, made.check)
    """
    path = Path(out)
    if format is None:
        endings = {ending: name for name, ending in EXPORTED.items()}
        require(path.suffix in endings, f"out: expected a name that ends in {' or '.join(endings)}, got {path}")
        format = endings[path.suffix]
    if format not in EXPORTED:
        raise unknown_name("format", format, EXPORTED)
    require(not model.training, "model: expected evaluation mode")
    require(model.pipeline_tag == "image-classification", "model: expected a classifier, got a segmentation model")
    require(model.num_classes > 0, "model: expected a classifier (num_classes is 0)")
    require_integer("random_images", random_images, 1)
    require_integer("most_images", most_images, 1)
    require(path.suffix == EXPORTED[format], f"out: expected a name that ends in {EXPORTED[format]}, got {path}")
    require(not path.is_dir(), f"out: expected a file, got the folder {path}")
    writable_folder(path.parent, "out")
    preprocessing = model.preprocessing or Preprocessing.usual(*model.input_size[:2])
    shape = (model.in_channels, preprocessing.size, preprocessing.size)
    real = real_images(preprocessing, images)
    facts = model_facts(model, preprocessing, weights)
    model = copy.deepcopy(model).float().cpu()  # the caller's stays where it is
    form = exportable_model(model, shape[1:])
    sample = torch.zeros(2, *shape)
    temporary = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        try:
            if format == "onnx":
                write_onnx(form, sample, temporary, facts)
            else:
                write_executorch(form, sample, temporary, facts, most_images)
        except (LrfdynError, OSError):
            raise
        except Exception as error:  # the exporters have many kinds
            raise LrfdynError(f"model: {format} cannot express it ({first_line(error)})") from error
        runner = OnnxRunner(temporary) if format == "onnx" else ExecutorchRunner(temporary)
        shown = check_images(shape, random_images, real)
        result = check(runner, model, shown, len(real), runner.most_images, tolerance)
        del runner
        if format == "executorch":
            os.replace(sidecar(temporary), sidecar(path))
        os.replace(temporary, path)
    except OSError as error:
        raise LrfdynError(f"out: cannot write {path} ({error.strerror or error})") from None
    finally:
        temporary.unlink(missing_ok=True)
        sidecar(temporary).unlink(missing_ok=True)
    return Exported(path, format, path.stat().st_size, result)


def model_facts(model: SpikingModel, preprocessing: Preprocessing, weights: str | None) -> dict[str, Any]:
    """What an exported file says about itself, as plain values."""
    return {
        "format": FACTS_FORMAT,
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


def real_images(preprocessing: Preprocessing, paths: Sequence[Path], count: int = 8) -> list[np.ndarray]:
    """Images `[C, size, size]` of the given files, or without any of the first `count` of scikit-learn's digits; none
    where that is not installed."""
    if paths:
        require_pillow()
        return [_read(preprocessing, path) for path in paths]
    try:
        from PIL import Image
        from sklearn.datasets import load_digits
    except ImportError:
        return []
    if preprocessing.channels not in (1, 3):
        return []
    digits: Any = load_digits()
    return [
        preprocessing.apply(Image.fromarray((d * (255 / 16)).round().astype(np.uint8))) for d in digits.images[:count]
    ]


def _read(preprocessing: Preprocessing, path: Path) -> np.ndarray:
    try:
        return preprocessing.load(path)
    except Exception as error:  # damaged files make decoders fail in any way
        raise LrfdynError(f"images: cannot read {path} ({reason(error)})") from None
