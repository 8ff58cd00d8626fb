"""Firing rates of all neurons."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lrfdyn.analysis.measure.observe import as_batches, observe, watch_neurons


class FiringRates:
    """Counts the spikes of every neuron layer; an integer spike n/D counts as n/D."""

    def __init__(self) -> None:
        self.spikes: dict[str, Tensor] = {}
        self.neurons: dict[str, int] = {}

    def watch(self, model: nn.Module) -> list[RemovableHandle]:
        return watch_neurons(model, self.note)

    def note(self, name: str, spikes: Tensor) -> None:
        total = spikes.double().sum()  # stays on the device: no waiting inside the pass
        self.spikes[name] = self.spikes[name] + total if name in self.spikes else total
        self.neurons[name] = self.neurons.get(name, 0) + spikes.numel()

    def record(self) -> dict[str, Any]:
        spikes = {name: float(total) for name, total in self.spikes.items()}
        return {
            "mean": sum(spikes.values()) / max(1, sum(self.neurons.values())),
            "by_layer": {name: spikes[name] / self.neurons[name] for name in spikes},
        }


def firing_rates(model: nn.Module, images: Tensor | Iterable[Tensor]) -> dict[str, Any]:
    """Return the firing rates of a model on images `[n, C, H, W]` or batches of them: `mean`, spikes per neuron and
    time step over all neurons, and `by_layer`, the same of every neuron layer."""
    rates = FiringRates()
    observe(model, as_batches(images), [rates])
    return rates.record()
