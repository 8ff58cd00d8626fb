"""Spiking self-attention (Spikformer)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from lrfdyn.attention.base import Attention, Grid, Operations, Spikes, StateTerm, WeightBlocks
from lrfdyn.attention.layout import from_heads, query_blocks, to_heads
from lrfdyn.attention.registry import register_attention
from lrfdyn.ops.bits import attach_step_bits, step_bits_of
from lrfdyn.ops.dispatch import use_triton
from lrfdyn.ops.spike_attention import causal_spike_attention, spike_attention


@register_attention("ssa", label="SSA")
class SSA(Attention):
    """s q (k^T v), no softmax."""

    causal: ClassVar[bool] = False  # True in causal_ssa.py

    def mix(self, *spikes: Tensor) -> Tensor:
        q, k, v = (to_heads(x, self.heads) for x in spikes)
        if self.causal:
            y, _ = causal_spike_attention(q, k, v, self.scale)
        else:
            y = spike_attention(q, k, v, self.scale, self._packed(*spikes))
        return from_heads(y, like=spikes[-1])

    def mix_and_values(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The mixed tokens, and v again, for what else reads it: on a GPU both gradients are added in one pass."""
        if self.causal or not use_triton(q, k, v):
            return SSA.mix(self, q, k, v), v
        packed = self._packed(q, k, v)
        by_heads = (to_heads(q, self.heads), to_heads(k, self.heads), to_heads(v, self.heads))
        y, again = spike_attention(*by_heads, self.scale, packed, fork=True)
        again = from_heads(again, like=v)
        attach_step_bits(again, step_bits_of(v))
        return from_heads(y, like=v), again

    def _packed(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """The bits that the kernels of a GPU leave with spikes, by heads."""
        bits = [step_bits_of(x) for x in (q, k, v)]
        if any(x is None for x in bits):
            return None
        q, k, v = (to_heads(x.unsqueeze(0), self.heads) for x in bits if x is not None)
        return q, k, v

    def mixing_weights(self, spikes: Spikes, grid: Grid, block: int) -> WeightBlocks:
        q, k = (to_heads(spikes[name], self.heads) for name in ("q", "k"))
        images, _, tokens, _ = k.shape
        for queries in query_blocks(tokens, images * max(self.heads * tokens, self.value_dim), block):
            weights = self.query_weights(q[:, :, queries.start : queries.stop], k, queries, grid)
            yield queries, weights.unflatten(0, spikes["q"].shape[:2]).sum(0)

    def query_weights(self, q: Tensor, k: Tensor, queries: range, grid: Grid) -> Tensor:
        """The weights `[T * B, queries, N]` of queries `[T * B, heads, queries, e]` on keys `[T * B, heads, N, e]`."""
        return self.scores(q, k, queries).abs().mean(1)

    def scores(self, q: Tensor, k: Tensor, queries: range) -> Tensor:
        """s q k^T of these queries, `[T * B, heads, queries, N]`."""
        scores = self.scale * (q @ k.mT)
        return scores.tril(queries.start) if self.causal else scores

    def operation_counts(self, spikes: Spikes, grid: Grid) -> dict[str, Operations]:
        q, k, v = (to_heads(spikes[name], self.heads) for name in ("q", "k", "v"))
        # k^T v: one accumulate where k and v of a head both fire. q (k^T v): a spike of q takes a row of the matrix.
        return {
            "k^T v": Operations((k.sum(-1) * v.sum(-1)).sum()),
            "q (k^T v)": Operations(q.sum() * v.shape[-1]),
        }

    def state_terms(self, grid: Grid | None = None) -> list[StateTerm]:
        height, width = grid or self.grid
        n = height * width
        state = StateTerm("k^T v matrix", "d^2 / h", self.dim * self.value_dim // self.heads, 32)
        if self.causal:
            return [state]
        # The projections of the whole image: every query waits for the last key.
        return [
            state,
            StateTerm("q, k spikes", "2 N d", 2 * n * self.dim, self.spike_bits),
            StateTerm("v spikes", "N d", n * self.value_dim, self.spike_bits),
        ]
