"""What SDT-V2 and SDT-V3 share: stages of convolution and of attention blocks, with potentials on the shortcuts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn

from lrfdyn.errors import require
from lrfdyn.models.base import SpikingModel, classifier
from lrfdyn.models.transformer import TransformerConfig
from lrfdyn.nn.layers import ConvBN, MembraneConv, add_output, drop_path_rates, init_weights
from lrfdyn.nn.neurons import LIF
from lrfdyn.nn.sections import Section, residual_section, row_halo, sections_of

STRIDES = (2, 2, 2, 1)  # of the stages behind the first
CONV_STAGES = 3

# The places in the official networks, and what both call the layers in a block: see `SpikingModel.official_keys`.
OFFICIAL_KEYS = (
    *((rf"^downsample{name}\.encode_", f"stages.{i}.down.") for i, name in enumerate(("1_1", "1_2", "2", "3", "4"))),
    (r"^ConvBlock1_1\.", "stages.0.blocks."),
    (r"^ConvBlock1_2\.", "stages.1.blocks."),
    (r"^ConvBlock2_1\.", "stages.2.blocks."),
    (r"^ConvBlock2_2\.0", "stages.2.blocks.1"),
    (r"^block([34])\.", r"stages.\1.blocks."),
    (r"(blocks\.\d+)\.(conv|bn)([12])\.", r"\1.conv\3.\2."),
    (r"mlp\.fc([12])_", r"mlp.fc\1."),
)


class ConvBlock(nn.Module):
    """A residual separable convolution, then two residual 3x3 convolutions, on potentials `[T, B, dim, H, W]`."""

    def __init__(self, separable: nn.Module, dim: int, hidden: int, neuron: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.separable = separable
        self.conv1 = MembraneConv(dim, hidden, neuron(), kernel=3)
        self.conv2 = MembraneConv(hidden, dim, neuron(), kernel=3)

    def forward(self, x: Tensor) -> Tensor:
        x = add_output(x, self.separable, x)
        return MembraneConv.chain([self.conv1, self.conv2], x, residual=x)

    def sections(self, name: str) -> Iterator[Section]:
        """The separable convolution and the other two as sections."""
        conv1, conv2, width = self.conv1, self.conv2, self.conv2.conv.out_channels
        yield residual_section(f"{name}.separable", self.separable, width)
        halo = row_halo(conv1) + row_halo(conv2)
        yield Section(f"{name}.convs", lambda x: x + conv2(conv1(x)), (conv1, conv2), width, "numbers", halo=halo)


@dataclass
class MetaFormerConfig(TransformerConfig):
    """The options that SDT-V2 and SDT-V3 share; `drop_path` grows over the attention blocks."""

    time_steps: int = 1
    widths: Sequence[int] = (64, 128, 256, 360)
    """Channels of the last four stages; the first has half of `widths[0]`."""
    depths: Sequence[int] = (1, 1, 2, 6, 2)
    """Number of blocks in each of the five stages; these are those of the official networks."""
    stem_stride: int = 2
    """What the first convolution divides the grid by; with 1 images of 64 x 64 leave 8 x 8 tokens."""


class MetaFormer(SpikingModel):
    """Three stages of convolution blocks with a branch `separable(width, kernel, neuron)`, two of attention blocks."""

    config_class: ClassVar[type[MetaFormerConfig]]
    separable: ClassVar[type[nn.Module]]
    make_block: Callable[[Any, int, float], nn.Module]  # of attention: configuration, width and drop rate

    def __init__(self, **options: Any) -> None:
        config = self.config_class(**options)
        super().__init__(config)
        widths, depths = tuple(config.widths), tuple(config.depths)
        require(len(widths) == 4 and min(widths) >= 1, f"widths: expected four integers >= 1, got {widths}")
        require(widths[0] % 2 == 0, f"widths: expected an even first width (the network starts at half), got {widths}")
        require(len(depths) == 5 and min(depths) >= 1, f"depths: expected five integers >= 1, got {depths}")
        first, stage_widths = config.stem_stride, (widths[0] // 2, *widths)
        require(first in (1, 2), f"stem_stride: expected 1 or 2, got {first}")
        seen = [*stage_widths[:CONV_STAGES], widths[-1]]
        self.describe_stages(seen, [first * 2**i for i in range(len(seen))], config.image_size)

        neuron = partial(self.make_neuron, config)
        rates = iter(drop_path_rates(config.drop_path, sum(depths[CONV_STAGES:])))

        def block(stage: int, width: int) -> nn.Module:
            if stage >= CONV_STAGES:
                return self.make_block(config, width, next(rates))
            return ConvBlock(self.separable(width, 7, neuron), width, config.hidden_width(width), neuron)

        self.stages = nn.ModuleList()
        before = self.in_channels
        for i, (width, depth, stride) in enumerate(zip(stage_widths, depths, (first, *STRIDES), strict=True)):
            if i == 0:
                down = ConvBN(before, width, kernel=7, stride=stride, bias=True)
            else:
                down = MembraneConv(before, width, neuron(), kernel=3, stride=stride, bias=True)
            blocks = nn.Sequential(*(block(i, width) for _ in range(depth)))
            self.stages.append(nn.Sequential(OrderedDict(down=down, blocks=blocks)))
            before = width
        self.neuron = self.make_neuron(config, head=True)
        self.head = classifier(widths[-1], config.num_classes)
        init_weights(self)

    def make_neuron(self, config: Any, head: bool = False) -> nn.Module:
        """A neuron, or that in front of the classifier."""
        return LIF()

    def forward_stages(self, x: Tensor, only_last: bool = False) -> list[Tensor]:
        maps = self.run_stages(x, only_last)
        return maps if only_last else [*maps[:-2], maps[-1]]  # the last two stages are on the same grid

    def head_input(self, x: Tensor, each_step: bool = False) -> Tensor:
        return self.neuron(x.mean((3, 4)))

    def sections(self) -> Iterator[Section]:
        for i, stage in enumerate(self.stages):
            yield stage.down.section(f"stages.{i}.down")
            yield from sections_of(f"stages.{i}.blocks", stage.blocks)
