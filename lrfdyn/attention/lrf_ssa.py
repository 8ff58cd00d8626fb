"""LRF-SSA: spiking self-attention plus local receptive fields on the values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lrfdyn.attention.base import AttentionHost
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
        mixed, v = self.mix_and_values(*spikes)
        return self.lrf(v, residual=mixed)

    def weights(self, x: Tensor) -> Tensor:
        if not self.lrf.dilations:
            return super().weights(x)
        scores = self.scores(x)
        local = self.lrf.matrix((x.shape[3], x.shape[4])).unflatten(0, (self.heads, -1))
        # Absolute values per channel, since stencils of opposite sign must not cancel; one channel at a time.
        total = torch.zeros_like(scores[:, 0])
        for stencil in local.unbind(1):
            total += (scores + stencil).abs().mean(1)
        return total / local.shape[1]

    # The stencils read v, which SSA holds for the whole image anyway, so the state is that of SSA.
