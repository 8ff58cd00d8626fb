"""A model from where its user has it: a folder of a run, a saved model, a hub repository, or a name of the registry."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lrfdyn.errors import LrfdynError, require
from lrfdyn.hub import CONFIG_FILE, from_pretrained
from lrfdyn.models import SpikingModel, create_model, list_models

RANDOM = "random weights"


def load_model(source: str, seed: int = 0, **options: Any) -> tuple[SpikingModel, str]:
    """The model in evaluation mode and in float32, and where its weights are from. `options` are those of
    `create_model` and go with a name of the registry, whose weights are random."""
    folder = model_folder(source)
    if folder is None and source in list_models():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return create_model(source, **options).eval(), RANDOM
    require(
        not options,
        f"{', '.join(options)}: only for the name of a model, whose weights are random; {source} has its own",
    )
    model: SpikingModel = from_pretrained(source if folder is None else folder)
    return model.float(), source


def model_folder(source: str) -> Path | None:
    """The folder that holds the configuration: `source` itself, or `model/` in the folder of a run."""
    folder = Path(source)
    if not folder.exists():
        return None
    require(folder.is_dir(), f"model: expected a folder or the name of a model, got the file {source}")
    for place in (folder, folder / "model"):
        if (place / CONFIG_FILE).is_file():
            return place
    if (folder / "checkpoints").is_dir():
        raise LrfdynError(f"model: {source} is a run that has not ended: the folder model/ comes with its last epoch")
    raise LrfdynError(f"model: {source} holds no {CONFIG_FILE}, neither does {folder / 'model'}")
