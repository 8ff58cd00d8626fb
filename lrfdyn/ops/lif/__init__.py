"""Multi-step spiking neurons."""

from __future__ import annotations

import torch
from torch import Tensor

from lrfdyn.errors import require
from lrfdyn.ops.dispatch import use_triton
from lrfdyn.ops.lif.fused import lif_fused
from lrfdyn.ops.lif.integer import integer_spike, integer_to_binary
from lrfdyn.ops.lif.reference import Dynamics, lif_reference

__all__ = ["Dynamics", "integer_spike", "integer_to_binary", "lif", "lif_fused", "lif_reference"]

# The kernel holds all steps of a neuron in registers.
MOST_KERNEL_STEPS = 16


def lif(
    x: Tensor,
    dynamics: Dynamics,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
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
    if initial_state is not None:
        require(
            initial_state.shape == x.shape[1:],
            f"initial_state: expected {list(x.shape[1:])}, got {list(initial_state.shape)}",
        )
    if x.shape[0] <= MOST_KERNEL_STEPS and use_triton(x, initial_state):
        from lrfdyn.ops.lif.triton import lif_triton

        return lif_triton(x, dynamics, initial_state, output_final_state)
    # The definition can be traced; the fused form writes into its own outputs.
    form = lif_reference if torch.compiler.is_compiling() else lif_fused
    spikes, state = form(x, dynamics, initial_state)
    return spikes, state if output_final_state else None
