"""LRF-SSA: spiking self-attention plus local receptive fields on the values."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lrfdyn.attention.base import AttentionHost, StateTerm
from lrfdyn.attention.local import LocalReceptiveFields
from lrfdyn.attention.ssa import SSA


class LRFSSA(SSA):
    """s q (k^T v) + sum_d DWConv3x3(v; dilation d). The scale is on the global term only."""

    def __init__(
        self,
        dim: int,
        heads: int,
        grid: tuple[int, int],
        host: AttentionHost,
        dilations: Sequence[int] = (3, 5),
    ) -> None:
        super().__init__(dim, heads, grid, host)
        self.lrf = LocalReceptiveFields(self.value_dim, dilations)

    def mix(self, *spikes: Tensor) -> Tensor:
        return self.lrf(spikes[-1], residual=super().mix(*spikes))

    def scores(self, x: Tensor) -> Tensor:
        local = self.lrf.matrix((x.shape[3], x.shape[4]))
        return super().scores(x) + local.unflatten(0, (self.heads, -1)).mean(1)

    def state_terms(self, grid: tuple[int, int] | None = None) -> list[StateTerm]:
        return [*super().state_terms(grid), *self.lrf.state_terms(grid or self.grid, bits=1)]
