"""Multi-step spiking neurons."""

from __future__ import annotations

import torch
from torch import Tensor

from lrfdyn.errors import require
from lrfdyn.ops.bits import MOST_PACKED_STEPS, with_step_bits
from lrfdyn.ops.dispatch import as_operator, require_shape, transformed, use_triton
from lrfdyn.ops.lif.fused import IntegerSpike, lif_fused
from lrfdyn.ops.lif.operator import integer_operator, lif_operator, neuron_numbers
from lrfdyn.ops.lif.reference import Dynamics, lif_reference

__all__ = ["Dynamics", "integer_spike", "lif", "lif_fused", "lif_reference"]

# The kernel holds all steps of a neuron in registers.
MOST_KERNEL_STEPS = 16


def lif(
    x: Tensor, dynamics: Dynamics, initial_state: Tensor | None = None, output_final_state: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Spikes of a multi-step neuron, differentiable with its surrogate.

    - `x`: Currents `[T, ...]` of T time steps, floating point.
    - `dynamics`: The neuron: leak, threshold, reset and surrogate.
    - `initial_state`: The membrane H[0] `[...]`; zeros without it.
    - `output_final_state`: Whether the membrane H[T] is wanted.

    Returns spikes `[T, ...]`, 0 or 1 in the type of `x`, and H[T] `[...]` or None.

    Example:

        >>> spikes, _ = lif(torch.full((4, 1), 1.0), Dynamics.lif(tau=2.0, threshold=0.8))
        >>> spikes.flatten().tolist()
        [0.0, 0.0, 1.0, 0.0]
    """
    require(x.dim() >= 1 and x.shape[0] >= 1, f"x: expected at least one time step [T, ...], got {list(x.shape)}")
    require(x.is_floating_point(), f"x: expected floating-point currents, got {x.dtype}")
    require_shape("initial_state", initial_state, x.shape[1:])
    if x.shape[0] <= MOST_KERNEL_STEPS and use_triton(x, initial_state):
        return _by_kernel(x, dynamics, initial_state, output_final_state)
    # The definition can be traced and transformed; the fused form writes into its own outputs.
    form = lif_reference if torch.compiler.is_compiling() or transformed() else lif_fused
    spikes, state = form(x, dynamics, initial_state)
    return spikes, state if output_final_state else None


def _by_kernel(x: Tensor, d: Dynamics, h0: Tensor | None, keep_state: bool) -> tuple[Tensor, Tensor | None]:
    if as_operator():
        pack = x.shape[0] <= MOST_PACKED_STEPS and torch.is_grad_enabled()
        spikes, state, bits = lif_operator(x, h0, *neuron_numbers(d), keep_state, pack)
        state, bits = state if keep_state else None, bits if pack else None
    else:
        from lrfdyn.ops.lif.triton import Lif

        spikes, state, bits = Lif.apply(x, h0, d, keep_state)
    return with_step_bits(spikes, bits), state


def integer_spike(x: Tensor, levels: int = 4, normalize: bool = True) -> Tensor:
    """The integer spike of SDT-V3: `round(clamp(x, 0, D)) / D`, halves to even, D = `levels`.

    The gradient is 1/D where 0 <= x <= D and 0 elsewhere. Without `normalize` neither is divided by D.

    - `x`: Currents of any shape.
    - `levels`: D, the largest integer.
    - `normalize`: Whether the result is divided by D.

    Returns a tensor of the shape and type of `x`.

    Example:

        >>> integer_spike(torch.tensor([-1.0, 0.6, 2.2, 9.0])).tolist()
        [0.0, 0.25, 0.5, 1.0]
    """
    require(levels >= 1, f"levels: expected an integer >= 1, got {levels}")
    scale = 1 / levels if normalize else 1.0
    if use_triton(x):
        if as_operator():
            return integer_operator(x, levels, scale)
        from lrfdyn.ops.lif.triton import IntegerSpikeKernel

        return IntegerSpikeKernel.apply(x, levels, scale)
    if transformed():
        inside = x.clamp(0, levels)
        return (inside + (inside.round() - inside).detach()) * scale  # both steps are exact
    return IntegerSpike.apply(x, levels, scale)
