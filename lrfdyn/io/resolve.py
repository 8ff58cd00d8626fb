"""A model from where its user has it: a folder of a run, a saved model, a hub repository, or a name of the registry."""

from __future__ import annotations

import re
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch

from lrfdyn.errors import LrfdynError, first_line, require
from lrfdyn.io.hub import CONFIG_FILE, Host, from_pretrained
from lrfdyn.models import SpikingModel, create_model, list_models

RANDOM = "random weights"


def load_model(source: str, seed: int = 0, **options: Any) -> tuple[SpikingModel, str]:
    """The model in evaluation mode and in float32, and where its weights are from. `options` are those of
    `create_model` and go with a name of the registry, whose weights are random."""
    if model_folder(source) is None and source in list_models():
        return random_model(source, seed, **options).eval(), RANDOM
    require(
        not options,
        f"{', '.join(options)}: only for the name of a model, whose weights are random; {source} has its own",
    )
    return load_saved(source, SpikingModel).float(), source  # type: ignore[type-abstract]


def load_saved(source: str, host: type[Host], device: torch.device | str = "cpu") -> Host:
    """The model of a run's folder, of a folder of `save_pretrained`, or of a hub repository, in evaluation mode."""
    folder = model_folder(source)
    require(
        folder is not None or source not in list_models(),
        f"model: {source} is a name without trained weights; expected the folder of a run or of save_pretrained",
    )
    near = get_close_matches(source, list_models(), cutoff=0.8) if folder is None else []
    require(not near, f"model: {source!r} is no folder and no model; did you mean {' or '.join(near)}?")
    try:
        return from_pretrained(source if folder is None else folder, host=host, device=device)
    except LrfdynError as error:  # what is called source there is the argument model here
        raise LrfdynError(re.sub(r"^source:", "model:", str(error))) from error


def random_model(name: str, seed: int = 0, **options: Any) -> SpikingModel:
    """A model of the registry whose weights depend on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return create_model(name, **options)


def saved_folder(folder: Path) -> Path | None:
    """The folder that holds the configuration: `folder` itself, or `model/` in the folder of a run."""
    return next((place for place in (folder, folder / "model") if (place / CONFIG_FILE).is_file()), None)


def model_folder(source: str) -> Path | None:
    """`saved_folder` of an argument; None where it is no path here, and an error where it is one without a model."""
    folder = Path(source)
    if not folder.exists():
        return None
    require(folder.is_dir(), f"model: expected a folder or the name of a model, got the file {source}")
    place = saved_folder(folder)
    if place is None and (folder / "checkpoints").is_dir():
        raise LrfdynError(f"model: {source} is a run that has not ended: the folder model/ comes with its last epoch")
    require(place is not None, f"model: {source} holds no {CONFIG_FILE}, neither does {folder / 'model'}")
    return place


def choose_device(name: str | None) -> torch.device:
    """By name; for None or "auto" a GPU where there is one."""
    if name in (None, "auto"):
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    assert name is not None
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # what torch says of a device that is not there
        raise LrfdynError(f"device: cannot use {name!r} ({first_line(error)})") from None
    return device


def device_name(device: torch.device) -> str:
    """As a record names it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
