"""Causal spiking self-attention, with or without local receptive fields."""

from __future__ import annotations

from collections.abc import Sequence

from lrfdyn.attention.base import Grid, StateTerm
from lrfdyn.attention.host import AttentionHost
from lrfdyn.attention.lrf_ssa import LRFSSA
from lrfdyn.attention.registry import register_attention


@register_attention("causal_ssa", label="causal SSA")
class CausalSSA(LRFSSA):
    """s sum_{j <= n} (q_n k_j) v_j in raster order, + sum_d DWConv3x3(v; dilation d).

    The stencils are those of LRF-SSA: they see the rows below too, so only the first term is causal. There are none by
    default.
    """

    causal = True

    def __init__(self, dim: int, heads: int, grid: Grid, host: AttentionHost, dilations: Sequence[int] = ()) -> None:
        super().__init__(dim, heads, grid, host, dilations)

    def state_terms(self, grid: Grid | None = None) -> list[StateTerm]:
        terms = super().state_terms(grid)
        height, width = grid or self.grid
        reach = max(self.lrf.dilations, default=0)
        if not reach:
            return terms
        # A token waits for the rows below that its stencils reach, and its query and key with it.
        rows, waiting = min(2 * reach + 1, height), min(reach + 1, height)
        return [
            *terms,
            StateTerm("line buffers", f"{rows} rows of W d", rows * width * self.value_dim, self.spike_bits),
            StateTerm("q, k spikes", f"2 · {waiting} rows of W d", 2 * waiting * width * self.dim, self.spike_bits),
        ]
