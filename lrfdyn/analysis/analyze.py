"""Several models on the same images: what the paper says of attention, measured and compared."""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import chain, count
from pathlib import Path
from typing import Any

from lrfdyn import sources as found
from lrfdyn.analysis.measure.images import RANDOM, Images
from lrfdyn.analysis.measure.model import machine, measure_model
from lrfdyn.analysis.measure.spikes import EnergyModel
from lrfdyn.analysis.report.write import RESULTS_FORMAT
from lrfdyn.attention import attention_label, attention_options
from lrfdyn.errors import LrfdynError, require
from lrfdyn.models import SpikingModel
from lrfdyn.models.registry import model_class
from lrfdyn.sources import Source
from lrfdyn.training.config import decisive
from lrfdyn.training.recipes import load_recipe
from lrfdyn.version import __version__

RANDOM_LABEL = " (random weights)"
SPREAD = "half of the range over the seeds"
NOTES = (
    "Attention weights of LRF-Dyn are those of its linear mixing, the same for every image; those of the "
    "other kinds depend on the image.",
    "Derived state is what one attention layer must hold for one image and one time step: spikes as bits, "
    "sums as 32-bit numbers. LRF-Dyn holds the spikes of the rows that its stencils reach and computes their "
    "potentials again; held as potentials, those rows would outweigh the k d numbers of its dendrites by far. Membrane "
    "potentials between time steps are the same for all kinds and not counted.",
    "Measured peak memory is that of one evaluation pass at batch 1, all layers and time steps, of the "
    "implementation that also trains, which keeps whole feature maps: neither streaming nor low-memory inference.",
)
NOTE_FEW = "of this analysis: the files say nothing of the whole test set."
NOTE_RANDOM = (
    "Their firing, energy, locality and receptive fields say nothing about a trained model; parameters and memory do "
    "not depend on it."
)

Progress = Callable[[str, str, int], None]


def find_sources(text: str, images: Images) -> list[Source]:
    """All models that `text` stands for (see `lrfdyn.sources`). One that is named is made for the images."""

    def fit(source: Source) -> Source:
        takes = {} if source.trained else model_class(source.origin.partition(":")[0]).options()
        facts = {key: value for key, value in images.facts.items() if key in takes}
        return replace(source, options={**source.options, **facts})

    return [fit(source) for source in found.find_sources(text)]


def analyze(
    sources: Sequence[Source],
    images: Images,
    energy: EnergyModel | None = None,
    *,
    command: str = "lrfdyn analyze",
    title: str | None = None,
    notes: Sequence[str] = (),
    progress: Progress = lambda *_: None,
) -> dict[str, Any]:
    """Measure every model of `sources` on `images` and return the results that the report, the figures and the tables
    are made from (see `write_all`).

    Runs that differ in nothing but their seed are one entry of `results["attentions"]`: their accuracies are joined,
    everything else is measured on the first of them. `results["runs"]` has every run with its learning curve.

    `energy` has the costs of operations, `command`, `title` and `notes` are shown in the report (a title is made from
    the models and the images without one), and `progress(model, what, images)` is called while images are measured.

        images = load_images("digits", None, 64, 16, torch.device("cpu"))
        results = analyze(find_sources("demo", images), images)
        write_all(results, Path("analysis"), ("png",))
    """
    require(len(sources) > 0, "model: expected at least one")
    start = time.perf_counter()
    entries: dict[str, dict[str, Any]] = {}
    keys: dict[str, str] = {}  # what a model is, as text: the key of its entry
    runs: list[dict[str, Any]] = []
    few: list[dict[str, Any]] = []  # entries with an accuracy that their training says nothing of
    about: dict[str, Any] = {}  # the model that all attentions share
    recipes = list(map(_training_settings, sources))
    for source, recipe in zip(sources, recipes, strict=True):
        model, accuracy = source.load(), source.accuracy
        about = about or {
            "config": {k: v for k, v in model.config.items() if not k.startswith("attention")},
            "grid": list(getattr(model, "grid", [])) or None,
            "time_steps": model.time_steps,
        }
        name = model_name(model)
        identity = json.dumps([name, model.config, source.trained, recipe], sort_keys=True, default=str)
        key = keys.get(identity)
        if key is None or source.seed is None or any((r["attention"], r["seed"]) == (key, source.seed) for r in runs):
            stem = model.config.get("attention") or name
            key = next(k for k in chain([stem], (f"{stem}-{i}" for i in count(2))) if k not in entries)
            keys.setdefault(identity, key)
            entries[key] = _entry(model, source, images, energy, progress)
            if accuracy is None and entries[key]["accuracy_on_images"] is not None:
                accuracy = entries[key]["accuracy_on_images"]
                few.append(entries[key])
        runs.append(
            {
                "attention": key,
                "seed": source.seed,
                "parameters": entries[key]["parameters"],
                "test_accuracy": accuracy,
                "train_seconds": source.train_seconds,
                "weights": source.origin,
                "curve": source.curve,
            }
        )
    for key, entry in entries.items():
        entry |= _summary(run["test_accuracy"] for run in runs if run["attention"] == key)
    _tell_apart(list(entries.values()))
    names = list(dict.fromkeys(entry["model"] for entry in entries.values()))
    what, noun = ("noise", "image") if images.name == RANDOM else (images.name, "test image")
    epochs = max(len(run["curve"]) for run in runs)
    trained = f", {_plural(len(runs), 'run')} of training for {_plural(epochs, 'epoch')}" if epochs else ""
    times = [run["train_seconds"] for run in runs if run["train_seconds"] is not None]
    untrained = "; ".join(e["label"].replace(RANDOM_LABEL, "") for e in entries.values() if not e["trained"])
    of_few, shown = "; ".join(entry["label"] for entry in few), _plural(images.count, "image")
    return {
        "format": RESULTS_FORMAT,
        "title": title or f"{', '.join(names)} on {what}",
        "lead": f"{_plural(len(entries), 'model')}{trained}, analysed on {_plural(images.count, noun)} of {what}.",
        "command": command,
        "created": datetime.now().isoformat(timespec="seconds"),
        "version": __version__,
        "machine": machine(images.device),
        "data": {"name": what, "train": images.train, "test": images.count, "classes": images.facts.get("num_classes")},
        "model": {"name": names[0] if len(names) == 1 else None, **about},
        "recipe": {k: v for k, v in recipes[0].items() if v is not None and all(r.get(k) == v for r in recipes)},
        "spread": SPREAD,
        "wall_seconds": time.perf_counter() - start,
        "train_seconds": sum(times) if times else None,
        "runs": runs,
        "attentions": entries,
        "notes": [
            *notes,
            *([f"Random weights, not trained: {untrained}. {NOTE_RANDOM}"] if untrained else []),
            *([f"Accuracy of {of_few} is that on the {shown} {NOTE_FEW}"] if few else []),
            *dict.fromkeys(note for entry in entries.values() for note in entry["notes"]),
            *NOTES,
        ],
    }


