"""What `lrfdyn analyze` takes: models by registry name, and folders and files of trained ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from lrfdyn.analysis.measure.images import Images
from lrfdyn.attention import attention_options
from lrfdyn.errors import LrfdynError, require
from lrfdyn.files import read_json
from lrfdyn.io.hub import CONFIG_FILE, WEIGHTS_FILE, from_pretrained, known_hosts
from lrfdyn.io.resolve import random_model, saved_folder
from lrfdyn.io.weights import check_fit, load_tensors
from lrfdyn.models import SpikingModel, list_models
from lrfdyn.models.registry import model_class

USUAL_ORDER = ("vsa", "ssa", "causal_ssa", "lrf_ssa", "lrf_dyn")  # of the paper: reference, base, ours


@dataclass(frozen=True)
class Source:
    """One model to analyse. `accuracy` and `curve` are those of its training, where they are known."""

    origin: str
    load: Callable[[], SpikingModel]
    trained: bool = True
    seed: int | None = None
    accuracy: float | None = None
    curve: list[dict[str, Any]] = field(default_factory=list)
    train_seconds: float | None = None
    recipe: str = ""  # equal for runs that trained alike but for their seed


def find_sources(text: str, images: Images) -> list[Source]:
    """The models that `text` names: NAME or NAME:ATTENTION of the registry (random weights), the folder of a run of
    `lrfdyn train` or `lrfdyn reproduce`, a folder of save_pretrained, or a .safetensors file."""
    path = Path(text)
    if path.is_dir():
        return _folder(path, images)
    if path.suffix == ".safetensors":
        return [_file(path, images)]
    name, _, kind = text.partition(":")
    if name in list_models():
        return [_registered(text, name, kind, images)]
    near = get_close_matches(name, list_models(), 3, 0.8)
    hint = f"; did you mean {', '.join(near)}" if near else f"; known models: {', '.join(list_models())}"
    hint = hint if "/" not in text else ""
    raise LrfdynError(f"model: {text!r} is no folder, no .safetensors file and no model{hint}")


def _registered(text: str, name: str, kind: str, images: Images) -> Source:
    options: dict[str, Any] = images.model_options()
    takes = model_class(name).options()
    options = {key: value for key, value in options.items() if key in takes}
    if kind:
        require("attention" in takes, f"model: {name} has no attention, got {text!r}")
        attention_options(kind)
        options["attention"] = kind

    return Source(text, lambda: random_model(name, **options), trained=False)


def _folder(path: Path, images: Images) -> list[Source]:
    saved = saved_folder(path)
    if saved is not None:
        load = partial(from_pretrained, saved)
        return [Source(str(path), load) if saved == path else _run(path, load)]
    weights = sorted((path / "weights").glob("*.safetensors"), key=_place)
    if (path / "settings.json").is_file() and weights:
        return [_file(file, images) for file in weights]
    checkpoints = path / "checkpoints"
    if checkpoints.is_dir():
        from lrfdyn.io.checkpoints import newest_checkpoint

        found = newest_checkpoint(checkpoints, print)
        if found is not None:
            return [_run(path, _checkpoint(*found, images))]
    raise LrfdynError(f"model: {path} holds neither {CONFIG_FILE} nor model/{CONFIG_FILE} nor weights nor checkpoints")


def _place(file: Path) -> tuple[int, str]:
    """Files of lrfdyn reproduce as its own report has them."""
    kind = file.stem.rpartition("-seed")[0]
    return (USUAL_ORDER.index(kind) if kind in USUAL_ORDER else len(USUAL_ORDER), file.stem)


def _run(path: Path, load: Callable[[], SpikingModel]) -> Source:
    """What a run of `lrfdyn train` says of itself."""
    from lrfdyn.training.logs import read_log

    summary = read_json(path / "summary.json", "model") if (path / "summary.json").is_file() else {}
    epochs = [record for record in read_log(path / "log.jsonl") if record.get("kind") == "epoch"]
    curve = [
        {
            "epoch": record["epoch"],
            "train_loss": record.get("train_loss"),
            "test_loss": record.get("test_loss"),
            "test_accuracy": None if record.get("top1") is None else record["top1"] / 100,
        }
        for record in epochs
    ]
    top1 = summary.get("top1")
    return Source(
        str(path),
        load,
        seed=summary.get("seed"),
        accuracy=None if top1 is None else top1 / 100,
        curve=curve,
        train_seconds=summary.get("wall_s"),
        recipe=_recipe(path / "recipe.yaml") or json.dumps([summary.get("recipe"), summary.get("epochs")]),
    )


def _recipe(path: Path) -> str:
    """What of a recipe decides the result, the seed apart; nothing where it cannot be read."""
    from lrfdyn.training.config import decisive
    from lrfdyn.training.recipes import load_recipe

    try:
        return json.dumps(decisive(load_recipe(path).as_dict()) | {"run.seed": None}, sort_keys=True)
    except LrfdynError:
        return ""


def _file(path: Path, images: Images) -> Source:
    tensors, meta = load_tensors(path)
    if path.name == WEIGHTS_FILE and path.with_name(CONFIG_FILE).is_file():
        return Source(str(path), lambda: from_pretrained(path.parent))
    if meta.get("library_name") == "lrfdyn":
        return Source(str(path), lambda: _build(meta["host"], meta["options"], path))
    if "curve" in meta and "config" in meta:  # of lrfdyn reproduce
        curve = meta["curve"]
        return Source(
            str(path),
            lambda: _build("Spikformer", meta["config"], path),
            seed=meta.get("seed"),
            accuracy=curve[-1]["test_accuracy"] if curve else None,
            curve=curve,
            train_seconds=sum(record["seconds"] for record in curve),
        )
    if "fingerprint" in meta and "config" in meta:  # a checkpoint of lrfdyn train
        return Source(str(path), _checkpoint(path, tensors, meta, images))
    raise LrfdynError(f"model: {path} does not say which model its weights are of")


def _build(host: str, options: dict[str, Any], path: Path) -> SpikingModel:
    hosts = known_hosts()
    require(host in hosts, f"model: {path} holds a {host}, which is not known here")
    model = hosts[host](**options)
    tensors, _ = load_tensors(path)
    check_fit(path, model, tensors)
    model.load_state_dict(tensors)
    assert isinstance(model, SpikingModel)
    return model


def _checkpoint(
    path: Path, tensors: dict[str, Any], meta: dict[str, Any], images: Images
) -> Callable[[], SpikingModel]:
    def load() -> SpikingModel:
        from lrfdyn.io.checkpoints import model_weights
        from lrfdyn.training.build import build_model
        from lrfdyn.training.config import parse_config

        facts = images.model_options()
        require(
            "num_classes" in facts,
            f"data: {path} is a checkpoint and says nothing of its images; pass its data, not random",
        )
        model = build_model(parse_config(meta["config"], str(path)), **facts)
        weights = model_weights(tensors)
        check_fit(path, model, weights)
        model.load_state_dict(weights)
        return model

    return load
