"""Spikformer (Zhou et al., 2023), ImageNet and CIFAR form, with any attention."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import mul
from typing import Any

from torch import Tensor, nn

from lrfdyn.attention import create_attention, lif_host
from lrfdyn.errors import require
from lrfdyn.models.base import SpikingModel, classifier
from lrfdyn.models.registry import register_model
from lrfdyn.nn.layers import DropPath, SpikingConv, drop_path_rates, hidden_width, init_weights
from lrfdyn.nn.neurons import LIF

IMAGENET_POOLING = (True, True, True, True)
CIFAR_POOLING = (False, False, True, True)


def stem_widths(dim: int) -> list[int]:
    require(dim >= 8 and dim % 8 == 0, f"dim: expected a multiple of 8 (the stem starts at dim / 8), got {dim}")
    return [dim // 8, dim // 4, dim // 2, dim]


def stem_strides(pooling: Sequence[bool]) -> list[int]:
    require(len(pooling) == 4, f"pooling: expected four booleans, got {tuple(pooling)}")
    return list(accumulate((2 if pool else 1 for pool in pooling), mul))


class Stem(nn.Module):
    """Four spiking 3x3 convolutions, max pools on spikes, and a convolution that stands for position."""

    def __init__(self, in_channels: int, dim: int, pooling: Sequence[bool]) -> None:
        super().__init__()
        widths = [in_channels, *stem_widths(dim)]
        self.pooling = tuple(pooling)
        self.stages = nn.ModuleList(SpikingConv(a, b, LIF(), kernel=3) for a, b in pairwise(widths))
        self.rpe = SpikingConv(dim, dim, LIF(), kernel=3)

    def forward(self, x: Tensor, only_last: bool = False) -> list[Tensor]:
        """The spikes of every stage, or only the last; the last with its position added."""
        maps = []
        for stage, pool in zip(self.stages, self.pooling, strict=True):
            x = stage(x, pool=pool)
            if not only_last:
                maps.append(x)
        return [*maps[:-1], self.rpe(x, residual=x)]


class MLP(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = SpikingConv(dim, hidden, LIF(), bias=True)
        self.fc2 = SpikingConv(hidden, dim, LIF(), bias=True)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        (hidden,), shortcut = SpikingConv.together([self.fc1], x)
        return self.fc2(hidden, residual=shortcut if residual is x else residual)


class Block(nn.Module):
    """Residual attention and MLP; branches carry spikes, so x is integer valued."""

    def __init__(self, attn: nn.Module, dim: int, mlp_ratio: float, drop_path: float) -> None:
        super().__init__()
        self.attn = attn
        self.mlp = MLP(dim, hidden_width(dim, mlp_ratio))
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.drop_path.rate > 0:
            x = x + self.drop_path(self.attn(x))
            return x + self.drop_path(self.mlp(x))
        x = self.attn(x, residual=x)
        return self.mlp(x, residual=x)


class Spikformer(SpikingModel):
    """`pooling` says which of the four stem stages halve the grid; `qkv_bias` is on in the CIFAR form."""

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

    def __init__(
        self,
        dim: int = 512,
        depth: int = 8,
        heads: int = 8,
        mlp_ratio: float = 4,
        pooling: Sequence[bool] = IMAGENET_POOLING,
        qkv_bias: bool = False,
        image_size: int = 224,
        in_channels: int = 3,
        num_classes: int = 1000,
        time_steps: int = 4,
        drop_path: float = 0.0,
        attention: str = "ssa",
        attention_options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(locals())
        self.describe_stages(stem_widths(dim), stem_strides(pooling), image_size)
        self.stem = Stem(in_channels, dim, pooling)
        host = lif_host(qkv_bias)
        options = attention_options or {}
        self.blocks = nn.ModuleList(
            Block(create_attention(attention, dim, heads, self.grid, host, **options), dim, mlp_ratio, rate)
            for rate in drop_path_rates(drop_path, depth)
        )
        self.head = classifier(dim, num_classes)
        init_weights(self)

    def forward_stages(self, x: Tensor, only_last: bool = False) -> list[Tensor]:
        *early, x = self.stem(x, only_last)
        for block in self.blocks:
            x = block(x)
        return [*early, x]

    def head_input(self, x: Tensor) -> Tensor:
        # Channels moved last, so that the gradient of the mean is laid out like x.
        return x.permute(0, 1, 3, 4, 2).mean((0, 2, 3))


@register_model
def spikformer_8_384(**options: Any) -> Spikformer:
    return Spikformer(**{"dim": 384, "depth": 8, "heads": 6, **options})


@register_model
def spikformer_8_512(**options: Any) -> Spikformer:
    return Spikformer(**{"dim": 512, "depth": 8, "heads": 8, **options})


@register_model
def spikformer_8_768(**options: Any) -> Spikformer:
    return Spikformer(**{"dim": 768, "depth": 8, "heads": 12, **options})


@register_model
def spikformer_4_384(**options: Any) -> Spikformer:
    """CIFAR form."""
    preset = {"dim": 384, "depth": 4, "heads": 12, "pooling": CIFAR_POOLING, "qkv_bias": True}
    return Spikformer(**{**preset, "image_size": 32, "num_classes": 100, **options})
