"""Class names and scores of image files, from a model in PyTorch or from an exported file."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lrfdyn.convert.fold import fold_batch_norm
from lrfdyn.data.folder import ENDINGS
from lrfdyn.data.preprocess import Preprocessing, reason, require_pillow
from lrfdyn.deploy.export.executorch import ExecutorchRunner
from lrfdyn.deploy.export.onnx import OnnxRunner
from lrfdyn.deploy.export.write import FORMATS, describe
from lrfdyn.errors import require, require_integer, unknown_name
from lrfdyn.io.hub import class_names_of
from lrfdyn.io.resolve import choose_device, load_model, model_folder
from lrfdyn.models import list_models

RUNTIMES = ("torch", "onnx", "executorch")
PICTURES = (*ENDINGS, ".gif", ".tif", ".tiff")  # of the files in a folder; files that are named may end in anything


class TorchRunner:
    """Images `[B, C, H, W]` to logits in PyTorch, with norms folded."""

    most_images: int | None = None

    def __init__(self, source: str, device: str | None) -> None:
        require(
            model_folder(source) is not None or source not in list_models(),
            f"model: {source} names a model without weights; expected the folder of a trained one or an exported file",
        )
        self.device = choose_device(device)
        model, weights = load_model(source)
        require(
            model.pipeline_tag == "image-classification",
            f"task: {source} is a segmentation model; pass --task segmentation",
        )
        self.facts = describe(model, model.preprocessing or Preprocessing.usual(model), weights)
        self.model = fold_batch_norm(model).to(self.device)

    @torch.inference_mode()
    def __call__(self, images: np.ndarray) -> np.ndarray:
        return self.model(torch.from_numpy(images).to(self.device)).cpu().numpy()


@dataclass(frozen=True)
class Predictor:
    """A model that takes files: `run` gives logits, `facts` are what the model says about itself."""

    runtime: str
    facts: dict[str, Any]
    preprocessing: Preprocessing
    class_names: tuple[str, ...]
    most_images: int | None
    run: Callable[[np.ndarray], np.ndarray]

    @classmethod
    def open(cls, source: str, runtime: str | None = None, device: str | None = None, threads: int = 0) -> Predictor:
        """`source` is a folder of a run or a saved model, a hub repository, or an exported file; without `runtime`
        its ending says what runs it. `device` is PyTorch's, `threads` ONNX Runtime's (0: as many as there are)."""
        wanted = runtime or guess_runtime(source)
        if wanted not in RUNTIMES:
            raise unknown_name("runtime", wanted, RUNTIMES)
        path = Path(source)
        if wanted != "torch":
            require(
                path.suffix == FORMATS[wanted],
                f"runtime: {wanted} runs {FORMATS[wanted]} files, got {source}; "
                f"lrfdyn export MODEL --format {wanted} --out FILE{FORMATS[wanted]} makes one",
            )
            require(path.is_file(), f"model: no such file: {source}")
            require(device is None, f"device: only for the torch runtime, got {device!r} with {wanted}")
        runner: OnnxRunner | ExecutorchRunner | TorchRunner
        if wanted == "onnx":
            runner = OnnxRunner(path, threads)
        elif wanted == "executorch":
            runner = ExecutorchRunner(path)
        else:
            runner = TorchRunner(source, device)
        facts = runner.facts
        count: Any = facts.get("num_classes") if isinstance(facts, dict) else None
        require(isinstance(count, int) and count >= 1, f"model: the description of {source} says no num_classes")
        names = class_names_of(facts, count, f"model: {source}") or tuple(f"class {i}" for i in range(count))
        preprocessing = Preprocessing.from_dict(facts.get("preprocessing"), f"model: {source}")
        return cls(wanted, facts, preprocessing, names, runner.most_images, runner)

    def predict(self, paths: Sequence[Path], top: int = 5, batch: int = 16) -> Iterator[dict[str, Any]]:
        """A record for every image, in order: its `predictions`, best first, or the `error` that kept it from being
        read."""
        require_integer("top", top, 1)
        require_integer("batch", batch, 1)
        require_pillow()
        size = min(batch, self.most_images or batch)
        for start in range(0, len(paths), size):
            some = paths[start : start + size]
            images: dict[int, np.ndarray] = {}
            records: list[dict[str, Any]] = [{"image": str(path)} for path in some]
            for i, path in enumerate(some):
                try:
                    images[i] = self.preprocessing.load(path)
                except Exception as error:  # damaged files make decoders fail in any way
                    records[i]["error"] = reason(error)
            if images:
                logits = self.run(np.stack(list(images.values())))
                for i, row in zip(images, logits, strict=True):
                    records[i]["predictions"] = self._best(row, top)
            yield from records

    def _best(self, logits: np.ndarray, top: int) -> list[dict[str, Any]]:
        scores = np.exp(logits.astype(np.float64) - logits.max())
        scores /= scores.sum()
        best = np.argsort(-scores, kind="stable")[:top]
        return [{"class": int(i), "name": self.class_names[i], "score": float(scores[i])} for i in best]


def guess_runtime(source: str) -> str:
    suffix = Path(source).suffix
    return next((runtime for runtime, ending in FORMATS.items() if ending == suffix), "torch")


def expand_images(inputs: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """Files as they are, the images of folders (and of the folders in them) and the matches of glob patterns, each
    group sorted. A folder or pattern without images is an error; a file that is missing is left to the reader."""
    found: list[Path] = []
    for item in inputs:
        path, given = Path(item), str(item)
        if path.is_dir():
            files = _pictures(path)
            require(bool(files), f"images: the folder {given} holds no images ({', '.join(PICTURES)})")
            found += files
        elif not path.exists() and glob.has_magic(given):
            matches = [Path(p) for p in sorted(glob.glob(given, recursive=True))]
            require(bool(matches), f"images: nothing matches {given}")
            files = [p for match in matches for p in (_pictures(match) if match.is_dir() else [match])]
            require(bool(files), f"images: the folders {given} hold no images ({', '.join(PICTURES)})")
            found += dict.fromkeys(files)  # a pattern with ** matches folders and the files in them
        else:
            found.append(path)
    require(bool(found), "images: expected at least one file, folder or pattern")
    return found


def _pictures(folder: Path) -> list[Path]:
    return [p for p in sorted(folder.rglob("*")) if p.suffix.lower() in PICTURES and p.is_file()]
