"""What the transformer hosts share: their options, and the networks of a stem and equal blocks on one grid."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul
from typing import Any, ClassVar

from torch import Tensor, nn

from lrfdyn.attention import Attention, AttentionHost, create_attention
from lrfdyn.errors import require
from lrfdyn.models.base import LIMITS, ModelConfig, SpikingModel, classifier
from lrfdyn.nn.layers import ConvBN, MembraneConv, SpikingConv, add_output, drop_path_rates, init_weights
from lrfdyn.nn.neurons import LIF
from lrfdyn.nn.sections import Section, sections_of

CIFAR_POOLING = (False, False, True, True)
CIFAR: dict[str, Any] = {"pooling": CIFAR_POOLING, "image_size": 32, "num_classes": 100}
# Counts of the events of both signs, in as many frames as there are time steps.
CIFAR10_DVS: dict[str, Any] = {"in_channels": 2, "image_size": 128, "num_classes": 10, "time_steps": 16}
GESTURE = {**CIFAR10_DVS, "num_classes": 11}


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
        """The width between the two layers of an MLP on `width` channels."""
        hidden, most = width * self.mlp_ratio, LIMITS["dim"][1]
        require(hidden >= 1, f"mlp_ratio: expected a positive number, got {self.mlp_ratio}")
        require(hidden <= most, f"mlp_ratio: expected at most {most} channels, got {width} x {self.mlp_ratio:g}")
        return int(hidden)


@dataclass
class PlainTransformerConfig(TransformerConfig):
    """The options of hosts that have one grid and one width behind their stem."""

    dim: int = 512
    """Channels of the blocks."""
    depth: int = 8
    """Number of blocks."""
    pooling: Sequence[bool] = (True, True, True, True)
    """Which of the four stages of the stem halve the grid."""


def stem_widths(dim: int, parts: int = 8) -> list[int]:
    """The channels of the stages of a stem, which double from `dim / parts` up to `dim`: four for 8 parts."""
    fits = dim >= parts and dim % parts == 0
    require(fits, f"dim: expected a multiple of {parts} (the stem starts at dim / {parts}), got {dim}")
    return [dim // parts * 2**i for i in range(parts.bit_length())]


class Stem(nn.Module):
    """Four spiking 3x3 convolutions, max pools on spikes, and a convolution that stands for position: images
    `[T, B, in_channels, H, W]` become sums of spikes `[T, B, dim, H / stride, W / stride]`, or with `membrane`
    potentials, where the last convolution has no neuron. `neuron` makes what follows a convolution."""

    def __init__(
        self, in_channels: int, dim: int, pooling: Sequence[bool], membrane: bool, neuron: Callable[[], nn.Module] = LIF
    ) -> None:
        super().__init__()
        self.pooling, self.membrane = tuple(pooling), membrane
        *pairs, last = pairwise([in_channels, *stem_widths(dim)])
        stages = [SpikingConv(*pair, neuron(), kernel=3) for pair in pairs]
        final = ConvBN(*last, kernel=3) if membrane else SpikingConv(*last, neuron(), kernel=3)
        self.stages = nn.ModuleList([*stages, final])
        self.rpe = (MembraneConv if membrane else SpikingConv)(dim, dim, neuron(), kernel=3)

    def forward(self, x: Tensor, only_last: bool = False) -> list[Tensor]:
        """The maps of all stages, or with `only_last` that of the last; the last has its position added."""
        maps = []
        for stage, pool in zip(self.stages, self.pooling, strict=True):
            x = stage(x, pool=pool)
            if not only_last:
                maps.append(x)
        return [*maps[:-1], self.add_position(x)]

    def add_position(self, x: Tensor) -> Tensor:
        return add_output(x, self.rpe, x)

    def sections(self, name: str) -> Iterator[Section]:
        """Every convolution is a section."""
        stages: Any = self.stages
        for i, (stage, pool) in enumerate(zip(stages, self.pooling, strict=True)):
            yield stage.section(f"{name}.stages.{i}", pool)
        width, holds = self.rpe.conv.out_channels, "numbers" if self.membrane else "integers"
        yield Section(f"{name}.rpe", self.add_position, (self.rpe,), width, holds, halo=1)


class PlainTransformer(SpikingModel):
    """A stem and blocks that keep its grid and width. With `membrane`, shortcuts carry potentials, and the classifier
    takes the spikes of their means."""

    config_class: ClassVar[type[PlainTransformerConfig]]
    membrane: ClassVar[bool] = False
    activation: ClassVar[Callable[[], nn.Module]] = LIF  # of the stem
    make_block: Callable[[Any, float], nn.Module]  # of the configuration and the drop rate

    def __init__(self, **options: Any) -> None:
        config = self.config_class(**options)
        super().__init__(config)
        widths, pooling = stem_widths(config.dim), config.pooling
        require(len(pooling) == 4, f"pooling: expected four booleans, got {tuple(pooling)}")
        strides = list(accumulate((2 if pool else 1 for pool in pooling), mul))
        self.describe_stages(widths, strides, config.image_size)
        self.stem = Stem(config.in_channels, config.dim, pooling, self.membrane, type(self).activation)
        rates = drop_path_rates(config.drop_path, config.depth)
        self.blocks = nn.ModuleList(self.make_block(config, rate) for rate in rates)
        self.head = classifier(config.dim, config.num_classes)
        self.neuron = LIF() if self.membrane else None
        init_weights(self)

    def forward_stages(self, x: Tensor, only_last: bool = False) -> list[Tensor]:
        *early, x = self.stem(x, only_last)
        for block in self.blocks:
            x = block(x)
        return [*early, x]

    def head_input(self, x: Tensor, each_step: bool = False) -> Tensor:
        return super().head_input(x, each_step) if self.neuron is None else self.neuron(x.mean((3, 4)))

    def head_map(self, x: Tensor) -> Tensor | None:
        return x if self.spiking and self.neuron is None else None

    def sections(self) -> Iterator[Section]:
        yield from self.stem.sections("stem")
        yield from sections_of("blocks", self.blocks)
