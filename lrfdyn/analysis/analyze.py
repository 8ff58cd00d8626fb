"""Several models on the same images: what the paper says of attention, measured and compared."""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import datetime
from itertools import chain, count
from pathlib import Path
from typing import Any

from lrfdyn.analysis.measure.energy import EnergyModel
from lrfdyn.analysis.measure.images import RANDOM, Images
from lrfdyn.analysis.measure.model import machine, measure_model
from lrfdyn.analysis.report.page import RESULTS_FORMAT
from lrfdyn.analysis.sources import Source, training_settings
from lrfdyn.attention import attention_label, attention_options
from lrfdyn.errors import require
from lrfdyn.models import SpikingModel
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
NOTES_RANDOM = (
    "Their firing, energy, locality and receptive fields say nothing about a trained model; parameters and memory do "
    "not depend on it."
)

Progress = Callable[[str, str, int], None]


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
    on_images_only: set[str] = set()  # entries with an accuracy that their training says nothing of
    about: dict[str, Any] = {}
    for source in sources:
        model = source.load()
        about = about or _about(model)
        identity = json.dumps(
            [model_name(model), model.config, source.trained, training_settings(source)], sort_keys=True, default=str
        )
        key, accuracy = keys.get(identity), source.accuracy
        if key is None or source.seed is None or any((r["attention"], r["seed"]) == (key, source.seed) for r in runs):
            key = _unused(model.config.get("attention") or model_name(model), entries)
            keys.setdefault(identity, key)
            entries[key] = _entry(model, source, images, energy, progress)
            if accuracy is None and entries[key]["accuracy_on_images"] is not None:
                accuracy = entries[key]["accuracy_on_images"]
                on_images_only.add(key)
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
        found = [run["test_accuracy"] for run in runs if run["attention"] == key]
        entry |= summary_of([accuracy for accuracy in found if accuracy is not None])
    _tell_apart(list(entries.values()))
    names = list(dict.fromkeys(entry["model"] for entry in entries.values()))
    what = "noise" if images.name == RANDOM else images.name
    epochs = max(len(run["curve"]) for run in runs)
    trained = f", {_plural(len(runs), 'run')} of training for {_plural(epochs, 'epoch')}" if epochs else ""
    noun = "image" if what == "noise" else "test image"
    times = [run["train_seconds"] for run in runs if run["train_seconds"] is not None]
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
        "recipe": _common_recipe(sources),
        "spread": SPREAD,
        "wall_seconds": time.perf_counter() - start,
        "train_seconds": sum(times) if times else None,
        "runs": runs,
        "attentions": entries,
        "notes": [*notes, *_notes(entries, on_images_only, images), *NOTES],
    }


def _about(model: SpikingModel) -> dict[str, Any]:
    """What the report says of the model that all attentions share."""
    return {
        "config": {k: v for k, v in model.config.items() if not k.startswith("attention")},
        "grid": list(getattr(model, "grid", [])) or None,
        "time_steps": model.time_steps,
    }


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
        **summary_of([]),
        **measured,
    }


def model_name(model: SpikingModel) -> str:
    """Return the name of the registry, or that of the class where the model has none."""
    return model.name or type(model).__name__


def model_label(model: SpikingModel) -> tuple[str, dict[str, Any]]:
    """Return a short label of the attention of `model`, with those of its options that are not the default, and all of
    its options. A model without attention is labelled with its name."""
    kind = model.config.get("attention")
    if kind is None:
        return model_name(model), {}
    defaults = attention_options(kind)
    options = {**defaults, **(model.config.get("attention_options") or {})}
    changed = [f"{key} {_text(value)}" for key, value in options.items() if _text(value) != _text(defaults[key])]
    return ", ".join([attention_label(kind), *changed]), options


def _text(value: Any) -> str:
    return f"({', '.join(map(str, value))})" if isinstance(value, (list, tuple)) else str(value)


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _unused(key: str, taken: Collection[str]) -> str:
    names = chain([key], (f"{key}-{number}" for number in count(2)))
    return next(name for name in names if name not in taken)


def summary_of(accuracies: Sequence[float]) -> dict[str, Any]:
    """Return mean and spread of the accuracies of several seeds, None where there are none."""
    return {
        "accuracy_mean": statistics.mean(accuracies) if accuracies else None,
        "accuracy_spread": (max(accuracies) - min(accuracies)) / 2 if accuracies else None,
        "accuracy_values": list(accuracies),
    }


def _tell_apart(entries: Sequence[dict[str, Any]]) -> None:
    """Puts the model into the labels where the models differ, and where a model is from where labels are equal."""
    if len({entry["model"] for entry in entries}) > 1:
        for entry in entries:
            if entry["kind"]:
                entry["label"] = f"{entry['model']}, {entry['label']}"
    labels = Counter(entry["label"] for entry in entries)
    for entry in entries:
        if labels[entry["label"]] > 1:
            entry["label"] += f", {Path(entry['origin']).name}"


def _common_recipe(sources: Sequence[Source]) -> dict[str, Any]:
    """The settings of training that all runs share; none where one of them says nothing of its recipe."""
    first, *others = map(training_settings, sources)
    return {
        key: value for key, value in first.items() if value is not None and all(o.get(key) == value for o in others)
    }


def _notes(entries: dict[str, dict[str, Any]], on_images_only: Collection[str], images: Images) -> Iterator[str]:
    """Lines about these models: random weights, accuracies on few images, and what an attention does not say."""
    untrained = [entry["label"].replace(RANDOM_LABEL, "") for entry in entries.values() if not entry["trained"]]
    if untrained:
        yield f"Random weights, not trained: {'; '.join(untrained)}. {NOTES_RANDOM}"
    if on_images_only:
        few = "; ".join(entry["label"] for key, entry in entries.items() if key in on_images_only)
        yield (
            f"Accuracy of {few} is that on the {_plural(images.count, 'image')} of this analysis: the files say "
            "nothing of the whole test set."
        )
    yield from dict.fromkeys(note for entry in entries.values() for note in entry["notes"])
