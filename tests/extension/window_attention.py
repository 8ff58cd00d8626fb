"""What somebody else might write: two attentions, a model and a data set in a package of their own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import lrfdyn
from lrfdyn.attention import Attention, AttentionHost, Operations, StateTerm, lif_host
from lrfdyn.attention.base import Grid, Spikes, WeightBlocks
from lrfdyn.data import Augmentation
from lrfdyn.data.resident import ResidentData
from lrfdyn.models import SpikingModel
from lrfdyn.models.base import classifier
from lrfdyn.models.transformer import TransformerConfig
from lrfdyn.nn.layers import SpikingConv, init_weights
from lrfdyn.nn.neurons import LIF


@lrfdyn.register_attention("window", label="Window")
class WindowAttention(Attention):
    """Every token is the sum of the values in the square window around it: all that an attention can say of itself."""

    projections = ("v",)
    fixed_mixing = True

    def __init__(self, dim: int, heads: int, grid: Grid, host: AttentionHost, size: int = 3) -> None:
        super().__init__(dim, heads, grid, host)
        self.size = size
        self.gain = torch.nn.Parameter(torch.full((self.value_dim, 1, 1), 0.5))

    without_weight_decay = ("gain",)

    def mix(self, *spikes: Tensor) -> Tensor:
        (v,) = spikes
        sums = F.avg_pool2d(v.flatten(0, 1), self.size, 1, self.size // 2, divisor_override=1)
        return self.gain * sums.unflatten(0, v.shape[:2])

    def mixing_weights(self, spikes: Spikes, grid: Grid, block: int) -> WeightBlocks:
        row = torch.arange(grid[0] * grid[1], device=self.gain.device)
        near = [(at.unsqueeze(1) - at).abs() <= self.size // 2 for at in (row // grid[1], row % grid[1])]
        yield range(len(row)), (near[0] & near[1]).float().unsqueeze(0) * self.gain.abs().mean()

    def operation_counts(self, spikes: Spikes, grid: Grid) -> dict[str, Operations]:
        (weights,) = (weights[0] for _, weights in self.mixing_weights(spikes, grid, 1))
        reached = (weights > 0).sum(0).unflatten(0, grid)
        return {"window": Operations((spikes["v"] * reached).sum())}

    def state_terms(self, grid: Grid | None = None) -> list[StateTerm]:
        height, width = grid or self.grid
        rows = min(self.size, height)
        return [StateTerm("line buffers", f"{rows} rows of W d", rows * width * self.value_dim, self.spike_bits)]


@lrfdyn.register_attention("bare")
class BareAttention(Attention):
    """q * mean(k * v), and not a word about itself."""

    def mix(self, *spikes: Tensor) -> Tensor:
        q, k, v = spikes
        return self.widen(q) * (self.widen(k) * v).mean((3, 4), keepdim=True)


@dataclass
class OneBlockConfig(TransformerConfig):
    """The options of the model: those of every transformer, and its width."""

    dim: int = 32
    attention: str = "window"


@lrfdyn.register_model("one_block_16", dim=16, heads=2, image_size=8)
class OneBlock(SpikingModel):
    """A convolution and an attention."""

    config_class = OneBlockConfig

    def __init__(self, **options: Any) -> None:
        config = OneBlockConfig(**options)
        super().__init__(config)
        self.describe_stages([config.dim], [2], config.image_size)
        self.stem = SpikingConv(config.in_channels, config.dim, LIF(), kernel=3)
        self.attn = config.make_attention(config.dim, self.grid, lif_host())
        self.head = classifier(config.dim, config.num_classes)
        init_weights(self)

    def forward_stages(self, x: Tensor, only_last: bool = False) -> list[Tensor]:
        x = self.stem(x, pool=True)
        return [self.attn(x, residual=x)]

    def head_input(self, x: Tensor) -> Tensor:
        return x.mean((3, 4))


@lrfdyn.register_data("stripes")
class Stripes(ResidentData):
    """Grey images of 8x8 pixels with lying or standing stripes and noise, made on the spot."""

    needs_root = False
    num_classes, image_size, in_channels, train_images = 2, 8, 1, 128
    class_names = ("lying", "standing")

    def __init__(self, root: Path | None, augment: Augmentation) -> None:
        generator = torch.Generator().manual_seed(0)
        labels = torch.arange(160) % 2
        rows = (torch.arange(8) % 2).float().expand(8, 8)
        clean = torch.where(labels.bool().view(-1, 1, 1, 1), rows, rows.T)
        images = 100 * clean + 50 * torch.rand(clean.shape, generator=generator)
        self.mean, self.deviation = (0.3,), (0.2,)
        super().__init__((images[:128], labels[:128]), (images[128:], labels[128:]), augment)
