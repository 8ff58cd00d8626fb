"""Class names and scores of image files, from a model in PyTorch or from an exported file."""

from __future__ import annotations

import glob
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lrfdyn.checks import checked
from lrfdyn.convert.fold import fold_batch_norm
from lrfdyn.data.decode import ENDINGS
from lrfdyn.data.preprocess import Preprocessing, reason, require_pillow
from lrfdyn.deploy.c.native import NativeModel
from lrfdyn.deploy.early_exit import EarlyExit
from lrfdyn.deploy.export.formats import ExecutorchRunner, OnnxRunner
from lrfdyn.deploy.export.nir_file import NirRunner
from lrfdyn.deploy.export.write import Runner, model_facts
from lrfdyn.devices import choose_device
from lrfdyn.errors import require, require_integer, unknown_name
from lrfdyn.files import expanded
from lrfdyn.io.hub import class_names_of
from lrfdyn.sources import EXPORTED, Source, find_source

RUNTIMES = ("torch", *EXPORTED)
THREADED = ("onnx", "native")  # runtimes that can be told how many threads to take
PICTURES = (*ENDINGS, ".gif", ".tif", ".tiff")  # of the files in a folder; files that are named may end in anything


class TorchRunner:
    """Images `[B, C, H, W]` to logits `[B, classes]` in PyTorch, with norms folded. With `exit` each of them stops at
    the time step at which the model is surer than that, and `steps` says at which, `[B]`."""

    steps: np.ndarray | None = None

    def __init__(self, source: Source, device: str | None, exit: float | None = None) -> None:
        self.device = choose_device(device)
        require(source.trained, f"model: {source.origin} names a model without weights; expected a trained one")
        model = source.load().float()
        classifies = model.pipeline_tag == "image-classification"
        require(classifies, f"task: {source.origin} is a segmentation model; pass --task segmentation")
        self.facts = model_facts(model, source.origin)
        self.model = fold_batch_norm(model).to(self.device)
        self.early = None if exit is None else EarlyExit(self.model, exit)

    @torch.inference_mode()
    def __call__(self, images: np.ndarray) -> np.ndarray:
        shown = torch.from_numpy(images).to(self.device)
        if self.early is None:
            return self.model(shown).cpu().numpy()
        logits, steps = self.early(shown)
        self.steps = steps.cpu().numpy()
        return logits.cpu().numpy()


def run_integers(run: Runner, preprocessing: Preprocessing, scale: float, images: np.ndarray) -> np.ndarray:
    """Logits of images `[B, C, H, W]`, from a model in integers that takes levels."""
    return run(preprocessing.levels(images)) * float(scale)


