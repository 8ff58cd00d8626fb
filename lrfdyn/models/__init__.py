"""Host networks: every transformer host takes any attention."""

from lrfdyn.models.base import ModelConfig, SpikingModel
from lrfdyn.models.qkformer import QKFormer
from lrfdyn.models.registry import create_model, list_models, register_model
from lrfdyn.models.resnet import MSResNet, PlainResNet, SEWResNet
from lrfdyn.models.sdt_v1 import SDTV1
from lrfdyn.models.sdt_v2 import SDTV2
from lrfdyn.models.sdt_v3 import SDTV3
from lrfdyn.models.spikformer import Spikformer
from lrfdyn.models.vit import ViT

__all__ = [
    "SDTV1",
    "SDTV2",
    "SDTV3",
    "MSResNet",
    "ModelConfig",
    "PlainResNet",
    "QKFormer",
    "SEWResNet",
    "Spikformer",
    "SpikingModel",
    "ViT",
    "create_model",
    "list_models",
    "register_model",
]
