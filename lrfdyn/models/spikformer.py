"""Spikformer (Zhou et al., 2023), ImageNet, CIFAR and event-camera form, with any attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor, nn

from lrfdyn.attention import lif_host
from lrfdyn.errors import require
from lrfdyn.models.registry import register_model
from lrfdyn.models.transformer import CIFAR, CIFAR10_DVS, PlainTransformer, PlainTransformerConfig
from lrfdyn.nn.layers import DropPath, SpikingConv
from lrfdyn.nn.neurons import LIF
from lrfdyn.nn.sections import Section


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
        self.attn, self.mlp = attn, MLP(dim, hidden)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop_path.add(x, self.attn, x)
        return self.drop_path.add(x, self.mlp, x)

    def sections(self, name: str) -> Iterator[Section]:
        """Attention and MLP as sections; an attention that keeps to each token says so (`mixes_tokens = False`)."""
        attn, mlp, width = self.attn, self.mlp, self.mlp.fc2.conv.out_channels
        tiled = not getattr(attn, "mixes_tokens", True)
        yield Section(f"{name}.attn", lambda x: attn(x, residual=x), (attn,), width, "integers", tiled=tiled)
        yield Section(f"{name}.mlp", lambda x: mlp(x, residual=x), (mlp,), width, "integers")


@dataclass
class SpikformerConfig(PlainTransformerConfig):
    """The options of Spikformer."""

    qkv_bias: bool = False
    """Biases in the convolutions that make q, k and v, as the CIFAR form has them."""
    attention_scale: float = 0.125
    """s, what an unnormalised attention is multiplied by; the event-camera form has 0.25."""

    def __post_init__(self) -> None:
        super().__post_init__()
        positive = self.attention_scale > 0
        require(positive, f"attention_scale: expected a positive number, got {self.attention_scale}")


@register_model("spikformer_8_384", dim=384, depth=8, heads=6)
@register_model("spikformer_8_512", dim=512, depth=8, heads=8)
@register_model("spikformer_8_768", dim=768, depth=8, heads=12)
@register_model("spikformer_4_384", dim=384, depth=4, heads=12, qkv_bias=True, **CIFAR)
@register_model("spikformer_dvs_2_256", dim=256, depth=2, heads=16, attention_scale=0.25, **CIFAR10_DVS)
class Spikformer(PlainTransformer):
    """Spikformer: images `[B, C, H, W]` or `[T, B, C, H, W]` to logits `[B, classes]`. Its shortcuts carry sums of
    spikes. Options are the fields of `SpikformerConfig`."""

    config_class = SpikformerConfig
    official_keys = (
        (r"^(block\.\d+\.norm[12]|norm)\.", None),
        (r"^pos_embed$", None),
        (r"^patch_embed\.proj_(conv|bn)\.", r"stem.stages.0.\1."),
        (r"^patch_embed\.proj_(conv|bn)(\d)\.", r"stem.stages.\2.\1."),
        (r"^patch_embed\.", "stem."),
        (r"^block\.", "blocks."),
        (r"_(conv|bn)\.", r".\1."),
        (r"_linear\.", ".conv."),
    )

    def make_block(self, config: SpikformerConfig, drop_path: float) -> Block:
        host = replace(lif_host(config.qkv_bias), scale=config.attention_scale)
        attn = config.make_attention(config.dim, self.grid, host)
        return Block(attn, config.dim, config.hidden_width(config.dim), drop_path)
