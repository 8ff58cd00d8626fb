"""Data sets."""

from lrfdyn.data import decode, events, pets, resident, shards, tiny_imagenet  # noqa: F401  they register themselves
from lrfdyn.data.augment import Augmentation
from lrfdyn.data.base import DATA, Batch, DataSource, create_data, data_class, register_data
from lrfdyn.data.events import EventData
from lrfdyn.data.live import FrameStream
from lrfdyn.data.manifest import Manifest, Shard, check_shards
from lrfdyn.data.pack import pack_shards
from lrfdyn.data.preprocess import Preprocessing
from lrfdyn.data.recordings import Events, Framing, integrate, read_events

__all__ = [
    "DATA",
    "Augmentation",
    "Batch",
    "DataSource",
    "EventData",
    "Events",
    "FrameStream",
    "Framing",
    "Manifest",
    "Preprocessing",
    "Shard",
    "check_shards",
    "create_data",
    "data_class",
    "integrate",
    "pack_shards",
    "read_events",
    "register_data",
]
