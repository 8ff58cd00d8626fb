"""Semantic FPN (Kirillov et al., 2019), spiking as in SDT-V3, or with ReLU for the networks it is compared with.

A lateral 1x1 convolution per stage, sums from the coarse stages to the fine ones, a 3x3 convolution on each; then
every stage is brought to one grid by 3x3 convolutions with a doubling behind each, and their sum is classified.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from lrfdyn.errors import require, require_integer
from lrfdyn.models.base import FeatureInfo
from lrfdyn.nn.layers import ConvBN, MembraneConv, fold_time

Neuron = Callable[[], nn.Module]


class PlainConv(nn.Module):
    """A convolution with bias and nothing around it, as the neck of the ANN version has them."""

    def __init__(self, c_in: int, c_out: int, kernel: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(c_in, c_out, kernel, padding=kernel // 2)

    def forward(self, x: Tensor) -> Tensor:
        return fold_time(self.conv, x)


class ReluConv(ConvBN):
    """ReLU(BN(Conv(x)))."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(super().forward(x))


class ScalePath(nn.Module):
    """Takes `[T, B, c_in, H, W]` from a stage's grid to the common one, `[T, B, c_out, ...]`: one convolution per
    doubling, at least one, or one with a stride."""

    def __init__(self, stride: int, output_stride: int, c_in: int, c_out: int, neuron: Neuron | None) -> None:
        super().__init__()
        doublings = round(math.log2(stride / output_stride))
        require(
            stride * 2**-doublings == output_stride,
            f"output_stride: expected a power of two apart from the stage's stride {stride}, got {output_stride}",
        )
        self.doublings = max(0, doublings)
        step = 2 ** max(0, -doublings)
        self.convs = nn.ModuleList()
        for i in range(max(1, doublings)):
            width, conv_stride = (c_in if i == 0 else c_out), (step if i == 0 else 1)
            if neuron is None:
                self.convs.append(ReluConv(width, c_out, kernel=3, stride=conv_stride))
            else:
                self.convs.append(MembraneConv(width, c_out, neuron(), kernel=3, stride=conv_stride))

    def forward(self, x: Tensor) -> Tensor:
        for i, conv in enumerate(self.convs):
            x = conv(x)
            if i < self.doublings:
                x = fold_time(lambda y: F.interpolate(y, scale_factor=2, mode="bilinear"), x)
        return x


def resize(x: Tensor, like: Tensor, mode: str) -> Tensor:
    """Interpolates `[T, B, C, H, W]` to the grid of `like`."""
    size = like.shape[-2:]
    if x.shape[-2:] == size:
        return x
    return fold_time(lambda y: F.interpolate(y, size=size, mode=mode), x)


class FPNHead(nn.Module):
    """The head: maps of the stages `[T, B, C, H, W]`, the finest first, to logits
    `[B, classes, H / output_stride, W / output_stride]`.

    `neuron` makes the neuron in front of every convolution; None takes ReLU behind them and no norms in the neck.
    With `output_stride=4` (Semantic FPN's own) the head of SDT-V3 has the 1.4 M parameters that are published; its
    published code fuses at stride 2, with two convolutions more.
    """

    def __init__(
        self,
        stages: Sequence[FeatureInfo],
        num_classes: int,
        neuron: Neuron | None,
        *,
        width: int = 128,
        neck_width: int | None = None,
        output_stride: int = 4,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        neck_width = width if neck_width is None else neck_width
        for name, value in (("width", width), ("neck_width", neck_width), ("output_stride", output_stride)):
            require_integer(name, value, 1)
        require(0 <= dropout < 1, f"dropout: expected a rate in [0, 1), got {dropout}")
        self.lateral, self.smooth, self.paths = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        for stage in stages:
            if neuron is None:
                self.lateral.append(PlainConv(stage.channels, neck_width, 1))
                self.smooth.append(PlainConv(neck_width, neck_width, 3))
            else:
                self.lateral.append(MembraneConv(stage.channels, neck_width, neuron(), bias=True))
                self.smooth.append(MembraneConv(neck_width, neck_width, neuron(), kernel=3, bias=True))
            self.paths.append(ScalePath(stage.stride, output_stride, neck_width, width, neuron))
        self.neuron = neuron() if neuron is not None else nn.Identity()
        self.dropout = nn.Dropout2d(dropout)
        self.classifier = nn.Conv2d(width, num_classes, 1)
        nn.init.normal_(self.classifier.weight, std=0.01)
        nn.init.zeros_(self.classifier.bias)  # type: ignore[arg-type]  # it has one

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        x = [lateral(m) for lateral, m in zip(self.lateral, maps, strict=True)]
        for i in range(len(x) - 1, 0, -1):
            x[i - 1] = x[i - 1] + resize(x[i], like=x[i - 1], mode="nearest")
        levels = [path(smooth(y)) for path, smooth, y in zip(self.paths, self.smooth, x, strict=True)]
        fused = levels[0]
        for level in levels[1:]:
            fused = fused + resize(level, like=fused, mode="bilinear")
        # The classifier is linear, so the mean over time may come before it.
        return self.classifier(self.dropout(self.neuron(fused).mean(0)))
