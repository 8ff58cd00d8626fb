"""LRF-SSA: spiking self-attention plus local receptive fields on the values."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lrfdyn.attention.base import Grid, Operations, Spikes
from lrfdyn.attention.host import AttentionHost
from lrfdyn.attention.local import LocalReceptiveFields
from lrfdyn.attention.registry import register_attention
from lrfdyn.attention.ssa import SSA


@register_attention("lrf_ssa", label="LRF-SSA")
class LRFSSA(SSA):
    """s q (k^T v) + sum_d DWConv3x3(v; dilation d). The scale is on the global term only."""

    def __init__(
        self, dim: int, heads: int, grid: Grid, host: AttentionHost, dilations: Sequence[int] = (3, 5)
    ) -> None:
        super().__init__(dim, heads, grid, host)
        self.lrf = LocalReceptiveFields(self.value_dim, dilations)

    def mix(self, *spikes: Tensor) -> Tensor:
        mixed, v = self.mix_and_values(*spikes)
        return self.lrf(v, residual=mixed)

    def query_weights(self, q: Tensor, k: Tensor, queries: range, grid: Grid) -> Tensor:
        scores = self.scores(q, k, queries)
        weights = scores.abs().mean(1)
        for rows, keys, taps in self.lrf.taps(queries, grid):
            # Absolute values per channel, since stencils of opposite sign must not cancel.
            near = scores[:, :, rows, keys].unsqueeze(2) + taps.reshape(1, self.heads, -1, 1)
            weights[:, rows, keys] = near.abs().mean((1, 2))
        return weights

    def operation_counts(self, spikes: Spikes, grid: Grid) -> dict[str, Operations]:
        counts = super().operation_counts(spikes, grid)
        if self.lrf.dilations:
            v = spikes["v"].sum((0, 1, 2))
            counts["lrf"] = Operations((v * self.lrf.uses(grid).to(v)).sum())
        return counts

    # The stencils read v, which SSA holds for the whole image anyway, so the state is that of SSA.
