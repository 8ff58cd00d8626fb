"""Spike-driven self-attention (Spike-driven Transformer V1): one gate per channel, no products of queries and keys."""

from __future__ import annotations

import math

from torch import Tensor

from lrfdyn.attention.base import Attention, Grid, Operations, Spikes, StateTerm, WeightBlocks
from lrfdyn.attention.layout import query_blocks, to_tokens
from lrfdyn.attention.registry import register_attention


@register_attention("sdsa", label="SDSA")
class SDSA(Attention):
    """q * SN{sum_j k_j * v_j}: the neuron sits behind the sum over all tokens, and the query is gated by its spikes."""

    def spikes(self, *projected: Tensor) -> Tensor:
        q, k, v = projected
        return self.widen(q) * self.fire(self.mix(k, v))

    def mix(self, *spikes: Tensor) -> Tensor:
        """sum_j k_j * v_j, `[T, B, value_dim, 1, 1]`."""
        k, v = spikes[-2:]
        return (self.widen(k) * v).sum((3, 4), keepdim=True)

    def mixing_weights(self, spikes: Spikes, grid: Grid, block: int) -> WeightBlocks:
        """k_j * v_j, mean over channels: what token j adds to the gate, for every query the same."""
        given = to_tokens(self.widen(spikes["k"]) * spikes["v"]).abs().mean(-1)
        given = given.unflatten(0, spikes["v"].shape[:2]).sum(0)
        for queries in query_blocks(given.shape[1], given.numel(), block):
            yield queries, given.unsqueeze(1).expand(-1, len(queries), -1)

    def operation_counts(self, spikes: Spikes, grid: Grid) -> dict[str, Operations]:
        return {"k * v": Operations((self.widen(spikes["k"]) * spikes["v"]).sum())}

    def state_terms(self, grid: Grid | None = None) -> list[StateTerm]:
        tokens = math.prod(grid or self.grid)
        # As in SSA, the projections of the whole image.
        return [
            StateTerm("k * v sum", "d", self.value_dim, 32),
            StateTerm("q, k spikes", "2 N d", 2 * tokens * self.dim, self.spike_bits),
            StateTerm("v spikes", "N d", tokens * self.value_dim, self.spike_bits),
        ]
