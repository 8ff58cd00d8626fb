"""Data and model of a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lrfdyn.data import DataSource, create_data
from lrfdyn.errors import require
from lrfdyn.models import SpikingModel
from lrfdyn.tasks import task_of
from lrfdyn.training.config import TrainConfig


def build_data(config: TrainConfig) -> DataSource:
    data = config.data
    root = None if data.root is None else Path(data.root).expanduser()
    return create_data(data.name, root, config.augmentation, **data_options(config))


def data_options(config: TrainConfig) -> dict[str, Any]:
    """What `create_data` is called with, besides the folder and the augmentation."""
    data = config.data
    require("image_size" not in data.options, "data.options: image_size has a key of its own, data.image_size")
    return {**data.options, **({} if data.image_size is None else {"image_size": data.image_size})}


def build_model(config: TrainConfig, num_classes: int, image_size: int, in_channels: int) -> SpikingModel:
    return task_of(config.data.name).build(config, num_classes, image_size, in_channels)


def data_model(config: TrainConfig, source: DataSource) -> SpikingModel:
    return build_model(config, source.num_classes, source.image_size, source.in_channels)
