"""Several models on the same images: what the paper says of attention, measured and compared."""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

from lrfdyn.analysis.measure.inference import attention_state, images_per_second, inference_peak, machine, state_notes
from lrfdyn.analysis.measure.locality import Locality, receptive_field_record
from lrfdyn.analysis.measure.maps import AttentionMaps, Pictures, Place, choose_pictures
from lrfdyn.analysis.measure.observe import RANDOM, Images, ImageTensors, as_batches, observe
from lrfdyn.analysis.measure.spikes import EnergyModel, FiringRates, SynapticOperations
from lrfdyn.analysis.report.look import places
from lrfdyn.analysis.report.write import plural, results_head
from lrfdyn.attention import Attention, attention_label, attention_options
from lrfdyn.checks import checked
from lrfdyn.errors import LrfdynError, require
from lrfdyn.models import SpikingModel
from lrfdyn.models.registry import model_class
from lrfdyn.sources import Source, find_sources
from lrfdyn.training.config import decisive
from lrfdyn.training.recipes import load_recipe

RANDOM_LABEL = " (random weights)"
NOTES = (
    "Attention weights of LRF-Dyn are those of its linear mixing, the same for every input; those of the "
    "other kinds depend on the input.",
    "Derived state is what one attention layer must hold for one input and one time step: spikes as bits, "
    "sums as 32-bit numbers. LRF-Dyn holds the spikes of the rows that its stencils reach and computes their "
    "potentials again; held as potentials, those rows would outweigh the `k d` numbers of its dendrites by far. "
    "With two directions it holds the spikes of all rows. "
    "Membrane potentials between time steps are the same for all kinds and not counted.",
    "Measured peak memory is that of one evaluation pass at batch 1, all layers and time steps, of the "
    "implementation that also trains, which keeps whole feature maps: neither streaming nor low-memory inference.",
)
NOTE_FEW = "of this analysis: the files say nothing of the whole test set."
NOTE_RANDOM = (
    "Their firing, energy, locality and receptive fields say nothing about a trained model; parameters and memory do "
    "not depend on it."
)

Tell = Callable[..., None]  # of what is measured, and how many images of it are done now
PASSES = 3  # over the images: one that observes, two for the gradients, with and without those of attention


@checked
def sources_for(text: str, images: Images) -> list[Source]:
    """All models that `text` stands for (see `lrfdyn.sources`). One that is named is made for the images."""
    first, *others = find_sources(text)
    takes = {} if first.trained else model_class(first.origin.partition(":")[0]).options()
    facts = {key: value for key, value in images.facts.items() if key in takes}
    return [replace(first, options={**first.options, **facts}), *others]


