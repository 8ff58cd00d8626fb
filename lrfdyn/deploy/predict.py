"""Class names and scores of image files and of recordings, from a model in PyTorch or from an exported file."""

from __future__ import annotations

import glob
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
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
from lrfdyn.data.recordings import READERS, Events, Framing, decoded
from lrfdyn.deploy.c.native import NativeModel
from lrfdyn.deploy.early_exit import EarlyExit
from lrfdyn.deploy.export.formats import ExecutorchRunner, OnnxRunner
from lrfdyn.deploy.export.nir_file import NirRunner
from lrfdyn.deploy.export.write import Runner, model_facts, recording_facts
from lrfdyn.deploy.follow import Step, follow
from lrfdyn.deploy.time_stream import TimeStream
from lrfdyn.devices import choose_device
from lrfdyn.errors import LrfdynError, require, require_integer, unknown_name
from lrfdyn.files import expanded
from lrfdyn.io.hub import class_names_of
from lrfdyn.sources import EXPORTED, Source, find_source

RUNTIMES = ("torch", *EXPORTED)
THREADED = ("onnx", "native")  # runtimes that can be told how many threads to take
PICTURES = (*ENDINGS, ".gif", ".tif", ".tiff")  # of the files in a folder; files that are named may end in anything


class TorchRunner:
    """Images `[B, C, H, W]` or films `[B, T, C, H, W]` to logits `[B, classes]` in PyTorch, with norms folded.

    With `exit` each image stops at the time step at which the model is surer than that, and `taken` says at which,
    `[B]`. A model that takes recordings has a `stream`, where it can run frame by frame.
    """

    taken: np.ndarray | None = None
    stream: TimeStream | None = None
    early: EarlyExit | None = None

    def __init__(self, source: Source, device: str | None, exit: float | None = None) -> None:
        self.device = choose_device(device)
        require(source.trained, f"model: {source.origin} names a model without weights; expected a trained one")
        model = source.load().float()
        classifies = model.pipeline_tag == "image-classification"
        require(classifies, f"task: {source.origin} is a segmentation model; pass --task segmentation")
        self.facts = model_facts(model, source.origin)
        self.model = fold_batch_norm(model).to(self.device)
        if model.framing is not None:
            self.facts |= recording_facts(model)
            # What looks at all time steps of a recording at once still has logits of all of them.
            with nullcontext() if exit is not None else suppress(LrfdynError):
                self.stream = TimeStream(self.model)
        elif exit is not None:
            self.early = EarlyExit(self.model, exit)

    @torch.inference_mode()
    def __call__(self, images: np.ndarray) -> np.ndarray:
        shown = torch.from_numpy(images).to(self.device)
        if self.early is None:
            return self.model(shown.transpose(0, 1) if shown.dim() == 5 else shown).cpu().numpy()
        logits, steps = self.early(shown)
        self.taken = steps.cpu().numpy()
        return logits.cpu().numpy()

    def follow(self, frames: torch.Tensor, ends: np.ndarray, threshold: float | None) -> Iterator[Step]:
        assert self.stream is not None
        return follow(self.stream, frames.to(self.device), ends, threshold)


def run_integers(run: Runner, preprocessing: Preprocessing, scale: float, images: np.ndarray) -> np.ndarray:
    """Logits of images `[B, C, H, W]`, from a model in integers that takes levels."""
    return run(preprocessing.levels(images)) * float(scale)


