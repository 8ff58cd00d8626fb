"""Softmax attention as in ViT: the ANN reference."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lrfdyn.attention.base import Grid, Operations, Spikes, StateTerm
from lrfdyn.attention.host import AttentionHost
from lrfdyn.attention.layout import from_heads, to_heads
from lrfdyn.attention.registry import register_attention
from lrfdyn.attention.ssa import SSA


@register_attention("vsa", label="VSA")
class VSA(SSA):
    """softmax(q k^T / sqrt(d_h)) v on spikes.

    An average of sparse spikes stays far below any threshold, so it is normalised before the host's ordinary neuron.
    """

    normalized = True

    def __init__(self, dim: int, heads: int, grid: Grid, host: AttentionHost) -> None:
        super().__init__(dim, heads, grid, host)
        self.norm = nn.BatchNorm2d(self.value_dim)

    def mix(self, *spikes: Tensor) -> Tensor:
        q, k, v = (to_heads(x, self.heads) for x in spikes)
        if torch.compiler.is_compiling():  # the traced backward pass expects the strides of contiguous tensors
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        y = from_heads(F.scaled_dot_product_attention(q, k, v), like=spikes[-1])
        return self.norm(y.flatten(0, 1)).unflatten(0, y.shape[:2])

    def query_weights(self, q: Tensor, k: Tensor, queries: range, grid: Grid) -> Tensor:
        return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1).mean(1)

    def operation_counts(self, spikes: Spikes, grid: Grid) -> dict[str, Operations]:
        q, k, v = (to_heads(spikes[name], self.heads) for name in ("q", "k", "v"))
        # Scores of spikes: one accumulate where q and k both fire. Then every spike of v is added to all N queries,
        # weighted: the weight is what is accumulated.
        return {
            "q k^T": Operations((q.sum(2) * k.sum(2)).sum()),
            "softmax v": Operations(v.sum() * math.prod(grid)),
        }

    def state_terms(self, grid: Grid | None = None) -> list[StateTerm]:
        tokens = math.prod(grid or self.grid)
        matrix = StateTerm("attention matrix", "h N^2", self.heads * tokens**2, 32)
        return [matrix, *super().state_terms(grid)[1:]]
