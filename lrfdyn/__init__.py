"""Spiking vision transformers with local receptive fields and neural dynamics self-attention."""

from lrfdyn import _start  # noqa: F401 (before what takes seconds)
from lrfdyn.attention import ATTENTIONS, create_attention, register_attention
from lrfdyn.convert.swap import swap_attention
from lrfdyn.data import register_data
from lrfdyn.errors import LrfdynError
from lrfdyn.io.hub import from_pretrained
from lrfdyn.io.zoo import list_pretrained
from lrfdyn.models import create_model, list_models, register_model
from lrfdyn.models.official import load_official
from lrfdyn.segmentation import create_segmenter  # and its data set and task register themselves
from lrfdyn.version import __version__

__all__ = [
    "ATTENTIONS",
    "LrfdynError",
    "__version__",
    "create_attention",
    "create_model",
    "create_segmenter",
    "from_pretrained",
    "list_models",
    "list_pretrained",
    "load_official",
    "register_attention",
    "register_data",
    "register_model",
    "swap_attention",
]
