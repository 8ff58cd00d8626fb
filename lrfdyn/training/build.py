"""Data and model of a configuration."""

from __future__ import annotations

from pathlib import Path

from lrfdyn.data import DataSource, create_data
from lrfdyn.models import SpikingModel
from lrfdyn.tasks import task_of
from lrfdyn.training.config import TrainConfig


def build_data(config: TrainConfig) -> DataSource:
    data = config.data
    size = {} if data.image_size is None else {"image_size": data.image_size}
    root = None if data.root is None else Path(data.root).expanduser()
    return create_data(data.name, root, config.augmentation, **size, **data.options)


def build_model(config: TrainConfig, num_classes: int, image_size: int, in_channels: int) -> SpikingModel:
    return task_of(config.data.name).build(config, num_classes, image_size, in_channels)


def data_model(config: TrainConfig, source: DataSource) -> SpikingModel:
    return build_model(config, source.num_classes, source.image_size, source.in_channels)
