"""The few blocks that the hosts share. Tensors are `[T, B, C, H, W]`; convolutions see time folded into the batch."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn


def fold_time(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`function` on `[T * B, ...]`, with time and batch apart again behind it."""
    return function(x.flatten(0, 1)).unflatten(0, x.shape[:2])


def max_pool(x: Tensor) -> Tensor:
    """3x3, stride 2: halves the grid."""
    return fold_time(lambda y: F.max_pool2d(y, 3, 2, 1), x)


class ConvBN(nn.Module):
    """A convolution that keeps the size (over its stride), then batch norm over time, batch and space."""

    def __init__(
        self, c_in: int, c_out: int, kernel: int = 1, stride: int = 1, groups: int = 1, bias: bool = False
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(c_in, c_out, kernel, stride, kernel // 2, groups=groups, bias=bias)
        self.bn = nn.BatchNorm2d(c_out)

    def forward(self, x: Tensor) -> Tensor:
        return fold_time(lambda y: self.bn(self.conv(y)), x)


class SpikingConv(ConvBN):
    """SN{BN(Conv(x))}."""

    def __init__(
        self, c_in: int, c_out: int, neuron: nn.Module, kernel: int = 1, stride: int = 1, bias: bool = False
    ) -> None:
        super().__init__(c_in, c_out, kernel, stride, bias=bias)
        self.neuron = neuron

    def forward(self, x: Tensor) -> Tensor:
        return self.neuron(super().forward(x))
