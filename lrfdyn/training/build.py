"""The configuration of a recipe, and its data and model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lrfdyn.attention import attention_options
from lrfdyn.data import DataSource, create_data
from lrfdyn.errors import require
from lrfdyn.models import SpikingModel
from lrfdyn.training.config import TrainConfig
from lrfdyn.training.recipes import find_recipe, load_recipe, run_name
from lrfdyn.training.tasks import task_of


def build_config(recipe: str, overrides: Mapping[str, Any], epochs: int | None = None) -> tuple[str, TrainConfig]:
    """A name for the runs of a recipe with `overrides` (see `load_recipe`), and their configuration, with the whole
    schedule in `epochs` where they are given."""
    path = find_recipe(recipe)
    config = load_recipe(path, overrides)
    if epochs is not None:
        config = dataclasses.replace(config, schedule=config.schedule.within(epochs))
    return run_name(path.stem, overrides), config


def build_data(config: TrainConfig) -> DataSource:
    """The data set of a configuration."""
    data = config.data
    root = None if data.root is None else Path(data.root).expanduser()
    return create_data(data.name, root, config.augmentation, **data_options(config))


def data_options(config: TrainConfig) -> dict[str, Any]:
    """What `create_data` is called with, besides the folder and the augmentation."""
    data = config.data
    require("image_size" not in data.options, "data.options: image_size has a key of its own, data.image_size")
    return {**data.options, **({} if data.image_size is None else {"image_size": data.image_size})}


def build_model(config: TrainConfig, num_classes: int, image_size: int, in_channels: int) -> SpikingModel:
    """The untrained model of a configuration, for images `[B, in_channels, image_size, image_size]`."""
    return task_of(config.data.name).build_model(config, num_classes, image_size, in_channels)


def data_model(config: TrainConfig, source: DataSource) -> SpikingModel:
    """The untrained model for these data, which knows their class names and the preprocessing of their images."""
    model = build_model(config, source.num_classes, source.image_size, source.in_channels)
    model.class_names = None if source.class_names is None else tuple(source.class_names)
    model.preprocessing = task_of(config.data.name).preprocessing(source)
    return model


def attention_facts(model: SpikingModel) -> dict[str, Any]:
    """Kind and options of a model's attention; None where it has no such thing."""
    kind = model.config.get("attention")
    options = {} if kind is None else {**attention_options(kind), **(model.config.get("attention_options") or {})}
    dilations = options.get("dilations")
    return {
        "attention": kind,
        "token": options.get("token"),
        "dilations": None if dilations is None else list(dilations),
    }


def data_identity(source: DataSource) -> dict[str, Any]:
    """What a checkpoint keeps of its data, which may move to another folder but not change."""
    names = None if source.class_names is None else list(source.class_names)
    return {"images": source.train_images, "classes": source.num_classes, "class_names": names}


def check_same_data(path: Path, meta: Mapping[str, Any], source: DataSource) -> None:
    """Whether the run of a checkpoint may go on with this data; what either of them does not know is not compared."""
    here = data_identity(source)
    for what in ("images", "classes"):
        there = meta.get(what, here[what])
        require(
            there == here[what], f"resume: {path} was trained on {there} {what}, and data.root has {here[what]} here"
        )
    for index, (there, name) in enumerate(zip(meta.get("class_names") or (), here["class_names"] or (), strict=False)):
        require(there == name, f"resume: class {index} of {path} is {there!r}, and in data.root it is {name!r}")