@dataclass(frozen=True)
class Predictor:
    """A model that takes files: `run` gives logits, `facts` are what the model says about itself."""

    runtime: str
    facts: dict[str, Any]
    preprocessing: Preprocessing
    class_names: tuple[str, ...]
    run: Runner

    @classmethod
    @checked
    def open(
        cls,
        model: str,
        runtime: str | None = None,
        device: str | None = None,
        threads: int = 0,
        exit: float | None = None,
    ) -> Predictor:
        """Opens the trained model or exported file that a path or name stands for (see `lrfdyn.sources`).

        `runtime` is "torch", "onnx", "executorch", "nir" or "native" (a folder of C, which is compiled when it is first
        opened); without it the ending of the file says what runs it. `device` is PyTorch's, `threads` those of ONNX
        Runtime (0: as many as there are) and of the C (0: one). `exit` is a confidence at which PyTorch stops (see
        `EarlyExit`).

            for record in Predictor.open("runs/cifar100").predict([Path("cat.png")], top=3):
                print(record["predictions"])
        """
        if runtime not in (None, *RUNTIMES):
            raise unknown_name("runtime", runtime, RUNTIMES)
        require_integer("threads", threads, 0)
        source = find_source(model)
        wanted = runtime or (source.kind if source.kind in EXPORTED else "torch")
        require(not threads or wanted in THREADED, f"threads: only in {' and '.join(THREADED)}, got {wanted}")
        runner: Any
        if wanted == "torch":
            runner = TorchRunner(source, device, exit)
        else:
            whole = f"exit: only in torch, got {wanted}, which computes all time steps of a layer at once"
            require(exit is None, whole)
            ending = EXPORTED[wanted]
            made_by = f"lrfdyn export MODEL --format {wanted} --out FILE{ending} makes one"
            require(source.kind == wanted, f"runtime: {wanted} runs {ending} files, got {model}; {made_by}")
            require(device is None, f"device: only for the torch runtime, got {device!r} with {wanted}")
            if wanted == "onnx":
                runner = OnnxRunner(source.path, threads)
            elif wanted == "native":
                runner = NativeModel(source.path, threads=threads or 1)
            else:
                runner = {"executorch": ExecutorchRunner, "nir": NirRunner}[wanted](source.path)
        facts = runner.facts
        films = f"model: {model} takes films of {facts.get('frames')} frames, and no image files"
        require(facts.get("frames") is None, films)
        count: Any = facts.get("num_classes")
        require(isinstance(count, int) and count >= 1, f"model: the description of {model} says no num_classes")
        names = class_names_of(facts, count, f"model: {model}") or tuple(f"class {i}" for i in range(count))
        integer, scale = facts.get("integer") or wanted == "native", facts.get("scale")
        scaled = isinstance(scale, int | float) and 0 < scale < math.inf
        require(scaled or not integer, f"model: the description of {model} says no scale of its integers")
        preprocessing = Preprocessing.from_dict(facts.get("preprocessing"), f"model: {model}")
        run: Runner = partial(run_integers, runner, preprocessing, scale) if integer else runner
        return cls(wanted, facts, preprocessing, names, run)

    @checked
    def predict(self, paths: Sequence[Path], top: int = 5, batch: int = 16) -> Iterator[dict[str, Any]]:
        """A record for every image, in order: its `predictions`, best first, where the model stops when it is sure also
        how many time `steps` it took, or the `error` that kept the image from being read."""
        require_integer("top", top, 1)
        require_integer("batch", batch, 1)
        require(len(paths) > 0, "images: expected at least one file")
        require_pillow()
        size = min(batch, self.facts.get("most_images") or batch)
        for start in range(0, len(paths), size):
            some = paths[start : start + size]
            records: list[dict[str, Any]] = [{"image": str(path)} for path in some]
            images = []
            for record, path in zip(records, some, strict=True):
                try:
                    images.append(self.preprocessing.load(path))
                except Exception as error:  # damaged files make decoders fail in any way
                    record["error"] = reason(error)
            shape = (len(images), len(self.class_names))
            logits = self.run(np.stack(images)) if images else np.empty(shape)
            found = f"gives {list(logits.shape)} for {shape[0]} images"
            require(logits.shape == shape, f"model: its description says {shape[1]} classes, and it {found}")
            require(bool(np.isfinite(logits).all()), f"model: its logits of {some[0]} or those after it are not finite")
            read = [record for record in records if "error" not in record]
            steps = getattr(self.run, "steps", None)  # of a runner that may stop early
            for record, row, taken in zip(read, logits, [None] * len(read) if steps is None else steps, strict=True):
                scores = np.exp(row.astype(np.float64) - row.max())
                scores /= scores.sum()
                best = np.argsort(-scores, kind="stable")[:top]
                named = [{"class": int(i), "name": self.class_names[i], "score": float(scores[i])} for i in best]
                record |= {"predictions": named} if taken is None else {"steps": int(taken), "predictions": named}
            yield from records


@checked
def expand_images(inputs: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """Files as they are, the images of folders (and of the folders in them) and the matches of glob patterns, each
    group sorted. A folder or pattern without images is an error; a file that is missing is left to the reader."""
    found: list[Path] = []
    for item in inputs:
        path, given, files = expanded(item, "images"), str(item), []
        matches = [path]
        if not path.exists() and glob.has_magic(given):
            matches = [Path(p) for p in sorted(glob.glob(os.path.expanduser(given), recursive=True))]
            require(bool(matches), f"images: nothing matches {given}")
        for match in matches:
            inner = [p for p in sorted(match.rglob("*")) if p.suffix.lower() in PICTURES and p.is_file()]
            files += inner if match.is_dir() else [match]
        require(bool(files), f"images: {given} holds no images ({', '.join(PICTURES)})")
        found += dict.fromkeys(files)  # a pattern with ** matches folders and the files in them
    require(bool(found), "images: expected at least one file, folder or pattern")
    return found
