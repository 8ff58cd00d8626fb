"""Firing rates of all neurons."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lrfdyn.neurons import Neuron


@contextmanager
def watch_neurons(model: nn.Module, note: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Calls `note(name, spikes)` for every neuron output while the context is open."""

    def hook(name: str) -> Callable[..., None]:
        return lambda _module, _args, spikes: note(name, spikes.detach())

    handles = [
        module.register_forward_hook(hook(name)) for name, module in model.named_modules() if isinstance(module, Neuron)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def firing_rates(model: nn.Module, images: Tensor) -> dict[str, Any]:
    """`mean`: spikes per neuron and time step over all neurons; `by_layer`: the same per neuron layer."""
    spikes: dict[str, float] = {}
    neurons: dict[str, int] = {}

    def note(name: str, out: Tensor) -> None:
        spikes[name] = spikes.get(name, 0.0) + float(out.sum())
        neurons[name] = neurons.get(name, 0) + out.numel()

    model.eval()
    with torch.inference_mode(), watch_neurons(model, note):
        model(images)
    return {
        "mean": sum(spikes.values()) / sum(neurons.values()),
        "by_layer": {name: spikes[name] / neurons[name] for name in spikes},
    }
