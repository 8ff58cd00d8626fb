"""Spike-driven Transformer V1 (Yao et al., 2023): potentials on the shortcuts, with any attention."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from lrfdyn.attention import AttentionHost
from lrfdyn.attention.base import lif_conv
from lrfdyn.models.registry import register_model
from lrfdyn.models.spikformer import Spikformer
from lrfdyn.models.transformer import (
    CIFAR,
    CIFAR10_DVS,
    CIFAR_POOLING,
    GESTURE,
    PlainTransformer,
    PlainTransformerConfig,
)
from lrfdyn.nn.layers import ConvBN, MembraneBlock, MembraneMLP
from lrfdyn.nn.neurons import LIF


class MLP(MembraneMLP):
    """Where the width stays the same (`mlp_ratio=1`), a shortcut goes round each of the two layers."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__(dim, hidden, LIF)
        self.inner_shortcut = dim == hidden

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if not self.inner_shortcut:
            return super().forward(x, residual)
        y = self.fc1(x)
        y = self.fc2(x + y, residual=y)
        return y if residual is None else residual + y


SMALL_CIFAR10_DVS = {**CIFAR10_DVS, "image_size": 64, "time_steps": 10}
ATTENTION_HOST = AttentionHost(project=lif_conv, project_out=partial(ConvBN, bias=True))


@dataclass
class SDTV1Config(PlainTransformerConfig):
    """The options of SDT-V1."""

    attention: str = "sdsa"
    window_maxima: bool = False
    """Maxima over windows in SDSA, as the CIFAR10-DVS form has them (`dvs_mode`); other attentions have none."""


@register_model("sdt_v1_8_384", dim=384, depth=8)
@register_model("sdt_v1_8_512", dim=512, depth=8)
@register_model("sdt_v1_8_768", dim=768, depth=8)
@register_model("sdt_v1_2_512", dim=512, depth=2, **CIFAR)
@register_model("sdt_v1_dvs_2_256", dim=256, depth=2, window_maxima=True, pooling=CIFAR_POOLING, **SMALL_CIFAR10_DVS)
@register_model("sdt_v1_gesture_2_256", dim=256, depth=2, pooling=(False, True, True, True), **GESTURE)
class SDTV1(PlainTransformer):
    """SDT-V1: images `[B, C, H, W]` or `[T, B, C, H, W]` to logits `[B, classes]`. Its shortcuts carry potentials.
    Options are the fields of `SDTV1Config`."""

    config_class = SDTV1Config
    official_keys = ((r"^block\.\d+\.attn\.talking_heads\.", None), *Spikformer.official_keys)
    membrane = True

    def make_block(self, config: SDTV1Config, drop_path: float) -> MembraneBlock:
        host = replace(ATTENTION_HOST, window_maxima=config.window_maxima)
        attn = config.make_attention(config.dim, self.grid, host)
        return MembraneBlock(LIF(), attn, MLP(config.dim, config.hidden_width(config.dim)), drop_path)
