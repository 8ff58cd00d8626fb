"""Spikformer (Zhou et al., 2023), ImageNet and CIFAR form, with any attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

from torch import Tensor, nn

from lrfdyn.attention import lif_host
from lrfdyn.models.registry import register_model
from lrfdyn.models.transformer import CIFAR, PlainTransformer, PlainTransformerConfig, stem_widths
from lrfdyn.nn.layers import ConvBN, DropPath, SpikingConv
from lrfdyn.nn.neurons import LIF
from lrfdyn.nn.sections import Section, mixes_tokens


class Stem(nn.Module):
    """Four spiking 3x3 convolutions, max pools on spikes, and a convolution that stands for position.

    Images `[T, B, in_channels, H, W]` become sums of spikes `[T, B, dim, H / stride, W / stride]`.
    """

    rpe: ConvBN
    position_holds: ClassVar[str] = "integers"

    def __init__(self, in_channels: int, dim: int, pooling: Sequence[bool]) -> None:
        super().__init__()
        self.pooling = tuple(pooling)
        self.make_layers([in_channels, *stem_widths(dim)])

    def make_layers(self, widths: Sequence[int]) -> None:
        self.stages = nn.ModuleList(SpikingConv(a, b, LIF(), kernel=3) for a, b in pairwise(widths))
        self.rpe = SpikingConv(widths[-1], widths[-1], LIF(), kernel=3)

    def forward(self, x: Tensor, only_last: bool = False) -> list[Tensor]:
        """The maps of all stages, or with `only_last` that of the last; the last has its position added."""
        maps = []
        for stage, pool in zip(self.stages, self.pooling, strict=True):
            x = self.run_stage(stage, x, pool)
            if not only_last:
                maps.append(x)
        return [*maps[:-1], self.add_position(x)]

    def run_stage(self, stage: nn.Module, x: Tensor, pool: bool) -> Tensor:
        return stage(x, pool=pool)

    def add_position(self, x: Tensor) -> Tensor:
        return self.rpe(x, residual=x)

    def sections(self, name: str) -> Iterator[Section]:
        """Every convolution is a section."""
        stages: Any = self.stages
        for i, (stage, pool) in enumerate(zip(stages, self.pooling, strict=True)):
            yield stage.section(f"{name}.stages.{i}", pool)
        width = self.rpe.conv.out_channels
        yield Section(f"{name}.rpe", self.add_position, (self.rpe,), width, self.position_holds, halo=1)


class MLP(nn.Module):
    """Two spiking 1x1 convolutions with bias: `[T, B, dim, H, W]` to spikes of the same shape, plus a `residual`."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = SpikingConv(dim, hidden, LIF(), bias=True)
        self.fc2 = SpikingConv(hidden, dim, LIF(), bias=True)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        (hidden,), shortcut = SpikingConv.together([self.fc1], x)
        return self.fc2(hidden, residual=shortcut if residual is x else residual)


class Block(nn.Module):
    """Residual attention and MLP on `[T, B, dim, H, W]`. Branches carry spikes, so that sums are integers."""

    def __init__(self, attn: nn.Module, dim: int, hidden: int, drop_path: float) -> None:
        super().__init__()
        self.attn = attn
        self.mlp = MLP(dim, hidden)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.drop_path.rate > 0:
            x = x + self.drop_path(self.attn(x))
            return x + self.drop_path(self.mlp(x))
        x = self.attn(x, residual=x)
        return self.mlp(x, residual=x)

    def sections(self, name: str) -> Iterator[Section]:
        """Attention and MLP as sections."""
        attn, mlp, width = self.attn, self.mlp, self.mlp.fc2.conv.out_channels
        tiled = not mixes_tokens(attn)
        yield Section(f"{name}.attn", lambda x: attn(x, residual=x), (attn,), width, "integers", tiled=tiled)
        yield Section(f"{name}.mlp", lambda x: mlp(x, residual=x), (mlp,), width, "integers")


@dataclass
class SpikformerConfig(PlainTransformerConfig):
    """The options of Spikformer."""

    qkv_bias: bool = False
    """Biases in the convolutions that make q, k and v, as the CIFAR form has them."""


@register_model("spikformer_8_384", dim=384, depth=8, heads=6)
@register_model("spikformer_8_512", dim=512, depth=8, heads=8)
@register_model("spikformer_8_768", dim=768, depth=8, heads=12)
@register_model("spikformer_4_384", dim=384, depth=4, heads=12, qkv_bias=True, **CIFAR)
class Spikformer(PlainTransformer):
    """Spikformer: images `[B, C, H, W]` or `[T, B, C, H, W]` to logits `[B, classes]`. Its shortcuts carry sums of
    spikes. Options are the fields of `SpikformerConfig`."""

    config_class = SpikformerConfig
    official_keys = (
        (r"^patch_embed\.proj_(conv|bn)(\d)\.", r"stem.stages.\2.\1."),
        (r"^patch_embed\.proj_(conv|bn)\.", r"stem.stages.0.\1."),
        (r"^patch_embed\.rpe_(conv|bn)\.", r"stem.rpe.\1."),
        (r"^block\.\d+\.norm[12]\..*", None),
        (r"^block\.(\d+)\.attn\.(q|k|v|proj)_(?:conv|linear)\.", r"blocks.\1.attn.\2.conv."),
        (r"^block\.(\d+)\.attn\.(q|k|v|proj)_bn\.", r"blocks.\1.attn.\2.bn."),
        (r"^block\.(\d+)\.mlp\.(fc1|fc2)_(?:conv|linear)\.", r"blocks.\1.mlp.\2.conv."),
        (r"^block\.(\d+)\.mlp\.(fc1|fc2)_bn\.", r"blocks.\1.mlp.\2.bn."),
    )

    def __init__(self, **options: Any) -> None:
        config = SpikformerConfig(**options)
        host, dim = lif_host(config.qkv_bias), config.dim

        def block(grid: tuple[int, int], drop_path: float) -> Block:
            return Block(config.make_attention(dim, grid, host), dim, config.hidden_width(dim), drop_path)

        super().__init__(config, Stem, block)

    def head_input(self, x: Tensor) -> Tensor:
        # Channels moved last, so that the gradient of the mean is laid out like x.
        return x.permute(0, 1, 3, 4, 2).mean((0, 2, 3))
