"""A vision transformer without spikes, of the size of Spikformer: the reference of the paper's analysis."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lrfdyn.attention import AttentionHost
from lrfdyn.models.base import SpikingModel, shown_once
from lrfdyn.models.registry import register_model
from lrfdyn.models.transformer import CIFAR, PlainTransformer, PlainTransformerConfig
from lrfdyn.nn.layers import DropPath, convolve
from lrfdyn.nn.sections import Section


class TokenLinear(nn.Module):
    """A linear layer with bias on the channels of `[T, B, c_in, H, W]`."""

    def __init__(self, c_in: int, c_out: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(c_in, c_out, 1)

    def forward(self, x: Tensor) -> Tensor:
        return convolve(self.conv, x)


class TokenNorm(nn.LayerNorm):
    """A layer norm over the channels of `[T, B, C, H, W]`."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(2, -1)).movedim(-1, 2)


class ViTBlock(nn.Module):
    """x + attention(norm(x)), then x + MLP(norm(x)), on `[T, B, dim, H, W]`."""

    def __init__(self, attn: nn.Module, dim: int, hidden: int, drop_path: float) -> None:
        super().__init__()
        self.norm1, self.attn = TokenNorm(dim), attn
        self.norm2 = TokenNorm(dim)
        self.mlp = nn.Sequential(TokenLinear(dim, hidden), nn.GELU(), TokenLinear(hidden, dim))
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path(self.attn(self.norm1(x)))
        return x + self.drop_path(self.mlp(self.norm2(x)))


@dataclass
class ViTConfig(PlainTransformerConfig):
    """The options of the vision transformer."""

    time_steps: int = 1
    """Always 1: without spikes, every time step would compute the same."""
    attention: str = "vsa"
    """Always "vsa", softmax attention: the other kinds work on spikes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        shown_once(self.time_steps)


@register_model("vit_4_384", dim=384, depth=4, heads=12, **CIFAR)
class ViT(PlainTransformer):
    """A vision transformer: images `[B, C, H, W]` to logits `[B, classes]`. The stem is that of Spikformer with ReLUs
    in the place of its neurons; the blocks are those of ViT: layer norms in front, linear q, k and v, softmax
    attention, GELUs, and a layer norm in front of the classifier. Options are the fields of `ViTConfig`."""

    config_class = ViTConfig
    spiking = False
    activation = nn.ReLU

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.norm = TokenNorm(self.num_features)

    def make_block(self, config: ViTConfig, drop_path: float) -> ViTBlock:
        host = AttentionHost(TokenLinear, TokenLinear, nn.Identity, nn.Identity, spiking=False)
        attn = config.make_attention(config.dim, self.grid, host)
        return ViTBlock(attn, config.dim, config.hidden_width(config.dim), drop_path)

    def head_input(self, x: Tensor, each_step: bool = False) -> Tensor:
        return super().head_input(self.norm(x), each_step)

    def sections(self) -> Iterator[Section]:
        return SpikingModel.sections(self)  # in one piece: there are no spikes to hold as bits