@checked
def analyze(
    sources: Sequence[Source],
    images: Images,
    energy: EnergyModel | None = None,
    *,
    maps: Sequence[str] = (),
    queries: Sequence[Place] = (),
    command: str = "lrfdyn analyze",
    title: str | None = None,
    notes: Sequence[str] = (),
    progress: Tell = lambda *_: None,
) -> dict[str, Any]:
    """Measure every model of `sources` on `images` and return the results that `write_all` makes report, figures and
    tables from.

    Runs that differ in nothing but their seed are one entry of `results["attentions"]`: their accuracies are joined,
    everything else is measured on the first of them. `results["runs"]` has every run with its learning curve. `energy`
    has the costs of operations. `maps` asks for attention maps: of so many of the images (`["2"]`) or of image files,
    with the rows and columns of the tokens that look in `queries` (see `attention_maps`); the results then hold these
    pictures. The report shows `command`, `title` (or one made from the models and the images) and `notes`, and
    `progress(model, what, images)` is called while images are measured.

        images = load_images("digits", None, 64, 16, torch.device("cpu"))
        results = analyze(sources_for("demo", images), images)
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
    pictures = choose_pictures(images, maps) if maps else None
    for source, recipe in zip(sources, recipes, strict=True):
        model, accuracy = source.load(), source.accuracy
        about = about or {
            "config": {k: v for k, v in model.config.items() if not k.startswith("attention")},
            "grid": list(getattr(model, "grid", [])) or None,
            "time_steps": model.time_steps,
        }
        name = model.name or type(model).__name__
        identity = json.dumps([name, model.config, source.trained, recipe], sort_keys=True, default=str)
        key = keys.get(identity)
        if key is None or source.seed is None or any((r["attention"], r["seed"]) == (key, source.seed) for r in runs):
            stem = model.config.get("attention") or name
            key = next(k for k in chain([stem], (f"{stem}-{i}" for i in count(2))) if k not in entries)
            keys.setdefault(identity, key)
            entries[key] = _entry(model, source, images, energy, progress, pictures, queries)
            if accuracy is None and entries[key]["accuracy_on_images"] is not None:
                accuracy = entries[key]["accuracy_on_images"]
                few.append(entries[key])
        run = {"attention": key, "parameters": entries[key]["parameters"], "test_accuracy": accuracy}
        run |= {name: getattr(source, name) for name in ("seed", "train_seconds", "curve")}
        runs.append(run | {"weights": source.origin})
    for key, entry in entries.items():
        accuracies = [run["test_accuracy"] for run in runs if run["attention"] == key]
        known = [accuracy for accuracy in accuracies if accuracy is not None]
        spread = (max(known) - min(known)) / 2 if known else None
        mean = statistics.mean(known) if known else None
        entry |= {"accuracy_mean": mean, "accuracy_spread": spread, "accuracy_values": known}
    _tell_apart(list(entries.values()))
    for entry, place in zip(entries.values(), places([e["kind"] or e["model"] for e in entries.values()]), strict=True):
        entry["place"] = place
    names = list(dict.fromkeys(entry["model"] for entry in entries.values()))
    what, noun = ("noise", "image") if images.name == RANDOM else (images.name, f"test {images.noun}")
    epochs, classes = max(len(run["curve"]) for run in runs), images.facts.get("num_classes")
    trained = f", {plural(len(runs), 'run')} of training for {plural(epochs, 'epoch')}" if epochs else ""
    times = [run["train_seconds"] for run in runs if run["train_seconds"] is not None]
    untrained = "; ".join(e["label"].replace(RANDOM_LABEL, "") for e in entries.values() if not e["trained"])
    of_few, shown = "; ".join(entry["label"] for entry in few), plural(images.count, images.noun)
    lead = f"{plural(len(entries), 'model')}{trained}, analysed on {plural(images.count, noun)} of {what}."
    return {
        **results_head(title or f"{', '.join(names)} on {what}", lead, command),
        "machine": machine(images.device),
        "data": {"name": what, "kind": images.noun, "train": images.train, "test": images.count, "classes": classes},
        "batch": min(images.batch_size, images.count),  # of the measurement of speed
        "model": {"name": names[0] if len(names) == 1 else None, **about},
        "recipe": {k: v for k, v in recipes[0].items() if v is not None and all(r.get(k) == v for r in recipes)},
        "spread": "half of the range over the seeds",
        "wall_seconds": time.perf_counter() - start,
        "train_seconds": sum(times) if times else None,
        "runs": runs,
        **({"pictures": pictures.shown} if pictures else {}),
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


@checked
def measure_model(
    model: SpikingModel, batches: ImageTensors, energy: EnergyModel | None = None, progress: Tell = lambda *_: None
) -> dict[str, Any]:
    """Measure a model on batches `[B, C, H, W]` of images (or of event frames, `[T, B, C, H, W]`) and return a record
    of parameters, memory, firing, energy, speed, locality (with attention) and receptive field, and `notes` about what
    an attention does not say. `progress(what, images)` is called while images are measured."""
    batches = list(as_batches(batches))
    counts, local, told = SynapticOperations(energy), Locality(), partial(progress, "spikes and attention")
    rates, operations, distances = observe(model, batches, FiringRates(), counts, local, on_batch=told)
    terms = attention_state(model) if any(isinstance(module, Attention) for module in model.modules()) else []
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "state_terms": terms,
        "state_bytes": sum(term["bytes"] for term in terms) if terms else None,
        "peak_inference_bytes": inference_peak(model, batches[0].narrow(-4, 0, 1)),
        "firing_rate": rates["mean"],
        "firing_by_layer": rates["by_layer"],
        "energy": operations,
        "images_per_second": images_per_second(model, batches[0]),
        "receptive_field": receptive_field_record(model, batches, partial(progress, "receptive field")),
        "notes": [*operations["notes"], *local.notes, *state_notes(model)],
        **({"locality": distances} if distances else {}),
    }


def _entry(
    model: SpikingModel, source: Source, images: Images, energy: EnergyModel | None, progress: Tell,
    pictures: Pictures | None, queries: Sequence[Place],
) -> dict[str, Any]:  # fmt: skip
    """Everything about one model but its accuracies over the seeds."""
    model = model.to(images.device).float()  # as the images are
    label, options = model_label(model)
    batches = images.of(model)
    looks = {} if pictures is None else observe(model, pictures.images, AttentionMaps(queries))[0]
    return {
        "label": label + RANDOM_LABEL * (not source.trained),
        "kind": model.config.get("attention"),
        "model": model.name or type(model).__name__,
        "origin": source.origin,
        "trained": source.trained,
        "options": options,
        "time_steps": model.time_steps,
        "accuracy_on_images": images.accuracy(model) if source.trained else None,
        **({"attention_maps": looks} if looks else {}),
        **measure_model(model, batches, energy, partial(progress, source.origin)),
    }


def model_label(model: SpikingModel) -> tuple[str, dict[str, Any]]:
    """Return a short label of the attention of `model`, with those of its options that are not the default, and all of
    its options. A model without attention is labelled with its name."""

    def text(value: Any) -> str:
        return f"({', '.join(map(str, value))})" if isinstance(value, (list, tuple)) else str(value)

    kind = model.config.get("attention")
    if kind is None:
        return model.name or type(model).__name__, {}
    defaults = attention_options(kind)
    options = {**defaults, **(model.config.get("attention_options") or {})}
    changed = [f"{key} {text(value)}" for key, value in options.items() if text(value) != text(defaults[key])]
    return ", ".join([attention_label(kind), *changed]), options


def _tell_apart(entries: Sequence[dict[str, Any]]) -> None:
    """Puts the model into the labels where the models differ, and where a model is from where labels are equal."""
    several = len({entry["model"] for entry in entries}) > 1
    for entry in entries:
        entry["label"] = f"{entry['model']}, {entry['label']}" if several and entry["kind"] else entry["label"]
    labels = Counter(entry["label"] for entry in entries)
    for entry in entries:
        if labels[entry["label"]] > 1:
            entry["label"] += f", {Path(entry['origin']).name}"
