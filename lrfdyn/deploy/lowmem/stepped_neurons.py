"""Neurons that carry their membrane from call to call, so that time steps can pass a network one after the other."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from lrfdyn.deploy.streaming_attention import StreamingAttention
from lrfdyn.errors import LrfdynError
from lrfdyn.nn.neurons import IntegerSpike, Neuron, SpikingNeuron
from lrfdyn.ops.lif import Dynamics


class SteppedNeuron(Neuron):
    """A `SpikingNeuron` on currents `[T, ...]` that goes on from the membrane H `[...]` of the call before."""

    def __init__(self, dynamics: Dynamics) -> None:
        super().__init__()
        self.dynamics = dynamics
        self.membrane: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        d, h, spikes = self.dynamics, self.membrane, torch.empty_like(x)
        for current, fired in zip(x, spikes, strict=True):
            # In place of H: currents, membrane and spikes are all that exists.
            h = torch.mul(current, d.gain) if h is None else h.mul_(d.leak).add_(current, alpha=d.gain)
            (torch.gt if d.strict else torch.ge)(h, d.threshold, out=fired)
            h.addcmul_(h, fired, value=-1)  # U (1 - S)
            if d.decay != 1:
                h.mul_(d.decay)
            if d.v_reset:
                h.add_(fired, alpha=d.v_reset)
        self.membrane = h
        return spikes


def reset_membranes(modules: Iterable[nn.Module]) -> None:
    """Lets the stepped neurons among `modules` start from rest at their next call."""
    for module in modules:
        if isinstance(module, SteppedNeuron):
            module.membrane = None


def step_neurons(model: nn.Module) -> None:
    """Puts `SteppedNeuron` in the place of every neuron with a membrane; streaming layers see all steps and stay."""
    streaming = {m for layer in model.modules() if isinstance(layer, StreamingAttention) for m in layer.modules()}
    for parent in [m for m in model.modules() if m not in streaming]:
        for name, child in list(parent.named_children()):
            if isinstance(child, SpikingNeuron):
                if type(child).forward is not SpikingNeuron.forward:
                    raise LrfdynError(f"model: neuron {type(child).__name__} cannot be run step by step")
                setattr(parent, name, SteppedNeuron(child.dynamics))
            elif isinstance(child, Neuron) and not isinstance(child, (SteppedNeuron, IntegerSpike)):
                raise LrfdynError(f"model: neuron {type(child).__name__} cannot be run step by step")
