"""Spike-driven self-attention (Spike-driven Transformer V1): one gate per channel, no products of queries and keys."""

from __future__ import annotations

from torch import Tensor

from lrfdyn.attention.base import Attention, StateTerm, to_tokens


class SDSA(Attention):
    """q * SN{sum_j k_j * v_j}: the neuron sits behind the sum over all tokens, and the query is gated by its spikes."""

    def spikes(self, *projected: Tensor) -> Tensor:
        q, k, v = projected
        return self.widen(q) * self.fire(self.mix(k, v))

    def mix(self, *spikes: Tensor) -> Tensor:
        """sum_j k_j * v_j, `[T, B, value_dim, 1, 1]`."""
        k, v = spikes[-2:]
        return (self.widen(k) * v).sum((3, 4), keepdim=True)

    def weights(self, x: Tensor) -> Tensor:
        """k_j * v_j, mean over channels: what token j adds to the gate, for every query the same."""
        _, k, v = self.project(x)
        given = to_tokens(self.widen(k) * v).abs().mean(-1)
        return given.unsqueeze(1).expand(-1, given.shape[1], -1)

    def state_terms(self, grid: tuple[int, int] | None = None) -> list[StateTerm]:
        height, width = grid or self.grid
        n = height * width
        # As in SSA, the projections of the whole image.
        return [
            StateTerm("k * v sum", "d", self.value_dim, 32),
            StateTerm("q, k spikes", "2 N d", 2 * n * self.dim, self.spike_bits),
            StateTerm("v spikes", "N d", n * self.value_dim, self.spike_bits),
        ]
