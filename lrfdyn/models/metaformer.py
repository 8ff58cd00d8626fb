"""What SDT-V2 and SDT-V3 share: three stages of convolution blocks, then two of attention blocks.

Residual streams carry membrane potentials; every branch starts with a neuron and ends in a batch norm.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

from torch import Tensor, nn

from lrfdyn.attention import AttentionHost, create_attention
from lrfdyn.errors import require
from lrfdyn.models.base import SpikingModel, classifier
from lrfdyn.nn.layers import (
    ConvBN,
    MembraneBlock,
    MembraneConv,
    MembraneMLP,
    drop_path_rates,
    hidden_width,
    init_weights,
    run_stages,
)

DEPTHS = (1, 1, 2, 6, 2)  # of the official networks
STRIDES = (2, 2, 2, 2, 1)
CONV_STAGES = 3

_OFFICIAL_STEMS = {f"downsample{name}": f"stages.{i}.down" for i, name in enumerate(("1_1", "1_2", "2", "3", "4"))}
_OFFICIAL_BLOCKS = {
    r"ConvBlock1_1\.0": "stages.0.blocks.0",
    r"ConvBlock1_2\.0": "stages.1.blocks.0",
    r"ConvBlock2_1\.0": "stages.2.blocks.0",
    r"ConvBlock2_2\.0": "stages.2.blocks.1",
    r"block3\.(?P<block>\d+)": r"stages.3.blocks.\g<block>",
    r"block4\.(?P<block>\d+)": r"stages.4.blocks.\g<block>",
}
_OFFICIAL_LAYERS = {
    r"(?P<part>conv|bn)(?P<n>[12])": r"conv\g<n>.\g<part>",
    r"mlp\.fc(?P<n>[12])_(?P<part>conv|bn)": r"mlp.fc\g<n>.\g<part>",
}


def metaformer_keys(layers: dict[str, str]) -> tuple[tuple[str, str], ...]:
    """Official keys to ours; `layers` are those inside a block that the two versions name differently."""
    stems = product(_OFFICIAL_STEMS.items(), [(r"encode_(?P<part>conv|bn)", r"\g<part>")])
    blocks = product(_OFFICIAL_BLOCKS.items(), [*_OFFICIAL_LAYERS.items(), *layers.items()])
    return tuple(
        (rf"^{place}\.{layer}\.", f"{our_place}.{our_layer}.")
        for (place, our_place), (layer, our_layer) in [*stems, *blocks]
    )


class ConvBlock(nn.Module):
    """Residual separable convolution, then two residual 3x3 convolutions."""

    def __init__(self, separable: nn.Module, dim: int, hidden: int, neuron: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.separable = separable
        self.conv1 = MembraneConv(dim, hidden, neuron(), kernel=3)
        self.conv2 = MembraneConv(hidden, dim, neuron(), kernel=3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.separable(x)
        return x + self.conv2(self.conv1(x))


class Stage(nn.Module):
    def __init__(self, down: nn.Module, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.down = down
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.down(x))


class MetaFormer(SpikingModel):
    """`widths` are those of the last four stages (the first has half of `widths[0]`), `depths` the blocks of all five.

    `drop_path` grows over the attention blocks.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        widths, depths = tuple(config["widths"]), tuple(config["depths"])
        require(len(widths) == 4 and min(widths) >= 1, f"widths: expected four integers >= 1, got {widths}")
        require(widths[0] % 2 == 0, f"widths: expected an even first width (the network starts at half), got {widths}")
        require(len(depths) == 5 and min(depths) >= 1, f"depths: expected five integers >= 1, got {depths}")
        stage_widths = (widths[0] // 2, *widths)
        self.describe_stages([*stage_widths[:CONV_STAGES], widths[-1]], (2, 4, 8, 16), config["image_size"])

        rates = iter(drop_path_rates(config["drop_path"], sum(depths[CONV_STAGES:])))
        self.stages = nn.ModuleList()
        before = self.in_channels
        for i, (width, depth, stride) in enumerate(zip(stage_widths, depths, STRIDES, strict=True)):
            if i == 0:
                down = ConvBN(before, width, kernel=7, stride=stride, bias=True)
            else:
                down = MembraneConv(before, width, self.make_neuron(), kernel=3, stride=stride, bias=True)
            if i < CONV_STAGES:
                blocks = [self.make_conv_block(width) for _ in range(depth)]
            else:
                blocks = [self.make_attention_block(width, next(rates)) for _ in range(depth)]
            self.stages.append(Stage(down, blocks))
            before = width
        self.neuron = self.make_head_neuron()
        self.head = classifier(widths[-1], config["num_classes"])
        init_weights(self)

    def make_neuron(self) -> nn.Module:
        raise NotImplementedError

    def make_head_neuron(self) -> nn.Module:
        return self.make_neuron()

    def make_separable(self, width: int, kernel: int) -> nn.Module:
        """The residual branch of a depth-wise convolution between two 1x1 convolutions."""
        raise NotImplementedError

    def attention_host(self, head_width: int) -> AttentionHost:
        raise NotImplementedError

    def make_conv_block(self, width: int) -> nn.Module:
        hidden = hidden_width(width, self.config["mlp_ratio"])
        return ConvBlock(self.make_separable(width, 7), width, hidden, self.make_neuron)

    def make_attention_block(self, width: int, drop_path: float) -> nn.Module:
        return MembraneBlock(*self.make_branches(width), drop_path)

    def make_branches(self, width: int) -> tuple[nn.Module, nn.Module, nn.Module]:
        """The neuron in front of the attention, the attention, and the MLP."""
        heads, options = self.config["heads"], self.config["attention_options"] or {}
        require(width % heads == 0, f"heads: expected a divisor of the width {width}, got {heads}")
        host = self.attention_host(width // heads)
        attn = create_attention(self.config["attention"], width, heads, self.grid, host, **options)
        hidden = hidden_width(width, self.config["mlp_ratio"])
        return self.make_neuron(), attn, MembraneMLP(width, hidden, self.make_neuron)

    def forward_stages(self, x: Tensor, only_last: bool = False) -> list[Tensor]:
        if only_last:
            return run_stages(self.stages, x, only_last)
        *early, _, last = run_stages(self.stages, x)  # the last two stages are on the same grid
        return [*early, last]

    def head_input(self, x: Tensor) -> Tensor:
        return self.neuron(x.mean((3, 4)))
