"""Data sets."""

from lrfdyn.data import decode, events, resident, shards  # noqa: F401  they register themselves
from lrfdyn.data.augment import Augmentation
from lrfdyn.data.base import DATA, Batch, DataSource, create_data, data_class, register_data
from lrfdyn.data.events import EventData
from lrfdyn.data.live import FrameStream
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
    "Preprocessing",
    "create_data",
    "data_class",
    "integrate",
    "read_events",
    "register_data",
]
