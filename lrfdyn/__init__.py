"""Spiking vision transformers with local receptive fields and neural dynamics self-attention."""

from lrfdyn.attention import ATTENTIONS
from lrfdyn.errors import LrfdynError
from lrfdyn.models import create_model, list_models
from lrfdyn.version import __version__

__all__ = ["ATTENTIONS", "LrfdynError", "__version__", "create_model", "list_models"]
