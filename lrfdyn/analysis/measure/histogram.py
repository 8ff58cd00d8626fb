"""Histograms that are counted finely and shown as finely as their sample allows."""

from __future__ import annotations

import torch
from torch import Tensor

FINE = 192  # bins that are counted
COARSEST = 8  # of them in one that is shown, at most


def placed(mass: Tensor, top: float, common: float) -> Tensor:
    """The mass of equal bins from 0 to `top` on as many equal bins from 0 to `common` >= `top`."""
    if top == common:
        return mass
    middles = (torch.arange(len(mass), dtype=torch.float64) + 0.5) / len(mass) * top
    bins = (middles / common * len(mass)).long().clamp(max=len(mass) - 1)
    return torch.zeros_like(mass).index_add_(0, bins, mass)


def merged(edges: Tensor, masses: Tensor, sample: int) -> tuple[Tensor, Tensor]:
    """Edges and masses `[rows, bins]` with neighbouring bins joined to the width that Freedman and Diaconis give for
    the mean of the rows: twice the interquartile range over the cube root of the sample."""
    total = masses.mean(0).cumsum(0)
    quarter, three = (int(torch.searchsorted(total, share * float(total[-1]))) for share in (0.25, 0.75))
    wanted = 2 * (three - quarter) / max(1, sample) ** (1 / 3)  # in bins
    bins = masses.shape[1]
    factor = max(f for f in range(1, COARSEST + 1) if f == 1 or (bins % f == 0 and f <= wanted))
    return edges[::factor], masses.unflatten(1, (-1, factor)).sum(-1)
