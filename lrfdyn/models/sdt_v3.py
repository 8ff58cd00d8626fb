"""SDT-V3, E-SpikeFormer (Yao et al., 2025), with any attention.

Its neuron has no state: an integer spike stands for `levels` binary steps. The time axis holds independent frames,
whose logits are averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from lrfdyn.attention import AttentionHost
from lrfdyn.models.metaformer import DEPTHS, MetaFormer, metaformer_keys
from lrfdyn.models.registry import register_model
from lrfdyn.nn.layers import ConvBN, MembraneBlock, MembraneConv, SpikingConv
from lrfdyn.nn.neurons import IntegerSpike


class SeparableConv(nn.Module):
    """Batch norm and a neuron around the depth-wise convolution too."""

    def __init__(self, dim: int, kernel: int, neuron: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.expand = MembraneConv(dim, 2 * dim, neuron())
        self.depthwise = MembraneConv(2 * dim, 2 * dim, neuron(), kernel=kernel, groups=2 * dim)
        self.contract = MembraneConv(2 * dim, dim, neuron())

    def forward(self, x: Tensor) -> Tensor:
        return self.contract(self.depthwise(self.expand(x)))


def integer_conv(c_in: int, c_out: int, levels: int) -> SpikingConv:
    return SpikingConv(c_in, c_out, IntegerSpike(levels))


class Block(MembraneBlock):
    """Residual separable convolution, attention and MLP."""

    def __init__(
        self, separable: nn.Module, neuron: nn.Module, attn: nn.Module, mlp: nn.Module, drop_path: float
    ) -> None:
        super().__init__(neuron, attn, mlp, drop_path)
        self.separable = separable

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.drop_path(self.separable(x)))


class SDTV3(MetaFormer):
    """`levels` is D, the largest integer a neuron sends."""

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

    def __init__(
        self,
        widths: Sequence[int] = (32, 64, 128, 192),
        depths: Sequence[int] = DEPTHS,
        heads: int = 8,
        mlp_ratio: float = 4,
        levels: int = 4,
        image_size: int = 224,
        in_channels: int = 3,
        num_classes: int = 1000,
        time_steps: int = 1,
        drop_path: float = 0.0,
        attention: str = "ssa",
        attention_options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(locals())

    def make_neuron(self) -> nn.Module:
        return IntegerSpike(self.config["levels"])

    def make_head_neuron(self) -> nn.Module:
        return IntegerSpike(self.config["levels"], normalize=False)

    def make_separable(self, width: int, kernel: int) -> nn.Module:
        return SeparableConv(width, kernel, self.make_neuron)

    def make_attention_block(self, width: int, drop_path: float) -> nn.Module:
        return Block(self.make_separable(width, 3), *self.make_branches(width), drop_path)

    def attention_host(self, head_width: int) -> AttentionHost:
        levels = self.config["levels"]
        return AttentionHost(
            project=partial(integer_conv, levels=levels),
            project_out=ConvBN,
            neuron=partial(IntegerSpike, levels),
            fire=partial(IntegerSpike, levels),
            scale=2 * head_width**-0.5,
            value_ratio=4,
            spike_bits=levels.bit_length(),  # 0..levels
        )


@register_model
def sdt_v3_t(**options: Any) -> SDTV3:
    return SDTV3(**{"widths": (24, 48, 96, 128), **options})


@register_model
def sdt_v3_s(**options: Any) -> SDTV3:
    return SDTV3(**{"widths": (32, 64, 128, 192), **options})


@register_model
def sdt_v3_m(**options: Any) -> SDTV3:
    return SDTV3(**{"widths": (48, 96, 192, 240), **options})


@register_model
def sdt_v3_l(**options: Any) -> SDTV3:
    return SDTV3(**{"widths": (64, 128, 256, 360), **options})
