"""What a path or name stands for: the one place where commands and recipes find models.

A source is the folder of a run, of a sweep or of `lrfdyn reproduce`, a folder of `save_pretrained`, a .safetensors file
(weights or a checkpoint), an .onnx, .pte or .nir file, a model of the zoo, a repository of the Hugging Face hub, or the
name of a network, NAME or NAME:ATTENTION, whose weights are random.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lrfdyn.attention import attention_options
from lrfdyn.checks import checked
from lrfdyn.errors import LrfdynError, near_names, require
from lrfdyn.files import expanded, read_json_lines, read_summary
from lrfdyn.io.hub import CONFIG_FILE, REPO_ID, WEIGHTS_FILE, build_trained
from lrfdyn.io.weights import check_fit, find_checkpoint, list_checkpoints, load_tensors, model_weights, read_checkpoint
from lrfdyn.io.zoo import list_pretrained, zoo_entry, zoo_folder
from lrfdyn.models import SpikingModel, create_model, list_models
from lrfdyn.models.registry import model_class

# Runtimes and the endings of their files; C is a folder.
EXPORTED = {"onnx": ".onnx", "executorch": ".pte", "nir": ".nir", "native": ".c"}
PAPER_ORDER = ("vsa", "ssa", "causal_ssa", "lrf_ssa", "lrf_dyn")  # reference, base, ours
WEIGHTS_ENDING = ".safetensors"


@dataclass(frozen=True)
class Source:
    """One model that `find_source` has found; `load` and `weights` read it.

    `kind` is "name", "hub", "saved" (a folder of `save_pretrained`), "weights", "checkpoint", "onnx", "executorch",
    "nir" or "native" (a folder of C). `run` is the folder of the run that it is part of; `seed`, `accuracy` (0 to 1),
    `curve` (a record per epoch) and `train_seconds` are those of its training, where they are known.
    """

    origin: str  # the path or name
    kind: str
    path: Path = field(default_factory=Path)  # the file that holds the weights, or the name of a repository
    argument: str = "model"  # that errors name
    options: Mapping[str, Any] = field(default_factory=dict)  # of `create_model`, for a name
    run: Path | None = None
    seed: int | None = None
    accuracy: float | None = None
    curve: list[dict[str, Any]] = field(default_factory=list)
    train_seconds: float | None = None

    @property
    def trained(self) -> bool:
        return self.kind != "name"

    @property
    def recipe(self) -> Path | None:
        """The recipe.yaml of its run."""
        path = None if self.run is None else self.run / "recipe.yaml"
        return path if path is not None and path.is_file() else None

    def load(self, seed: int = 0) -> SpikingModel:
        """The model in evaluation mode. The weights of a name depend on `seed` alone."""
        with renamed_errors(self.argument):
            if self.kind == "name":
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(seed)
                    return create_model(self.origin.partition(":")[0], **self.options).eval()
            if self.kind in ("saved", "hub"):
                return SpikingModel.from_pretrained(self.path.parent if self.kind == "saved" else self.origin)
            tensors, config = self._read()
            require(bool(config), f"source: {self.path} does not say which model its weights are of")
            return build_trained(config, tensors, self.path, self.path, host=SpikingModel)

    def weights(self, raw: bool = False) -> dict[str, Tensor]:
        """The trained weights by name; of a checkpoint its moving average where it has one, unless `raw`."""
        require(self.trained, f"{self.argument}: {self.origin} names a model without weights; expected a trained one")
        with renamed_errors(self.argument):
            return self.load().state_dict() if self.kind == "hub" else self._read(raw)[0]

    def fill(self, model: nn.Module, leave_out: str = "\0") -> None:
        """Puts the weights into a model that they must fit, but for those whose names begin with `leave_out`."""
        tensors = {name: value for name, value in self.weights().items() if not name.startswith(leave_out)}
        check_fit(self.path, model, tensors)
        model.load_state_dict(tensors)

    def _read(self, raw: bool = False) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Weights and the configuration of their model."""
        exported = f"{self.origin} is an exported file, which lrfdyn predict runs; expected the model it was made of"
        require(self.kind not in EXPORTED, f"source: {exported}")
        if self.kind == "checkpoint":
            tensors, meta = read_checkpoint(self.path)
            return model_weights(tensors, raw), meta.get("model_config", {})
        return load_tensors(self.path)


@contextmanager
def renamed_errors(argument: str) -> Iterator[None]:
    """What is called source elsewhere is another argument here."""
    try:
        yield
    except LrfdynError as error:
        raise LrfdynError(re.sub(r"^source:", f"{argument}:", str(error))) from error


@checked
def find_source(text: str | os.PathLike[str], argument: str = "model", **options: Any) -> Source:
    """Finds the one model that a path or name stands for; several in a folder are an error that names one of them.

    `argument` is what errors call the text. Of a run that has not ended the newest whole checkpoint is taken, which is
    said on the error stream. `options` are those of `create_model`, None for its default, for the name of a model.

        model = find_source("runs/cifar100").load()
        model = find_source("spikformer_4_384:lrf_dyn", num_classes=10).load(seed=1)
    """
    origin, path = str(text), expanded(text, argument)
    inner = _models_in(path)
    if inner:
        require(len(inner) == 1, f"{argument}: {origin} holds {len(inner)} models; name one, such as {inner[0]}")
        return find_source(inner[0], argument, **options)
    find = _find_folder if path.is_dir() else _find_file if path.exists() else _find_name
    source = replace(find(origin, path, argument), argument=argument)
    given = {key: value for key, value in options.items() if value is not None}
    untrained = not given or not source.trained
    require(untrained, f"{', '.join(given)}: only for the name of a model, whose weights are random; got {origin}")
    return replace(source, options={**source.options, **given})


