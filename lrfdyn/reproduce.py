"""The main job: one host, several attentions, the same recipe and seeds, and what the paper claims, measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from lrfdyn.analysis.analyze import NOTES as ANALYSIS_NOTES
from lrfdyn.analysis.analyze import SPREAD, summary_of
from lrfdyn.analysis.measure.model import machine, measure_model
from lrfdyn.analysis.report.page import RESULTS_FORMAT
from lrfdyn.attention import attention_label, attention_options
from lrfdyn.data.digits import load_digits
from lrfdyn.errors import LrfdynError, require
from lrfdyn.files import read_json, writable_folder, write_json
from lrfdyn.io.hub import model_config
from lrfdyn.io.weights import load_tensors, load_weights, save_weights
from lrfdyn.models.spikformer import Spikformer
from lrfdyn.training.engine import Recipe, fit
from lrfdyn.training.pool import run_jobs
from lrfdyn.version import __version__

NOTES = [
    "Digits are 8x8 images: the table shows that every attention trains and what it costs, not which one wins on "
    "natural images. Differences of less than a percent are within the spread of the seeds.",
    "Accuracy is that of the last epoch, never the best one.",
    *ANALYSIS_NOTES,
]
MEASURED_AT_ONCE = 64  # images


@dataclass(frozen=True)
class Settings:
    """Everything that decides the outcome."""

    attentions: tuple[str, ...] = ("vsa", "ssa", "causal_ssa", "lrf_ssa", "lrf_dyn")
    seeds: tuple[int, ...] = (0, 1)
    dim: int = 48
    depth: int = 2
    heads: int = 4
    mlp_ratio: float = 2
    time_steps: int = 4
    recipe: Recipe = field(default_factory=Recipe)

    def __post_init__(self) -> None:
        for name, values in (("attentions", self.attentions), ("seeds", self.seeds)):
            require(len(values) > 0, f"{name}: expected at least one")
            require(len(set(values)) == len(values), f"{name}: expected different ones, got {values}")
        require(min(self.seeds) >= 0, f"seeds: expected integers >= 0, got {self.seeds}")
        for kind in self.attentions:
            attention_options(kind)
        self.model(self.attentions[0])

    def model(self, attention: str) -> Spikformer:
        """The small host: no pooling, so that the 8x8 pixels are the 64 tokens."""
        return Spikformer(
            dim=self.dim,
            depth=self.depth,
            heads=self.heads,
            mlp_ratio=self.mlp_ratio,
            pooling=(False, False, False, False),
            image_size=8,
            in_channels=1,
            num_classes=10,
            time_steps=self.time_steps,
            attention=attention,
        )


def weights_path(out: Path, attention: str, seed: int) -> Path:
    return out / "weights" / f"{attention}-seed{seed}.safetensors"


def checkpoint_path(out: Path, attention: str, seed: int) -> Path:
    return out / "checkpoints" / f"{attention}-seed{seed}.safetensors"


def finished_curve(path: Path) -> list[dict[str, Any]]:
    """The learning curve in a weights file of ours."""
    _, meta = load_tensors(path)
    if "curve" not in meta:
        raise LrfdynError(f"weights: {path} was not written by this command")
    return meta["curve"]


def train_run(out: Path, settings: Settings, attention: str, seed: int, news: Callable[[dict[str, Any]], None]) -> None:
    """Trains one model, or goes on where an interrupted run stopped, and saves its weights and curve."""
    final = weights_path(out, attention, seed)
    checkpoint = checkpoint_path(out, attention, seed)
    try:
        if final.exists():
            for record in finished_curve(final):
                news(record)
            return
        torch.manual_seed(seed)
        model = settings.model(attention)
        curve = fit(model, load_digits(), settings.recipe, seed, checkpoint, news)
    except LrfdynError as error:
        if str(error).startswith("weights:"):
            raise LrfdynError(f"{error}; delete it or pass --restart") from None
        raise
    save_weights(final, model, {**model_config(model), "config": model.config, "seed": seed, "curve": curve})
    checkpoint.unlink()


def claim_folder(out: Path, settings: Settings, restart: bool) -> None:
    """Makes `out` ours: a folder that holds a run with other settings is refused unless `restart`. Only files that
    this command makes are ever removed."""
    images = len(load_digits().train_labels)
    require(settings.recipe.batch_size <= images, f"batch_size: expected at most the {images} training images")
    writable_folder(out, "out")
    path = out / "settings.json"
    # Attentions and seeds may grow from call to call: each of their runs stands for itself.
    wanted = {name: value for name, value in asdict(settings).items() if name not in ("attentions", "seeds")}
    runs = [(kind, seed) for kind in settings.attentions for seed in settings.seeds]
    files = [make(out, *run) for make in (weights_path, checkpoint_path) for run in runs]
    files += [out / "results.json", out / "report.html"]
    for file in files:  # what a killed process was writing
        for stale in file.parent.glob(f".{file.name}.*.tmp"):
            stale.unlink(missing_ok=True)
    if restart:
        for file in files:
            file.unlink(missing_ok=True)
    elif path.exists():
        found = read_json(path, "out")
        require(isinstance(found, dict), f"out: {path} is damaged; pass --restart or another folder")
        different = sorted(_leaves(wanted).items() ^ _leaves(found).items())
        if different:
            names = ", ".join(sorted({name for name, _ in different}))
            raise LrfdynError(f"out: {out} holds a run with other settings ({names}); pass --restart or another folder")
    write_json(path, wanted)


def reproduce(
    out: Path,
    settings: Settings,
    workers: int = 1,
    restart: bool = False,
    command: str = "lrfdyn reproduce",
    on_epoch: Callable[[str, int, dict[str, Any]], None] = lambda *_: None,
    on_measure: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Runs everything that is not done yet in `out` and returns the results, written there as `results.json`."""
    require(workers >= 1, f"workers: expected an integer >= 1, got {workers}")
    claim_folder(out, settings, restart)
    start = time.perf_counter()
    jobs = [(kind, seed) for kind in settings.attentions for seed in settings.seeds]
    arguments = [(out, settings, kind, seed) for kind, seed in jobs]
    for index, what, item in run_jobs(train_run, arguments, min(workers, len(jobs))):
        if what == "news":
            on_epoch(*jobs[index], item)

    runs = [run_record(out, kind, seed) for kind, seed in jobs]
    attentions = {}
    with one_thread():
        facts = machine()
        for kind in settings.attentions:
            on_measure(kind)
            attentions[kind] = attention_record(out, settings, kind, [r for r in runs if r["attention"] == kind])
    first = settings.model(settings.attentions[0])
    split = load_digits()
    results = {
        "format": RESULTS_FORMAT,
        "title": "Spikformer on digits",
        "command": command,
        "created": datetime.now().isoformat(timespec="seconds"),
        "version": __version__,
        "machine": facts,
        "data": {
            "name": "digits",
            "train": len(split.train_labels),
            "test": len(split.test_labels),
            "classes": 10,
            "image_size": 8,
            "note": "scikit-learn's handwritten digits: real 8x8 images, fixed split",
        },
        "model": {
            "name": "spikformer",
            "config": {k: v for k, v in first.config.items() if not k.startswith("attention")},
            "grid": list(first.grid),
            "time_steps": settings.time_steps,
        },
        "recipe": asdict(settings.recipe),
        "spread": SPREAD,
        "wall_seconds": time.perf_counter() - start,
        "train_seconds": sum(r["train_seconds"] for r in runs),
        "runs": runs,
        "attentions": attentions,
        "notes": NOTES,
    }
    write_json(out / "results.json", results)
    return results


