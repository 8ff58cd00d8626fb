"""Causal spiking self-attention, with or without local receptive fields."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lrfdyn.attention.base import AttentionHost, StateTerm
from lrfdyn.attention.lrf_ssa import LRFSSA
from lrfdyn.attention.ssa import SSA


class CausalSSA(LRFSSA):
    """s sum_{j <= n} (q_n k_j) v_j in raster order, + sum_d DWConv3x3(v; dilation d).

    The stencils are those of LRF-SSA: they see the rows below too, so only the first term is causal. Without dilations,
    the default, there is nothing of them, in checkpoints neither.
    """

    causal = True

    def __init__(
        self,
        dim: int,
        heads: int,
        grid: tuple[int, int],
        host: AttentionHost,
        dilations: Sequence[int] = (),
    ) -> None:
        super().__init__(dim, heads, grid, host, dilations)
        self.reach = max(self.lrf.dilations, default=0)  # rows above and below that a token depends on
        if not self.reach:
            del self.lrf

    def mix(self, *spikes: Tensor) -> Tensor:
        mixed = SSA.mix(self, *spikes)
        return self.lrf(spikes[-1], residual=mixed) if self.reach else mixed

    def weights(self, x: Tensor) -> Tensor:
        return super().weights(x) if self.reach else SSA.weights(self, x)

    def state_terms(self, grid: tuple[int, int] | None = None) -> list[StateTerm]:
        terms = super().state_terms(grid)
        if not self.reach:
            return terms
        height, width = grid or self.grid
        # A token waits for the rows below that its stencils reach, and its query and key with it.
        rows, waiting = min(2 * self.reach + 1, height), min(self.reach + 1, height)
        return [
            *terms,
            StateTerm("line buffers", f"{rows} rows of W d", rows * width * self.value_dim, self.spike_bits),
            StateTerm("q, k spikes", f"2 · {waiting} rows of W d", 2 * waiting * width * self.dim, self.spike_bits),
        ]
