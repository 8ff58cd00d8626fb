"""Small hosts that spike, for the tests of exported and compiled models."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lrfdyn.attention import ATTENTIONS
from lrfdyn.models.base import SpikingModel
from lrfdyn.models.qkformer import QKFormer
from lrfdyn.models.resnet import MSResNet, SEWResNet
from lrfdyn.models.sdt_v1 import SDTV1
from lrfdyn.models.sdt_v2 import SDTV2
from lrfdyn.models.sdt_v3 import SDTV3
from lrfdyn.models.spikformer import Spikformer
from lrfdyn.models.transformer import CIFAR_POOLING
from tests.conftest import random
from tests.models.host_checks import randomize, wake_attention

COMMON = {"heads": 2, "mlp_ratio": 1, "num_classes": 5}
EVENTS = {"dim": 16, "time_steps": 2}
META = {"widths": (4, 4, 8, 8), "depths": (1,) * 5, "image_size": 32, "time_steps": 1}
HOSTS: dict[str, tuple[type[SpikingModel], dict[str, Any]]] = {
    "spikformer": (
        Spikformer,
        {**COMMON, "dim": 16, "depth": 1, "time_steps": 2, "image_size": 16, "pooling": CIFAR_POOLING},
    ),
    "qkformer": (QKFormer, {**COMMON, "dim": 16, "depth": 3, "time_steps": 2, "image_size": 16, "form": "cifar"}),
    "sdt_v1": (SDTV1, {**COMMON, "dim": 16, "depth": 1, "time_steps": 2, "image_size": 16, "pooling": CIFAR_POOLING}),
    "spikformer_dvs": (Spikformer, {**COMMON, **EVENTS, "depth": 1, "image_size": 32, "attention_scale": 0.25}),
    "qkformer_dvs": (QKFormer, {**COMMON, **EVENTS, "depth": 2, "image_size": 32, "form": "dvs"}),
    "sdt_v1_dvs": (
        SDTV1,
        {**COMMON, **EVENTS, "depth": 1, "image_size": 16, "pooling": CIFAR_POOLING, "window_maxima": True},
    ),
    "sdt_v2": (SDTV2, {**COMMON, **META}),
    "sdt_v3": (SDTV3, {**COMMON, **META}),
    "sew_resnet": (SEWResNet, {"depths": (1, 1), "widths": (8, 8), "num_classes": 5, "time_steps": 3}),
    "ms_resnet": (MSResNet, {"depths": (1, 1), "widths": (8, 8), "num_classes": 5, "time_steps": 3}),
}
# Options of attentions that have a name of their own here, and the attention.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "lrf_dyn_qkv": ("lrf_dyn", {"token": "qkv"}),
    "lrf_dyn_same": ("lrf_dyn", {"coupling": "same"}),
    "lrf_ssa_norm": ("lrf_ssa", {"dilations": (1, 3), "norm": True, "scale_lrf": True}),
}
KINDS = (*ATTENTIONS, *VARIANTS)
SIZE = {"sew_resnet": 24, "ms_resnet": 24}  # of the hosts that take any


def small(host: str, attention: str | None = None, **options: Any) -> SpikingModel:
    """In evaluation mode, with the statistics of real activity."""
    torch.manual_seed(0)
    build, preset = HOSTS[host]
    kind, own = VARIANTS.get(attention or "", (attention, None))
    chosen = {} if kind is None else {"attention": kind, "attention_options": own}
    model = build(**{**preset, **chosen, **options})
    wake_attention(randomize(model))
    for norm in (module for module in model.modules() if isinstance(module, nn.BatchNorm2d)):
        norm.momentum = 1.0
    with torch.no_grad():
        model.train()(random(8, model.in_channels, *side(host, model), dtype=torch.float32))
    return model.eval()


def side(host: str, model: SpikingModel) -> tuple[int, int]:
    size = SIZE.get(host, model.input_size[-1])
    return size, size


@torch.no_grad()
def live(model: SpikingModel, size: int | None = None) -> SpikingModel:
    """Random norms with the statistics of random images, so that every layer fires and images matter."""
    randomize(model).double().train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.5
    size = size or model.input_size[1]
    for _ in range(4):
        model(torch.randn(4, model.in_channels, size, size, dtype=torch.float64))
    return model.eval()
