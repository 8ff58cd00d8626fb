"""The few blocks that the hosts share. Tensors are `[T, B, C, H, W]`; convolutions see time folded into the batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lrfdyn.errors import require


def fold_time(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`function` on `[T * B, ...]`, with time and batch apart again behind it."""
    return function(x.flatten(0, 1)).unflatten(0, x.shape[:2])


def max_pool(x: Tensor) -> Tensor:
    """3x3, stride 2: halves the grid."""
    return fold_time(lambda y: F.max_pool2d(y, 3, 2, 1), x)


def is_repeated(x: Tensor) -> bool:
    """Whether all time steps of `x` are one and the same memory: a static image shown T times."""
    return x.shape[0] > 1 and x.stride(0) == 0


def convolve(conv: nn.Module, x: Tensor) -> Tensor:
    """`conv` over `[T, B, ...]`, computed once where all time steps are the same."""
    if is_repeated(x):
        return conv(x[0]).unsqueeze(0).expand(x.shape[0], -1, -1, -1, -1)
    return fold_time(conv, x)


class DropPath(nn.Module):
    """Stochastic depth: in training drops the residual branch of whole samples, at all time steps alike."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        require(0 <= rate < 1, f"drop_path: expected a rate in [0, 1), got {rate}")
        self.rate = rate

    def forward(self, branch: Tensor) -> Tensor:
        if not self.training or self.rate == 0:
            return branch
        keep = 1 - self.rate
        shape = (1, branch.shape[1], *[1] * (branch.dim() - 2))
        return branch * (torch.empty(shape, dtype=branch.dtype, device=branch.device).bernoulli_(keep) / keep)

    def extra_repr(self) -> str:
        return f"rate={self.rate:g}"


def drop_path_rates(rate: float, depth: int) -> list[float]:
    """Rates that grow linearly from 0 at the first block to `rate` at the last."""
    return [rate * i / max(depth - 1, 1) for i in range(depth)]


class ConvBN(nn.Module):
    """A convolution that keeps the size (over its stride), then batch norm over time, batch and space."""

    def __init__(
        self, c_in: int, c_out: int, kernel: int = 1, stride: int = 1, groups: int = 1, bias: bool = False
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(c_in, c_out, kernel, stride, kernel // 2, groups=groups, bias=bias)
        self.bn = nn.BatchNorm2d(c_out)

    def forward(self, x: Tensor) -> Tensor:
        return fold_time(self.bn, convolve(self.conv, x))


class SpikingConv(ConvBN):
    """SN{BN(Conv(x))}."""

    def __init__(
        self, c_in: int, c_out: int, neuron: nn.Module, kernel: int = 1, stride: int = 1, bias: bool = False
    ) -> None:
        super().__init__(c_in, c_out, kernel, stride, bias=bias)
        self.neuron = neuron

    def forward(self, x: Tensor) -> Tensor:
        return self.neuron(super().forward(x))