@contextmanager
def one_thread() -> Iterator[None]:
    """As the trainings have: such small layers gain little from a second thread, and on a busy machine threads that
    wait for each other take ten times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run_record(out: Path, attention: str, seed: int) -> dict[str, Any]:
    path = weights_path(out, attention, seed)
    tensors, _ = load_tensors(path)
    curve = finished_curve(path)
    statistics_names = ("running_mean", "running_var", "num_batches_tracked")
    return {
        "attention": attention,
        "seed": seed,
        "parameters": sum(t.numel() for n, t in tensors.items() if not n.endswith(statistics_names)),
        "test_accuracy": curve[-1]["test_accuracy"],
        "train_seconds": sum(record["seconds"] for record in curve),
        "weights": str(path.relative_to(out)),
        "curve": curve,
    }


def attention_record(out: Path, settings: Settings, kind: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """What is measured on the trained model of the first seed, and the accuracies of all."""
    model = settings.model(kind)
    load_weights(weights_path(out, kind, settings.seeds[0]), model)
    return {
        "label": attention_label(kind),
        "kind": kind,
        "trained": True,
        "options": attention_options(kind),
        **summary_of([run["test_accuracy"] for run in runs]),
        **measure_model(model, load_digits().test_images.split(MEASURED_AT_ONCE)),
    }


def _leaves(value: dict[str, Any]) -> dict[str, str]:
    """A nested dictionary as one level of name -> text."""
    flat: dict[str, str] = {}
    for name, item in value.items():
        flat |= _leaves(item) if isinstance(item, dict) else {name: str(item)}
    return flat