@checked
def find_sources(text: str | os.PathLike[str]) -> list[Source]:
    """Finds all models that a path or name stands for: those of the runs in the folder of a sweep or of `lrfdyn
    reproduce`, runs without a checkpoint left out, else the one that `find_source` finds."""
    return [find_source(path) for path in _models_in(expanded(text, "model")) or [Path(text)]]


def _folders(path: Path) -> tuple[Path, ...]:
    """Where a model or checkpoints can be: in a folder, or in the parts of a run."""
    return (path, path / "model", path / "checkpoints")


def _models_in(folder: Path) -> list[Path]:
    """The models in a folder that is none itself, in the paper's order."""

    def is_model(path: Path) -> bool:
        found = ((inner / CONFIG_FILE).is_file() or list_checkpoints(inner) for inner in _folders(path))
        return path.suffix == WEIGHTS_ENDING or any(found)

    def paper_order(path: Path) -> tuple[int, str]:
        kind = path.stem.rpartition("-seed")[0]
        return (*PAPER_ORDER, kind).index(kind), path.stem

    if not folder.is_dir() or is_model(folder):
        return []
    found = (list(filter(is_model, folder.glob(inner))) for inner in ("runs/[!.]*", "[!.]*"))
    return sorted(next(filter(None, found), []), key=paper_order)


def _find_folder(origin: str, path: Path, argument: str) -> Source:
    if path.suffix == EXPORTED["native"]:
        return Source(origin, "native", path)
    say = partial(print, file=sys.stderr)
    for folder in _folders(path):
        if (folder / CONFIG_FILE).is_file():
            if folder.name == "model":
                return Source(origin, "saved", folder / WEIGHTS_FILE, **_training_facts(folder.parent))
            recipe = (folder / "recipe.yaml").is_file()  # models of the zoo have theirs beside them
            return Source(origin, "saved", folder / WEIGHTS_FILE, run=folder if recipe else None)
        found = find_checkpoint(folder, say)
        if found is not None:
            if folder != path:
                say(f"{argument}: {origin} is a run that has not ended; its newest checkpoint is taken, {found.name}")
            return Source(origin, "checkpoint", found, **_training_facts(folder.parent))
    raise LrfdynError(f"{argument}: {origin} holds no model: no {CONFIG_FILE}, {WEIGHTS_ENDING} file or checkpoint")


def _training_facts(run: Path) -> dict[str, Any]:
    """What a run says of itself."""
    summary = read_summary(run / "summary.json", "model")

    def accuracy(record: dict[str, Any]) -> float | None:
        return None if record.get("top1") is None else record["top1"] / 100

    curve = [
        {"epoch": r["epoch"], **{key: r.get(key) for key in ("train_loss", "test_loss")}, "test_accuracy": accuracy(r)}
        for r in read_json_lines(run / "log.jsonl")
        if r["kind"] == "epoch"
    ]
    facts = {"accuracy": accuracy(summary), "train_seconds": summary.get("wall_s")}
    return {"run": run, "seed": summary.get("seed"), "curve": curve, **facts}


def _find_file(origin: str, path: Path, argument: str) -> Source:
    files = {ending: kind for kind, ending in EXPORTED.items() if kind != "native"}
    kinds = {WEIGHTS_ENDING: "weights", **files}
    expected = f"expected a folder, a file that ends in {', '.join(kinds)}, or the name of a model"
    require(path.suffix in kinds, f"{argument}: {expected}, got {origin}")
    if path.name == WEIGHTS_FILE and path.with_name(CONFIG_FILE).is_file():
        return _find_folder(origin, path.parent, argument)
    if path.suffix == WEIGHTS_ENDING and "checksum" in load_tensors(path)[1]:
        return Source(origin, "checkpoint", path, run=path.parent.parent)
    return Source(origin, kinds[path.suffix], path)


def _find_name(origin: str, path: Path, argument: str) -> Source:
    """The name of a model or of a hub repository: nothing has this path."""
    name, _, kind = origin.partition(":")
    if name.lower() in map(str.lower, list_models()):
        if kind:
            attention_options(kind)  # an unknown kind is an error
            has_one = "attention" in model_class(name).options()
            require(has_one, f"{argument}: {name} has no attention, got {origin!r}")
        return Source(origin, "name", options={"attention": kind} if kind else {})
    entry = zoo_entry(origin)
    if entry is not None:
        with renamed_errors(argument):
            found = _find_folder(origin, zoo_folder(entry), argument)
        return replace(found, seed=entry.seed, accuracy=entry.bf16 / 100)
    is_file = path.suffix in (WEIGHTS_ENDING, *EXPORTED.values())
    if origin.count("/") == 1 and REPO_ID.fullmatch(origin) and not is_file and not path.parent.is_dir():
        return Source(origin, "hub", path)
    if is_file or "/" in origin:
        alike = get_close_matches(path.name, [other.name for other in path.parent.glob("*")])
        hint = f"; did you mean {' or '.join(str(path.with_name(other)) for other in alike)}?" if alike else ""
        raise LrfdynError(f"{argument}: no such file or folder: {origin}{hint}")
    near = near_names(name, [*list_models(), *(entry.name for entry in list_pretrained())])
    raise LrfdynError(f"{argument}: {origin!r} is no file or folder here and no model; {near}")