@dataclass(frozen=True)
class Predictor:
    """A model that takes files: images or, where it has a `framing`, recordings of an event camera. `run` gives logits,
    `facts` are what the model says about itself."""

    runtime: str
    facts: dict[str, Any]
    preprocessing: Preprocessing | None  # of images
    class_names: tuple[str, ...]
    run: Runner
    framing: Framing | None = None  # of recordings
    exit: float | None = None

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
        require(exit is None or 0 <= exit <= 1, f"exit: expected a number from 0 to 1, got {exit}")
        source = find_source(model)
        wanted = runtime or (source.kind if source.kind in EXPORTED else "torch")
        require(not threads or wanted in THREADED, f"threads: only in {' and '.join(THREADED)}, got {wanted}")
        runner: Any
        if wanted == "torch":
            runner = TorchRunner(source, device, exit)
        else:
            whole = "" if wanted == "nir" else ", which computes all time steps of a layer at once"
            require(exit is None, f"exit: only in torch, got {wanted}{whole}")
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
        count: Any = facts.get("num_classes")
        require(isinstance(count, int) and count >= 1, f"model: the description of {model} says no num_classes")
        names = class_names_of(facts, count, f"model: {model}") or tuple(f"class {i}" for i in range(count))
        integer, scale = facts.get("integer") or wanted == "native", facts.get("scale")
        scaled = isinstance(scale, int | float) and 0 < scale < math.inf
        require(scaled or not integer, f"model: the description of {model} says no scale of its integers")
        framing = framing_of(facts, model)
        if framing is not None:
            return cls(wanted, facts, None, names, runner, framing, exit)
        preprocessing = Preprocessing.from_dict(facts.get("preprocessing"), f"model: {model}")
        run: Runner = partial(run_integers, runner, preprocessing, scale) if integer else runner
        return cls(wanted, facts, preprocessing, names, run)

    @property
    def kind(self) -> str:
        """What its files are: "image" or "recording"."""
        return "image" if self.framing is None else "recording"

    @property
    def follows(self) -> bool:
        """Whether it goes through a recording frame by frame."""
        return getattr(self.run, "stream", None) is not None

    @checked
    def predict(
        self, paths: Sequence[Path], top: int = 5, batch: int = 16, watch: Callable[[Step], object] | None = None
    ) -> Iterator[dict[str, Any]]:
        """A record for every file, in order: its name as `image` or `recording` and its `predictions`, best first, or
        the `error` that kept it from being read.

        Of an image with which the model stops when it is sure, `steps` says how many time steps it took. A recording
        that is followed frame by frame, as PyTorch does, has a list of `steps`: `step`, from 1 on, `time_ms`, when its
        frame ends, since the first event, and the `predictions` until then. `watch` is called at every one of them, as
        soon as it is there, with its number, time, frame and logits (`lrfdyn.deploy.follow.Step`).
        """
        require_integer("top", top, 1)
        require_integer("batch", batch, 1)
        require(len(paths) > 0, f"{self.kind}s: expected at least one file")
        if self.follows:
            for path in paths:
                yield {"recording": str(path), **self._followed(path, top, watch)}
            return
        if self.framing is None:
            require_pillow()
        size = min(batch, self.facts.get("most_images") or batch)
        for start in range(0, len(paths), size):
            some = paths[start : start + size]
            records: list[dict[str, Any]] = [{self.kind: str(path)} for path in some]
            images = []
            for record, path in zip(records, some, strict=True):
                try:
                    images.append(self.load(path))
                except Exception as error:  # damaged files make decoders fail in any way
                    record["error"] = reason(error)
            shape = (len(images), len(self.class_names))
            logits = self.run(np.stack(images)) if images else np.empty(shape)
            found = f"gives {list(logits.shape)} for {shape[0]} {self.kind}s"
            require(logits.shape == shape, f"model: its description says {shape[1]} classes, and it {found}")
            require(bool(np.isfinite(logits).all()), f"model: its logits of {some[0]} or those after it are not finite")
            read = [record for record in records if "error" not in record]
            taken = getattr(self.run, "taken", None)  # of a runner that may stop early
            for record, row, steps in zip(read, logits, [None] * len(read) if taken is None else taken, strict=True):
                named = self.best(row, top)
                record |= {"predictions": named} if steps is None else {"steps": int(steps), "predictions": named}
            yield from records

    def _followed(self, path: Path, top: int, watch: Callable[[Step], object] | None) -> dict[str, Any]:
        """What a recording's record holds beside its name."""
        assert self.framing is not None
        try:
            events = recorded(path)
            frames, ends = self.framing.frames(events), self.framing.ends(events)
        except Exception as error:  # damaged files make decoders fail in any way
            return {"error": reason(error)}
        steps: list[dict[str, Any]] = []
        runner: Any = self.run
        for step in runner.follow(frames, ends, self.exit):
            require(bool(step.logits.isfinite().all()), f"model: its logits of {path} are not finite")
            if watch is not None:
                watch(step)
            named = self.best(step.logits.cpu().numpy(), top)
            steps.append({"step": step.number, "time_ms": step.time_ms, "predictions": named})
        return {"steps": steps, "predictions": steps[-1]["predictions"]}

    def load(self, path: Path) -> np.ndarray:
        """What the model takes of a file, float32: an image `[C, size, size]`, or the frames of a recording,
        `[T, 2, size, size]`. Whatever is wrong with it raises."""
        if self.framing is not None:
            return self.framing.frames(recorded(path)).numpy()
        assert self.preprocessing is not None
        try:
            return self.preprocessing.load(path)
        except Exception:
            other = path.suffix.lower() in READERS and path.is_file()
            require(not other, "expected a picture; the model takes no recordings of an event camera")
            raise

    def best(self, logits: np.ndarray, top: int) -> list[dict[str, Any]]:
        """The `top` classes of logits `[classes]` with their names and scores, best first."""
        scores = np.exp(logits.astype(np.float64) - logits.max())
        scores /= scores.sum()
        best = np.argsort(-scores, kind="stable")[:top]
        return [{"class": int(i), "name": self.class_names[i], "score": float(scores[i])} for i in best]


