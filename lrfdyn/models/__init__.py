"""Host networks: every transformer host takes any attention."""

from lrfdyn.models.base import SpikingModel
from lrfdyn.models.registry import create_model, list_models, register_model
from lrfdyn.models.spikformer import Spikformer

__all__ = ["Spikformer", "SpikingModel", "create_model", "list_models", "register_model"]
