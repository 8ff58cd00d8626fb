"""Data and model of a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lrfdyn.data import DataSource, create_data
from lrfdyn.models import SpikingModel, create_model
from lrfdyn.models.registry import model_class
from lrfdyn.training.config import TrainConfig


def build_data(config: TrainConfig) -> DataSource:
    data = config.data
    size = {} if data.image_size is None else {"image_size": data.image_size}
    root = None if data.root is None else Path(data.root).expanduser()
    return create_data(data.name, root, config.augmentation, **size, **data.options)


def build_model(config: TrainConfig, num_classes: int, image_size: int, in_channels: int) -> SpikingModel:
    facts: dict[str, Any] = {"num_classes": num_classes, "image_size": image_size, "in_channels": in_channels}
    if "image_size" not in model_class(config.model.name).options():
        del facts["image_size"]  # a host that takes any size
    return create_model(config.model.name, **{**facts, **config.model.arguments()})


def data_model(config: TrainConfig, source: DataSource) -> SpikingModel:
    return build_model(config, source.num_classes, source.image_size, source.in_channels)
