"""The definition: batch norm over time, batch and space, then the multi-step neuron."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from lrfdyn.ops.lif import Dynamics, integer_spike, lif


@dataclass(frozen=True)
class Integer:
    """The integer spike as dynamics: `round(clamp(x, 0, levels)) * scale`."""

    levels: int = 4
    scale: float = 0.25


def has_bits(neuron: Dynamics | Integer | None, residual: Tensor | None) -> bool:
    """Whether what comes out can be told by bits: sums with a residual are no spikes, and integer spikes no bits."""
    return residual is None and isinstance(neuron, Dynamics)


@dataclass(frozen=True)
class Norm:
    """A batch norm: its parameters and buffers `[C]`, as `torch.nn.BatchNorm2d` names them. The running statistics are
    updated in place when `training`."""

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor
    training: bool
    momentum: float = 0.1
    eps: float = 1e-5


@contextmanager
def joined(norms: Sequence[Norm]) -> Iterator[Norm]:
    """Several norms of the same mode, momentum and eps as one over all their channels. Their running statistics are
    updated when the context ends."""
    names = ("weight", "bias", "running_mean", "running_var")
    weight, bias, mean, var = (torch.cat([getattr(norm, name) for norm in norms]) for name in names)
    whole = replace(norms[0], weight=weight, bias=bias, running_mean=mean, running_var=var)
    yield whole
    if whole.training:
        sizes = [norm.running_mean.numel() for norm in norms]
        targets = [norm.running_mean for norm in norms] + [norm.running_var for norm in norms]
        torch._foreach_copy_(targets, [*mean.split(sizes), *var.split(sizes)])


def settle_strides(images: Tensor) -> Tensor:
    """`[N, C, H, W]` for a batch norm: a single image is in channels-last memory, and its strides say so.

    The stride over one image may be any number, and views make it one that tells nothing of the layout. The backward
    pass of PyTorch (2.13, on a CPU) then takes an image and its gradient for the same layout where they are not, and
    what it gives back is wrong in every entry."""
    if images.shape[0] != 1 or not torch.is_grad_enabled():
        return images
    pixels = images.permute(0, 2, 3, 1)
    return pixels.flatten().view(pixels.shape).permute(0, 3, 1, 2)


def _max_pool(x: Tensor) -> Tensor:
    return F.max_pool2d(x.flatten(0, 1), 3, 2, 1).unflatten(0, x.shape[:2])


def bn_lif_reference(
    x: Tensor, norm: Norm, dynamics: Dynamics | Integer | None, *, offset: Tensor | None = None, repeats: int = 1,
    residual: Tensor | None = None, pool: bool = False, pool_first: bool = False,
) -> Tensor:  # fmt: skip
    """See `bn_lif`."""
    if offset is not None:
        x = x + offset.to(x.dtype).reshape(-1, 1, 1)
    x = x.expand(repeats, -1, -1, -1, -1) if repeats > 1 else x
    y = F.batch_norm(
        settle_strides(x.flatten(0, 1)), norm.running_mean, norm.running_var, norm.weight, norm.bias, norm.training,
        norm.momentum, norm.eps,
    )  # fmt: skip
    y = y.unflatten(0, x.shape[:2])
    if pool_first:
        y = _max_pool(y)
    if isinstance(dynamics, Integer):
        y = integer_spike(y, dynamics.levels, normalize=dynamics.scale != 1)
    elif dynamics is not None:
        y = lif(y, dynamics)[0]
    if pool:
        y = _max_pool(y)
    return y if residual is None else residual + y