def _training_settings(source: Source) -> dict[str, Any]:
    """What of the recipe of a run decides its result, the seed apart, by `section.key`: equal for runs that trained
    alike. Nothing where the recipe is unknown or cannot be read."""
    try:
        return {} if source.recipe is None else decisive(load_recipe(source.recipe).as_dict()) | {"run.seed": None}
    except LrfdynError:
        return {}


def _entry(
    model: SpikingModel, source: Source, images: Images, energy: EnergyModel | None, progress: Progress
) -> dict[str, Any]:
    """Everything about one model but its accuracies over the seeds."""
    model = model.to(images.device)
    label, options = model_label(model)
    measured = measure_model(model, images.of(model), energy, lambda what, n: progress(source.origin, what, n))
    return {
        "label": label + RANDOM_LABEL * (not source.trained),
        "kind": model.config.get("attention"),
        "model": model_name(model),
        "origin": source.origin,
        "trained": source.trained,
        "options": options,
        "time_steps": model.time_steps,
        "accuracy_on_images": images.accuracy(model) if source.trained else None,
        **_summary([]),
        **measured,
    }


def model_name(model: SpikingModel) -> str:
    """Return the name of the registry, or that of the class where the model has none."""
    return model.name or type(model).__name__


def model_label(model: SpikingModel) -> tuple[str, dict[str, Any]]:
    """Return a short label of the attention of `model`, with those of its options that are not the default, and all of
    its options. A model without attention is labelled with its name."""

    def text(value: Any) -> str:
        return f"({', '.join(map(str, value))})" if isinstance(value, (list, tuple)) else str(value)

    kind = model.config.get("attention")
    if kind is None:
        return model_name(model), {}
    defaults = attention_options(kind)
    options = {**defaults, **(model.config.get("attention_options") or {})}
    changed = [f"{key} {text(value)}" for key, value in options.items() if text(value) != text(defaults[key])]
    return ", ".join([attention_label(kind), *changed]), options


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _summary(accuracies: Iterable[float | None]) -> dict[str, Any]:
    """Mean and spread of the known accuracies of several seeds, None where there are none."""
    known = [accuracy for accuracy in accuracies if accuracy is not None]
    return {
        "accuracy_mean": statistics.mean(known) if known else None,
        "accuracy_spread": (max(known) - min(known)) / 2 if known else None,
        "accuracy_values": known,
    }


def _tell_apart(entries: Sequence[dict[str, Any]]) -> None:
    """Puts the model into the labels where the models differ, and where a model is from where labels are equal."""
    if len({entry["model"] for entry in entries}) > 1:
        for entry in entries:
            entry["label"] = f"{entry['model']}, {entry['label']}" if entry["kind"] else entry["label"]
    labels = Counter(entry["label"] for entry in entries)
    for entry in entries:
        if labels[entry["label"]] > 1:
            entry["label"] += f", {Path(entry['origin']).name}"
