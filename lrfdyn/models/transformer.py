"""What the transformer hosts share: their options, and the networks of a stem and equal blocks on one grid."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Any

from torch import Tensor, nn

from lrfdyn.attention import Attention, AttentionHost, create_attention
from lrfdyn.errors import require
from lrfdyn.models.base import ModelConfig, SpikingModel, classifier
from lrfdyn.nn.layers import drop_path_rates, hidden_width, init_weights
from lrfdyn.nn.sections import Section, sections_of

IMAGENET_POOLING = (True, True, True, True)
CIFAR_POOLING = (False, False, True, True)
CIFAR: dict[str, Any] = {"pooling": CIFAR_POOLING, "image_size": 32, "num_classes": 100}


@dataclass
class TransformerConfig(ModelConfig):
    """The options of every transformer host."""

    image_size: int = 224
    """Height and width of the images that the model is laid out for; others may still be shown."""
    heads: int = 8
    """Attention heads."""
    mlp_ratio: float = 4
    """Width of the hidden layer of an MLP over that of its input."""
    drop_path: float = 0.0
    """Stochastic depth: the drop rate of the last block. Rates grow linearly from 0 at the first one."""
    attention: str = "ssa"
    """Kind of the attention layers, one of `lrfdyn.ATTENTIONS`."""
    attention_options: dict[str, Any] | None = None
    """Options of that kind, such as `dilations`."""

    def make_attention(self, width: int, grid: tuple[int, int], host: AttentionHost) -> Attention:
        """An attention layer of the configured kind for `[T, B, width, H, W]`."""
        return create_attention(self.attention, width, self.heads, grid, host, **(self.attention_options or {}))

    def hidden_width(self, width: int) -> int:
        """The width of the hidden layer of an MLP on `width` channels."""
        return hidden_width(width, self.mlp_ratio)


@dataclass
class PlainTransformerConfig(TransformerConfig):
    """The options of hosts that have one grid and one width behind their stem."""

    dim: int = 512
    """Channels of the blocks."""
    depth: int = 8
    """Number of blocks."""
    pooling: Sequence[bool] = IMAGENET_POOLING
    """Which of the four stages of the stem halve the grid."""


def stem_widths(dim: int) -> list[int]:
    """The channels of the four stages of a stem, which double up to `dim`."""
    require(dim >= 8 and dim % 8 == 0, f"dim: expected a multiple of 8 (the stem starts at dim / 8), got {dim}")
    return [dim // 8, dim // 4, dim // 2, dim]


def stem_strides(pooling: Sequence[bool]) -> list[int]:
    """The strides of the four stages of a stem."""
    require(len(pooling) == 4, f"pooling: expected four booleans, got {tuple(pooling)}")
    return list(accumulate((2 if pool else 1 for pool in pooling), mul))


class PlainTransformer(SpikingModel):
    """A stem and blocks that keep its grid and width.

    `stem(in_channels, dim, pooling)` makes the stem, which gives the maps of its four stages, and `block(grid,
    drop_path)` makes a block.
    """

    def __init__(
        self,
        config: PlainTransformerConfig,
        stem: Callable[[int, int, Sequence[bool]], nn.Module],
        block: Callable[[tuple[int, int], float], nn.Module],
    ) -> None:
        super().__init__(config)
        self.describe_stages(stem_widths(config.dim), stem_strides(config.pooling), config.image_size)
        self.stem = stem(config.in_channels, config.dim, config.pooling)
        self.blocks = nn.ModuleList(block(self.grid, rate) for rate in drop_path_rates(config.drop_path, config.depth))
        self.head = classifier(config.dim, config.num_classes)
        init_weights(self)

    def forward_stages(self, x: Tensor, only_last: bool = False) -> list[Tensor]:
        *early, x = self.stem(x, only_last)
        for block in self.blocks:
            x = block(x)
        return [*early, x]

    def sections(self) -> Iterator[Section]:
        stem: Any = self.stem
        yield from stem.sections("stem")
        yield from sections_of("blocks", self.blocks)
