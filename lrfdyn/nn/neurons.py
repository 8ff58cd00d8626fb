"""Spiking neurons as modules. They take all time steps at once, `[T, B, ...]`, and keep no state between calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lrfdyn.checks import checked
from lrfdyn.ops.bn_lif import Integer, Norm
from lrfdyn.ops.lif import Dynamics, integer_spike, lif


class Neuron(nn.Module):
    """SN{.}: currents `[T, B, ...]` to spikes of the same shape. Every call starts from a resting membrane."""


class SpikingNeuron(Neuron):
    """A neuron that charges, fires and resets as `dynamics` says; the classes below are its usual members.

    spikes = LIF(threshold=1.0, tau=2.0)(torch.randn(4, 2, 16, 8, 8))  # zeros and ones
    """

    def __init__(self, dynamics: Dynamics) -> None:
        super().__init__()
        self.dynamics = dynamics

    def forward(self, x: Tensor) -> Tensor:
        """Spikes of the currents `x`, `[T, B, ...]`, which start from rest; the same shape."""
        return lif(x, self.dynamics)[0]

    def extra_repr(self) -> str:
        d = self.dynamics
        return f"leak={d.leak:g}, gain={d.gain:g}, threshold={d.threshold:g}, surrogate={d.surrogate!r}"


class LIF(SpikingNeuron):
    """The neuron of Spikformer, U = H + (I - H) / tau, with a sigmoid surrogate; `other` are fields of `Dynamics`."""

    def __init__(self, threshold: float = 1.0, tau: float = 2.0, **other: Any) -> None:
        super().__init__(Dynamics.lif(tau, threshold, **other))


class IF(SpikingNeuron):
    """The neuron of SEW-ResNet, U = H + I without leak, with an arctangent surrogate."""

    def __init__(self, threshold: float = 1.0, **other: Any) -> None:
        super().__init__(Dynamics.integrate_and_fire(threshold, **other))


class PaperLIF(SpikingNeuron):
    """The neuron of the paper's Eq. 1-3: U = H + I, and H = decay * U where it did not fire."""

    def __init__(self, threshold: float = 1.0, decay: float = 0.5, **other: Any) -> None:
        super().__init__(Dynamics.paper_lif(decay, threshold, **other))


class MSLIF(SpikingNeuron):
    """The neuron of MS-ResNet: decay 0.25, fires strictly above 0.5, with a rectangular surrogate."""

    def __init__(self, threshold: float = 0.5, decay: float = 0.25, **other: Any) -> None:
        super().__init__(Dynamics.ms_lif(decay, threshold, **other))


class IntegerSpike(Neuron):
    """The neuron of SDT-V3, without state: `round(clamp(x, 0, levels))`, with `normalize` divided by `levels`."""

    @checked
    def __init__(self, levels: int = 4, normalize: bool = True) -> None:
        super().__init__()
        self.levels, self.normalize = levels, normalize

    def forward(self, x: Tensor) -> Tensor:
        """Integer spikes of the potentials `x`, of any shape; the same shape."""
        return integer_spike(x, self.levels, self.normalize)

    def extra_repr(self) -> str:
        return f"levels={self.levels}, normalize={self.normalize}"


def observed(module: nn.Module) -> bool:
    """Whether hooks expect to see this module called, or it has a `forward` that its class has not."""
    if "forward" in module.__dict__:
        return True
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    everywhere = nn.modules.module
    return any(getattr(module, name) or getattr(everywhere, f"_global{name}", None) for name in hooks)


def fused_dynamics(neuron: nn.Module) -> Dynamics | Integer | None:
    """What the fused operations need to know of a neuron; None if it has a forward of its own or is observed."""
    if observed(neuron):
        return None
    if isinstance(neuron, SpikingNeuron) and type(neuron).forward is SpikingNeuron.forward:
        return neuron.dynamics
    if isinstance(neuron, IntegerSpike) and type(neuron).forward is IntegerSpike.forward:
        return Integer(neuron.levels, 1 / neuron.levels if neuron.normalize else 1.0)
    return None


def scale_and_shift(norm: Any) -> tuple[Tensor, Tensor]:
    """What a batch norm, of any class, multiplies by and adds in evaluation, `[C]` each."""
    scale = norm.weight * torch.rsqrt(norm.running_var + norm.eps)
    return scale, norm.bias - norm.running_mean * scale


class FoldedNorm(nn.Module):
    """What is left of a batch norm whose scale went into the weights before it: a shift, or nothing."""

    shift: Tensor
    zero: Tensor
    one: Tensor
    variance: Tensor

    def __init__(self, like: nn.BatchNorm2d, shift: Tensor | None = None) -> None:
        super().__init__()
        zeros = torch.zeros_like(like.weight, requires_grad=False)
        self.shifts, self.eps = shift is not None, like.eps
        self.register_buffer("shift", zeros if shift is None else shift)
        self.register_buffer("zero", zeros, persistent=False)
        self.register_buffer("one", torch.ones_like(zeros), persistent=False)
        self.register_buffer("variance", torch.ones_like(zeros) - like.eps, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift.to(x.dtype).reshape(-1, 1, 1) if self.shifts else x


def fused_norm(norm: nn.Module, count_batch: bool = True) -> Norm | None:
    """What the fused operations need to know of a batch norm; None for other kinds (synchronised across processes,
    without running statistics). A norm in training counts its batches; with `count_batch=False` the caller does."""
    if observed(norm):
        return None
    if isinstance(norm, FoldedNorm):
        return Norm(norm.one, norm.shift, norm.zero, norm.variance, False, eps=norm.eps)
    if type(norm) is not nn.BatchNorm2d or not norm.affine:
        return None
    mean, var, count, momentum = norm.running_mean, norm.running_var, norm.num_batches_tracked, norm.momentum
    if mean is None or var is None or count is None or momentum is None or not norm.track_running_stats:
        return None
    if norm.training and count_batch:
        count.add_(1)
    return Norm(norm.weight, norm.bias, mean, var, norm.training, momentum, norm.eps)


def fused_norm_and_neuron(norm: nn.Module, neuron: nn.Module | None) -> tuple[Norm, Dynamics | Integer | None] | None:
    """Both as the fused operations take them, where there may be no neuron; None if one of them does not fit."""
    dynamics = None if neuron is None else fused_dynamics(neuron)
    fused = None if neuron is not None and dynamics is None else fused_norm(norm)
    return None if fused is None else (fused, dynamics)