def framing_of(facts: Mapping[str, Any], model: str) -> Framing | None:
    """How recordings become the frames that a model takes; None where it takes images."""
    films, integer = facts.get("frames"), facts.get("integer")
    if facts.get("framing") is None:
        require(films is None, f"model: {model} takes films of {films} frames, and does not say how they are made")
        return None
    framing = Framing.from_dict(facts["framing"], f"model: {model}")
    together = films in (None, framing.steps) and not integer
    require(together, f"model: the description of {model} has {films} frames, but framing of {framing.steps} steps")
    return framing


def recorded(path: Path) -> Events:
    """The events of a recording. Whatever is wrong with it raises."""
    known = path.suffix.lower() in READERS
    require(known, f"expected a recording of an event camera, which ends in {', '.join(READERS)}")
    return decoded(path)


@checked
def expand_images(inputs: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """`expand_files` with the endings of pictures."""
    return expand_files(inputs, PICTURES, "images")


@checked
def expand_files(inputs: Sequence[str | os.PathLike[str]], endings: Sequence[str], what: str) -> list[Path]:
    """Files as they are, those in folders (and in the folders in them) that have one of the `endings`, and the matches
    of glob patterns, each group sorted. A folder or pattern without any is an error, which calls them `what`; a file
    that is missing is left to the reader."""
    found: list[Path] = []
    for item in inputs:
        path, given, files = expanded(item, what), str(item), []
        matches = [path]
        if not path.exists() and glob.has_magic(given):
            matches = [Path(p) for p in sorted(glob.glob(os.path.expanduser(given), recursive=True))]
            require(bool(matches), f"{what}: nothing matches {given}")
        for match in matches:
            inner = [p for p in sorted(match.rglob("*")) if p.suffix.lower() in endings and p.is_file()]
            files += inner if match.is_dir() else [match]
        require(bool(files), f"{what}: {given} holds no {what} ({', '.join(endings)})")
        found += dict.fromkeys(files)  # a pattern with ** matches folders and the files in them
    require(bool(found), f"{what}: expected at least one file, folder or pattern")
    return found
