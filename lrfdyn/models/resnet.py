"""What the spiking residual networks share: stages of basic blocks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, ClassVar

from torch import Tensor, nn

from lrfdyn.errors import require
from lrfdyn.models.base import SpikingModel, classifier
from lrfdyn.nn.layers import DropPath, drop_path_rates

WIDTHS = (64, 128, 256, 512)


class BasicBlock(nn.Module):
    """Two convolutions, and a shortcut that is the identity where the shapes allow it."""

    def __init__(self, conv1: nn.Module, conv2: nn.Module, shortcut: nn.Module, drop_path: float) -> None:
        super().__init__()
        self.conv1, self.conv2, self.shortcut = conv1, conv2, shortcut
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop_path(self.conv2(self.conv1(x))) + self.shortcut(x)


class SpikingResNet(SpikingModel):
    """The stem halves the image's side, stage 1 ends at a quarter of it, and each further stage halves it again."""

    first_stride: ClassVar[int]  # of stage 1

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        depths: Sequence[int] = config["depths"]
        widths: Sequence[int] = config["widths"]
        require(len(widths) >= 1 and min(widths) >= 1, f"widths: expected integers >= 1, got {tuple(widths)}")
        require(
            len(depths) == len(widths) and min(depths) >= 1,
            f"depths: expected {len(widths)} integers >= 1 (one for each width), got {tuple(depths)}",
        )
        self.describe_stages(widths, [4 * 2**i for i in range(len(widths))])
        rates = iter(drop_path_rates(config["drop_path"], sum(depths)))
        self.stem = self.make_stem(widths[0])
        self.neuron = self.make_neuron()
        self.stages = nn.ModuleList()
        for i, (c_in, c_out) in enumerate(pairwise([widths[0], *widths])):
            first = self.make_block(c_in, c_out, 2 if i else self.first_stride, next(rates))
            others = (self.make_block(c_out, c_out, 1, next(rates)) for _ in range(depths[i] - 1))
            self.stages.append(nn.Sequential(first, *others))
        self.head = classifier(widths[-1], config["num_classes"])
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def make_block(self, c_in: int, c_out: int, stride: int, drop_path: float) -> nn.Module:
        same = stride == 1 and c_in == c_out
        return BasicBlock(
            self.make_conv(c_in, c_out, stride),
            self.make_conv(c_out, c_out, 1),
            nn.Identity() if same else self.make_shortcut(c_in, c_out, stride),
            drop_path,
        )

    def make_stem(self, width: int) -> nn.Module:
        raise NotImplementedError

    def make_neuron(self) -> nn.Module:
        raise NotImplementedError

    def make_conv(self, c_in: int, c_out: int, stride: int) -> nn.Module:
        raise NotImplementedError

    def make_shortcut(self, c_in: int, c_out: int, stride: int) -> nn.Module:
        raise NotImplementedError
