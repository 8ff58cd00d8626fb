"""Several models on the same images: what the paper says of attention, measured and compared."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from lrfdyn.analysis.measure.energy import EnergyModel
from lrfdyn.analysis.measure.images import RANDOM, Images
from lrfdyn.analysis.measure.model import machine, measure
from lrfdyn.analysis.report.page import RESULTS_FORMAT
from lrfdyn.analysis.sources import Source, describe, training_settings
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


@dataclass
class Group:
    """Runs of one and the same model; what is measured is measured on the first."""

    key: str
    model: SpikingModel
    name: str
    origin: str
    trained: bool
    measured: dict[str, Any] = field(default_factory=dict)
    accuracy_on_images: float | None = None
    on_images_only: bool = False  # no accuracy of its training is known
    seeds: list[int | None] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)


def analyze(
    sources: Sequence[Source],
    images: Images,
    energy: EnergyModel | None = None,
    *,
    command: str = "lrfdyn analyze",
    progress: Callable[[str, str, int], None] = lambda *_: None,
) -> dict[str, Any]:
    """The results of all models, which the report, the figures and the tables are made from. Runs that differ in
    nothing but their seed are one entry, measured on the first. `progress(model, what, images)` hears of the work."""
    require(len(sources) > 0, "model: expected at least one")
    start = time.perf_counter()
    groups: dict[str, Group] = {}
    runs: list[dict[str, Any]] = []
    for source in sources:
        model = source.load()
        name = model.name or type(model).__name__
        identity = json.dumps(
            [name, model.config, source.trained, training_settings(source)], sort_keys=True, default=str
        )
        group = groups.get(identity)
        if group is None or source.seed is None or source.seed in group.seeds:
            key = _unused(model.config.get("attention") or name, {g.key for g in groups.values()})
            group = Group(key, model, name, source.origin, source.trained)
            groups[identity if identity not in groups else f"{identity} {key}"] = group
            _measure_group(group, images, energy, progress)
        first = not group.seeds
        group.seeds.append(source.seed)
        # Only the first of a group saw the images.
        accuracy = group.accuracy_on_images if first and source.accuracy is None else source.accuracy
        group.on_images_only |= source.accuracy is None and accuracy is not None
        if accuracy is not None:
            group.accuracies.append(accuracy)
        runs.append(
            {
                "attention": group.key,
                "seed": source.seed,
                "parameters": group.measured["parameters"],
                "test_accuracy": accuracy,
                "train_seconds": source.train_seconds,
                "weights": source.origin,
                "curve": source.curve,
            }
        )
    return _results(list(groups.values()), runs, images, command, time.perf_counter() - start)


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _unused(key: str, taken: set[str]) -> str:
    number = 2
    wanted = key
    while key in taken:
        key, number = f"{wanted}-{number}", number + 1
    return key


def _measure_group(
    group: Group, images: Images, energy: EnergyModel | None, progress: Callable[[str, str, int], None]
) -> None:
    model = group.model.to(images.device)
    group.measured = measure(model, images.of(model), energy, lambda what, n: progress(group.origin, what, n))
    if group.trained:
        group.accuracy_on_images = images.accuracy(model)
    group.model = model.cpu()  # the next one needs the memory of the device


def summary_of(accuracies: Sequence[float]) -> dict[str, Any]:
    """Mean and spread of the accuracies of several seeds; nothing is known of none."""
    if not accuracies:
        return {"accuracy_mean": None, "accuracy_spread": None, "accuracy_values": []}
    return {
        "accuracy_mean": statistics.mean(accuracies),
        "accuracy_spread": (max(accuracies) - min(accuracies)) / 2,
        "accuracy_values": list(accuracies),
    }


def _labels(groups: Sequence[Group]) -> list[str]:
    """Attention with what is not default about it, the model where they differ, and where a model is from where two
    would be called the same."""
    several = len({group.name for group in groups}) > 1
    labels = []
    for group in groups:
        label, _ = describe(group.model)
        if not group.model.config.get("attention"):
            label = group.name
        elif several:
            label = f"{group.name}, {label}"
        labels.append(label if group.trained else label + RANDOM_LABEL)
    return [
        label if labels.count(label) == 1 else f"{label}, {Path(group.origin).name}"
        for label, group in zip(labels, groups, strict=True)
    ]


def _results(
    groups: Sequence[Group], runs: list[dict[str, Any]], images: Images, command: str, seconds: float
) -> dict[str, Any]:
    labels = _labels(groups)
    attentions = {
        group.key: {
            "label": label,
            "kind": group.model.config.get("attention"),
            "model": group.name,
            "origin": group.origin,
            "trained": group.trained,
            "options": describe(group.model)[1],
            "time_steps": group.model.time_steps,
            "accuracy_on_images": group.accuracy_on_images,
            **summary_of(group.accuracies),
            **group.measured,
        }
        for label, group in zip(labels, groups, strict=True)
    }
    names = list(dict.fromkeys(group.name for group in groups))
    first = groups[0].model
    what = "noise" if images.name == RANDOM else images.name
    notes = list(NOTES)
    few = [label for label, group in zip(labels, groups, strict=True) if group.on_images_only]
    if few:
        notes.insert(
            0,
            f"Accuracy of {'; '.join(few)} is that on the {_plural(images.count, 'image')} of this analysis: the "
            "files say nothing of the whole test set.",
        )
    untrained = [e["label"].replace(RANDOM_LABEL, "") for e in attentions.values() if not e["trained"]]
    if untrained:
        notes.insert(0, f"Random weights, not trained: {'; '.join(untrained)}. {NOTES_RANDOM}")
    return {
        "format": RESULTS_FORMAT,
        "title": f"{', '.join(names)} on {what}",
        "lead": f"{_plural(len(groups), 'model')}, analysed on "
        + (
            f"{_plural(images.count, 'image')} of noise."
            if what == "noise"
            else f"{_plural(images.count, 'test image')} of {what}."
        ),
        "command": command,
        "created": datetime.now().isoformat(timespec="seconds"),
        "version": __version__,
        "machine": machine(images.device),
        "data": {"name": what, "test": images.count, "classes": images.facts.get("num_classes")},
        "model": {
            "name": names[0] if len(names) == 1 else None,
            "config": {k: v for k, v in first.config.items() if not k.startswith("attention")},
            "grid": list(getattr(first, "grid", [])) or None,
            "time_steps": first.time_steps,
        },
        "spread": SPREAD,
        "wall_seconds": seconds,
        "runs": runs,
        "attentions": attentions,
        "notes": notes,
    }
