"""The definition of the spiking neurons: charge, fire, reset, one time step after the other."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lrfdyn.checks import checked
from lrfdyn.errors import require, unknown_name
from lrfdyn.ops.dispatch import transformed


def sigmoid(x: Tensor, alpha: float) -> Tensor:
    p = torch.sigmoid(alpha * x)
    return alpha * p * (1 - p)


def atan(x: Tensor, alpha: float) -> Tensor:
    return (alpha / 2) / (1 + (math.pi / 2 * alpha * x).square())


def rectangle(x: Tensor, alpha: float) -> Tensor:
    """Height alpha inside a window of width 1/alpha."""
    return alpha * (x.abs() < 0.5 / alpha).to(x.dtype)


# What stands in for dS/dU, the derivative of the Heaviside step, at the distance x = U - V_th from the threshold.
SURROGATES: dict[str, Callable[[Tensor, float], Tensor]] = {"sigmoid": sigmoid, "atan": atan, "rectangle": rectangle}
# What each of these is the derivative of, up to a constant.
SMOOTH_STEPS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "sigmoid": lambda x, alpha: torch.sigmoid(alpha * x),
    "atan": lambda x, alpha: torch.atan(math.pi / 2 * alpha * x) / math.pi,
    "rectangle": lambda x, alpha: torch.where(x.abs() < 0.5 / alpha, alpha * x, 0),
}


@checked
@dataclass(frozen=True)
class Dynamics:
    """One neuron of the family

        U[t] = leak * H[t-1] + gain * I[t]                      charge
        S[t] = 1 if U[t] >= threshold else 0                    fire (`>` if strict)
        H[t] = v_reset * S[t] + decay * U[t] * (1 - S[t])       reset

    The constructors below name the members that the host networks use.
    """

    leak: float = 0.5
    gain: float = 0.5
    decay: float = 1.0
    threshold: float = 1.0
    v_reset: float = 0.0
    strict: bool = False
    surrogate: str = "sigmoid"
    alpha: float = 4.0
    detach_reset: bool = True

    def __post_init__(self) -> None:
        if self.surrogate not in SURROGATES:
            raise unknown_name("surrogate", self.surrogate, SURROGATES)
        require(self.alpha > 0, f"alpha: expected a positive number, got {self.alpha}")

    @classmethod
    @checked
    def lif(cls, tau: float = 2.0, threshold: float = 1.0, **other: Any) -> Dynamics:
        """U = H + (I - H) / tau: Spikformer, QKFormer, SDT-V1 and SDT-V2."""
        require(tau >= 1, f"tau: expected a number >= 1, got {tau}")
        return cls(leak=1 - 1 / tau, gain=1 / tau, threshold=threshold, **other)

    @classmethod
    def paper_lif(cls, decay: float = 0.5, threshold: float = 1.0, **other: Any) -> Dynamics:
        """U = H + I, and H = decay * U where no spike came: Eq. 1-3 of the paper."""
        return cls(leak=1.0, gain=1.0, decay=decay, threshold=threshold, **other)

    @classmethod
    def integrate_and_fire(cls, threshold: float = 1.0, **other: Any) -> Dynamics:
        """U = H + I without leak, arctangent surrogate: SEW-ResNet."""
        return cls(leak=1.0, gain=1.0, threshold=threshold, **{"surrogate": "atan", "alpha": 2.0, **other})

    @classmethod
    def ms_lif(cls, decay: float = 0.25, threshold: float = 0.5, **other: Any) -> Dynamics:
        """The paper's form with a strict threshold and a rectangular surrogate: MS-ResNet."""
        preset = {"strict": True, "surrogate": "rectangle", "alpha": 1.0, **other}
        return cls.paper_lif(decay, threshold, **preset)


class _Fire(torch.autograd.Function):
    """The Heaviside step forward, the surrogate backward."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, d: Dynamics) -> Tensor:
        ctx.save_for_backward(u)
        ctx.dynamics = d
        return (u > d.threshold if d.strict else u >= d.threshold).to(u.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (u,) = ctx.saved_tensors
        d = ctx.dynamics
        return grads[0] * SURROGATES[d.surrogate](u - d.threshold, d.alpha), None


def _fire(u: Tensor, d: Dynamics) -> Tensor:
    """The same as a sum that transforms of `torch.func` and their compilers can take apart: to the step it adds 0,
    whose derivative is the surrogate."""
    smooth = SMOOTH_STEPS[d.surrogate](u - d.threshold, d.alpha)
    return (u > d.threshold if d.strict else u >= d.threshold).to(u.dtype) + (smooth - smooth.detach())


def lif_reference(x: Tensor, dynamics: Dynamics, initial_state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Spikes `[T, ...]` and the membrane H[T] of currents `x` `[T, ...]`, differentiated by autograd."""
    fire = _fire if transformed() else _Fire.apply
    h = torch.zeros_like(x[0]) if initial_state is None else initial_state
    spikes = []
    for current in x:
        u = dynamics.leak * h + dynamics.gain * current
        s = fire(u, dynamics)
        spikes.append(s)
        r = s.detach() if dynamics.detach_reset else s
        h = dynamics.v_reset * r + dynamics.decay * u * (1 - r)
    return torch.stack(spikes), h
