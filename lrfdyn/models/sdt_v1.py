"""Spike-driven Transformer V1 (Yao et al., 2023): potentials on the shortcuts, with any attention."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from lrfdyn.attention import AttentionHost, create_attention
from lrfdyn.attention.host import lif_conv
from lrfdyn.models.base import SpikingModel, classifier
from lrfdyn.models.registry import register_model
from lrfdyn.models.spikformer import CIFAR_POOLING, IMAGENET_POOLING, Spikformer, stem_strides, stem_widths
from lrfdyn.nn.layers import (
    ConvBN,
    MembraneBlock,
    MembraneConv,
    MembraneMLP,
    SpikingConv,
    drop_path_rates,
    hidden_width,
    init_weights,
    max_pool,
)
from lrfdyn.nn.neurons import LIF


class Stem(nn.Module):
    """Three spiking 3x3 convolutions, one without neuron, and a convolution that stands for position."""

    def __init__(self, in_channels: int, dim: int, pooling: Sequence[bool]) -> None:
        super().__init__()
        *pairs, last = pairwise([in_channels, *stem_widths(dim)])
        self.pooling = tuple(pooling)
        self.stages = nn.ModuleList(
            [*(SpikingConv(a, b, LIF(), kernel=3) for a, b in pairs), ConvBN(*last, kernel=3)],
        )
        self.rpe = MembraneConv(dim, dim, LIF(), kernel=3)

    def forward(self, x: Tensor, only_last: bool = False) -> list[Tensor]:
        """The spikes of the first three stages and the potentials of the last, with their position added; or only
        these."""
        maps = []
        for stage, pool in zip(self.stages, self.pooling, strict=True):
            x = stage(x)
            x = max_pool(x) if pool else x
            if not only_last:
                maps.append(x)
        return [*maps[:-1], x + self.rpe(x)]


class MLP(MembraneMLP):
    """Where the width stays the same (`mlp_ratio=1`), a shortcut goes round each of the two layers."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__(dim, hidden, LIF)
        self.inner_shortcut = dim == hidden

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc1(x)
        return y + self.fc2(x + y) if self.inner_shortcut else self.fc2(y)


ATTENTION_HOST = AttentionHost(
    project=lif_conv,
    project_out=partial(ConvBN, bias=True),
    neuron=LIF,
    fire=partial(LIF, threshold=0.5),
    scale=0.125,
)


class SDTV1(SpikingModel):
    """`pooling` says which of the four stem stages halve the grid."""

    official_keys = ((r"^block\.\d+\.attn\.talking_heads\..*", None), *Spikformer.official_keys)

    def __init__(
        self,
        dim: int = 512,
        depth: int = 8,
        heads: int = 8,
        mlp_ratio: float = 4,
        pooling: Sequence[bool] = IMAGENET_POOLING,
        image_size: int = 224,
        in_channels: int = 3,
        num_classes: int = 1000,
        time_steps: int = 4,
        drop_path: float = 0.0,
        attention: str = "sdsa",
        attention_options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(locals())
        self.describe_stages(stem_widths(dim), stem_strides(pooling), image_size)
        self.stem = Stem(in_channels, dim, pooling)
        options = attention_options or {}
        self.blocks = nn.ModuleList(
            MembraneBlock(
                LIF(),
                create_attention(attention, dim, heads, self.grid, ATTENTION_HOST, **options),
                MLP(dim, hidden_width(dim, mlp_ratio)),
                rate,
            )
            for rate in drop_path_rates(drop_path, depth)
        )
        self.neuron = LIF()
        self.head = classifier(dim, num_classes)
        init_weights(self)

    def forward_stages(self, x: Tensor, only_last: bool = False) -> list[Tensor]:
        *early, x = self.stem(x, only_last)
        for block in self.blocks:
            x = block(x)
        return [*early, x]

    def head_input(self, x: Tensor) -> Tensor:
        return self.neuron(x.mean((3, 4)))


@register_model
def sdt_v1_8_384(**options: Any) -> SDTV1:
    return SDTV1(**{"dim": 384, "depth": 8, "heads": 8, **options})


@register_model
def sdt_v1_8_512(**options: Any) -> SDTV1:
    return SDTV1(**{"dim": 512, "depth": 8, "heads": 8, **options})


@register_model
def sdt_v1_8_768(**options: Any) -> SDTV1:
    return SDTV1(**{"dim": 768, "depth": 8, "heads": 8, **options})


@register_model
def sdt_v1_2_512(**options: Any) -> SDTV1:
    """CIFAR form."""
    preset = {"dim": 512, "depth": 2, "heads": 8, "pooling": CIFAR_POOLING}
    return SDTV1(**{**preset, "image_size": 32, "num_classes": 100, **options})
