"""Spiking self-attention (Spikformer), and softmax attention as the ANN reference."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lrfdyn.attention.base import Attention, AttentionHost, StateTerm, from_heads, to_heads
from lrfdyn.ops.dispatch import use_triton
from lrfdyn.ops.spike_attention import causal_spike_attention, spike_attention
from lrfdyn.ops.spike_bits import attach_bits, bits_of


class SSA(Attention):
    """s q (k^T v), no softmax."""

    causal: ClassVar[bool] = False  # True in causal.py

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
        attach_bits(again, bits_of(v))
        return from_heads(y, like=v), again

    def _packed(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """The bits that the kernels of a GPU leave with spikes, by heads."""
        bits = [bits_of(x) for x in (q, k, v)]
        if any(x is None for x in bits):
            return None
        q, k, v = (to_heads(x.unsqueeze(0), self.heads) for x in bits if x is not None)
        return q, k, v

    def scores(self, x: Tensor) -> Tensor:
        """s q k^T per head, `[T * B, heads, N, N]`."""
        q, k = (to_heads(getattr(self, name)(x), self.heads) for name in ("q", "k"))
        score = self.scale * (q @ k.mT)
        return score.tril() if self.causal else score

    def weights(self, x: Tensor) -> Tensor:
        return self.scores(x).abs().mean(1)

    def state_terms(self, grid: tuple[int, int] | None = None) -> list[StateTerm]:
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


class VSA(SSA):
    """softmax(q k^T / sqrt(d_h)) v: attention as in ViT, on spikes.

    An average of sparse spikes stays far below any threshold, so it is normalised before the host's ordinary neuron.
    """

    def __init__(self, dim: int, heads: int, grid: tuple[int, int], host: AttentionHost) -> None:
        super().__init__(dim, heads, grid, host)
        self.norm = nn.BatchNorm2d(self.value_dim)

    def _firing_neuron(self, host: AttentionHost) -> nn.Module:
        return host.neuron()

    def mix(self, *spikes: Tensor) -> Tensor:
        q, k, v = (to_heads(x, self.heads) for x in spikes)
        if torch.compiler.is_compiling():  # the traced backward pass expects the strides of contiguous tensors
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        y = from_heads(F.scaled_dot_product_attention(q, k, v), like=spikes[-1])
        return self.norm(y.flatten(0, 1)).unflatten(0, y.shape[:2])

    def scores(self, x: Tensor) -> Tensor:
        q, k = (to_heads(getattr(self, name)(x), self.heads) for name in ("q", "k"))
        return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)

    def state_terms(self, grid: tuple[int, int] | None = None) -> list[StateTerm]:
        height, width = grid or self.grid
        n = height * width
        matrix = StateTerm("attention matrix", "h N^2", self.heads * n * n, 32)
        return [matrix, *super().state_terms(grid)[1:]]
