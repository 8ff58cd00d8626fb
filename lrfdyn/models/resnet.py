"""What the spiking residual networks share: stages of basic blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from torch import Tensor, nn

from lrfdyn.errors import require
from lrfdyn.models.base import ModelConfig, SpikingModel, classifier
from lrfdyn.nn.layers import DropPath, drop_path_rates


@dataclass
class ResNetConfig(ModelConfig):
    """The options of the spiking residual networks."""

    depths: Sequence[int] = (3, 4, 6, 3)
    """Number of basic blocks in each stage."""
    widths: Sequence[int] = (64, 128, 256, 512)
    """Channels of each stage."""
    drop_path: float = 0.0
    """Stochastic depth: the drop rate of the last block. Rates grow linearly from 0 at the first one."""


class MakeConv(Protocol):
    """Makes a layer from `[T, B, c_in, H, W]` to `[T, B, c_out, H / stride, W / stride]`."""

    def __call__(self, c_in: int, c_out: int, kernel: int = ..., stride: int = ...) -> nn.Module: ...


class BasicBlock(nn.Module):
    """Two convolutions on `[T, B, C, H, W]`, and a shortcut that is the identity where the shapes allow it."""

    def __init__(self, conv1: nn.Module, conv2: nn.Module, shortcut: nn.Module, drop_path: float) -> None:
        super().__init__()
        self.conv1, self.conv2, self.shortcut = conv1, conv2, shortcut
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop_path(self.conv2(self.conv1(x))) + self.shortcut(x)


class SpikingResNet(SpikingModel):
    """A residual network. The stem halves the image's side, stage 1 ends at a quarter of it, and each further stage
    halves it again. `stem`, `conv` and `shortcut` make its layers, `first_stride` is that of stage 1."""

    config_class = ResNetConfig

    def __init__(
        self,
        config: ResNetConfig,
        stem: MakeConv,
        conv: MakeConv,
        shortcut: MakeConv,
        neuron: nn.Module,
        first_stride: int,
    ) -> None:
        super().__init__(config)
        depths, widths = tuple(config.depths), tuple(config.widths)
        require(len(widths) >= 1 and min(widths) >= 1, f"widths: expected integers >= 1, got {widths}")
        require(
            len(depths) == len(widths) and min(depths) >= 1,
            f"depths: expected {len(widths)} integers >= 1 (one for each width), got {depths}",
        )
        self.describe_stages(widths, [4 * 2**i for i in range(len(widths))])
        rates = iter(drop_path_rates(config.drop_path, sum(depths)))

        def block(c_in: int, c_out: int, stride: int) -> BasicBlock:
            convs = conv(c_in, c_out, kernel=3, stride=stride), conv(c_out, c_out, kernel=3)
            same = stride == 1 and c_in == c_out
            return BasicBlock(*convs, nn.Identity() if same else shortcut(c_in, c_out, stride=stride), next(rates))

        self.stem = stem(self.in_channels, widths[0], kernel=7, stride=2)
        self.neuron = neuron
        self.stages = nn.ModuleList()
        for i, (c_in, c_out) in enumerate(pairwise([widths[0], *widths])):
            first = block(c_in, c_out, 2 if i else first_stride)
            self.stages.append(nn.Sequential(first, *(block(c_out, c_out, 1) for _ in range(depths[i] - 1))))
        self.head = classifier(widths[-1], config.num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
