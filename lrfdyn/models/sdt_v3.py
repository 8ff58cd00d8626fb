"""SDT-V3, E-SpikeFormer (Yao et al., 2025), with any attention.

Its neuron has no state: an integer spike stands for `levels` binary steps. The time axis holds independent frames,
whose logits are averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from lrfdyn.attention import AttentionHost
from lrfdyn.errors import require
from lrfdyn.models.metaformer import MetaFormer, MetaFormerConfig, metaformer_keys
from lrfdyn.models.registry import register_model
from lrfdyn.nn.layers import ConvBN, MembraneBlock, MembraneConv, MembraneMLP, SpikingConv
from lrfdyn.nn.neurons import IntegerSpike
from lrfdyn.nn.sections import Section, residual_section


class SeparableConv(nn.Module):
    """A depth-wise convolution between two 1x1 convolutions, on potentials `[T, B, dim, H, W]`, each with a neuron and
    a batch norm."""

    def __init__(self, dim: int, kernel: int, neuron: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.expand = MembraneConv(dim, 2 * dim, neuron())
        self.depthwise = MembraneConv(2 * dim, 2 * dim, neuron(), kernel=kernel, groups=2 * dim)
        self.contract = MembraneConv(2 * dim, dim, neuron())

    def forward(self, x: Tensor) -> Tensor:
        return self.contract(self.depthwise(self.expand(x)))


def integer_conv(c_in: int, c_out: int, levels: int) -> SpikingConv:
    return SpikingConv(c_in, c_out, IntegerSpike(levels))


def integer_host(levels: int, head_width: int) -> AttentionHost:
    """What attentions with heads of `head_width` channels take from SDT-V3."""
    return AttentionHost(
        project=partial(integer_conv, levels=levels),
        project_out=ConvBN,
        neuron=partial(IntegerSpike, levels),
        fire=partial(IntegerSpike, levels),
        scale=2 * head_width**-0.5,
        value_ratio=4,
        spike_bits=levels.bit_length(),  # 0..levels
    )


class Block(MembraneBlock):
    """Residual separable convolution, attention and MLP on potentials `[T, B, C, H, W]`."""

    def __init__(
        self, separable: nn.Module, neuron: nn.Module, attn: nn.Module, mlp: MembraneMLP, drop_path: float
    ) -> None:
        super().__init__(neuron, attn, mlp, drop_path)
        self.separable = separable

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.drop_path(self.separable(x)))

    def sections(self, name: str) -> Iterator[Section]:
        """The separable convolution, attention and MLP as sections."""
        yield residual_section(f"{name}.separable", self.separable, self.mlp.fc2.conv.out_channels)
        yield from super().sections(name)


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
    """SDT-V3: images `[B, C, H, W]` or `[T, B, C, H, W]` to logits `[B, classes]`. Options are the fields of
    `SDTV3Config`."""

    config_class = SDTV3Config
    official_keys = metaformer_keys(
        {
            r"[Cc]onv\.pwconv1\.0": "separable.expand.conv",
            r"[Cc]onv\.pwconv1\.1": "separable.expand.bn",
            r"[Cc]onv\.dwconv\.0": "separable.depthwise.conv",
            r"[Cc]onv\.dwconv\.1": "separable.depthwise.bn",
            r"[Cc]onv\.pwconv2\.0": "separable.contract.conv",
            r"[Cc]onv\.pwconv2\.1": "separable.contract.bn",
            r"attn\.(?P<p>q|k|v|proj)_conv\.0": r"attn.\g<p>.conv",
            r"attn\.(?P<p>q|k|v|proj)_conv\.1": r"attn.\g<p>.bn",
        }
    )

    def __init__(self, **options: Any) -> None:
        config = SDTV3Config(**options)
        neuron = partial(IntegerSpike, config.levels)

        def separable(width: int, kernel: int) -> SeparableConv:
            return SeparableConv(width, kernel, neuron)

        def block(width: int, grid: tuple[int, int], drop_path: float) -> Block:
            heads = config.heads
            require(width % heads == 0, f"heads: expected a divisor of the width {width}, got {heads}")
            host = integer_host(config.levels, width // heads)
            first, spikes = separable(width, 3), neuron()
            attn = config.make_attention(width, grid, host)
            return Block(first, spikes, attn, MembraneMLP(width, config.hidden_width(width), neuron), drop_path)

        super().__init__(config, neuron, IntegerSpike(config.levels, normalize=False), separable, block)
