"""Data sets."""

from lrfdyn.data.augment import Augmentation
from lrfdyn.data.base import Batch, DataSource, create_data

__all__ = ["Augmentation", "Batch", "DataSource", "create_data"]
