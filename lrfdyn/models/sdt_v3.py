"""SDT-V3, E-SpikeFormer (Yao et al., 2025), with any attention. Its neuron has no state: an integer spike stands for
`levels` binary steps, and the time axis holds independent frames, whose logits are averaged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from lrfdyn.attention import AttentionHost
from lrfdyn.models.metaformer import OFFICIAL_KEYS, MetaFormer, MetaFormerConfig
from lrfdyn.models.registry import register_model
from lrfdyn.nn.layers import ConvBN, MembraneBlock, MembraneConv, MembraneMLP, SpikingConv
from lrfdyn.nn.neurons import IntegerSpike


class SeparableConv(nn.Module):
    """A depth-wise between two 1x1 convolutions on potentials `[T, B, dim, H, W]`, each with neuron and batch norm;
    plus a `residual`."""

    def __init__(self, dim: int, kernel: int, neuron: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.expand = MembraneConv(dim, 2 * dim, neuron())
        self.depthwise = MembraneConv(2 * dim, 2 * dim, neuron(), kernel=kernel, groups=2 * dim)
        self.contract = MembraneConv(2 * dim, dim, neuron())

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return MembraneConv.chain([self.expand, self.depthwise, self.contract], x, residual)


def integer_conv(levels: int, c_in: int, c_out: int) -> SpikingConv:
    return SpikingConv(c_in, c_out, IntegerSpike(levels))


@dataclass
class SDTV3Config(MetaFormerConfig):
    """The options of SDT-V3."""

    widths: Sequence[int] = (32, 64, 128, 192)
    levels: int = 4
    """D, the largest integer that a neuron sends."""


@register_model("sdt_v3_t", widths=(24, 48, 96, 128))
@register_model("sdt_v3_s", widths=(32, 64, 128, 192))
@register_model("sdt_v3_m", widths=(48, 96, 192, 240))
@register_model("sdt_v3_l", widths=(64, 128, 256, 360))
class SDTV3(MetaFormer):
    """SDT-V3: images `[B, C, H, W]` or `[T, B, C, H, W]` to logits `[B, classes]`. Options: `SDTV3Config`."""

    config_class = SDTV3Config
    official_keys = (
        (r"\.[Cc]onv\.pwconv1\.", ".separable.expand."),
        (r"\.[Cc]onv\.dwconv\.", ".separable.depthwise."),
        (r"\.[Cc]onv\.pwconv2\.", ".separable.contract."),
        (r"((?:separable|attn)\.[a-z]+)(?:_conv)?\.0\.", r"\1.conv."),
        (r"((?:separable|attn)\.[a-z]+)(?:_conv)?\.1\.", r"\1.bn."),
        *OFFICIAL_KEYS,
    )
    separable = SeparableConv

    def make_neuron(self, config: SDTV3Config, head: bool = False) -> IntegerSpike:
        return IntegerSpike(config.levels, normalize=not head)

    def make_block(self, config: SDTV3Config, width: int, drop_path: float) -> MembraneBlock:
        levels, scale = config.levels, 2 * (width / config.heads) ** -0.5
        neuron, project = partial(IntegerSpike, levels), partial(integer_conv, levels)
        host = AttentionHost(project, ConvBN, neuron, neuron, scale, value_ratio=4)
        separable = SeparableConv(width, 3, neuron)
        attn = config.make_attention(width, self.grid, host)
        mlp = MembraneMLP(width, config.hidden_width(width), neuron)
        return MembraneBlock(neuron(), attn, mlp, drop_path, separable)
