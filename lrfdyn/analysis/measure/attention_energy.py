"""Operations inside attention, beyond its projections, from the spikes of q, k and v (whole numbers)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lrfdyn.analysis.measure.observe import Spikes
from lrfdyn.analysis.measure.synapses import stencil_uses
from lrfdyn.attention import LRFSSA, SDSA, SSA, VSA, Attention, LRFDyn
from lrfdyn.attention.base import to_heads
from lrfdyn.errors import LrfdynError

Counts = dict[str, tuple[Tensor, float]]  # part: accumulates, or multiply-accumulates where there are any


def attention_counts(module: Attention, spikes: Spikes, grid: tuple[int, int]) -> Counts:
    """Parts of a layer and their operations for all images and time steps of `spikes` `[T, B, C, H, W]`."""
    if isinstance(module, LRFDyn):
        return _dendrite_counts(module, spikes, grid)
    if isinstance(module, SDSA):
        return {"k * v": ((module.widen(spikes["k"]) * spikes["v"]).sum(), 0.0)}
    if not isinstance(module, SSA):
        raise LrfdynError(f"attention: operations of {type(module).__name__} are not known here")
    q, k, v = (to_heads(spikes[name], module.heads) for name in ("q", "k", "v"))
    if isinstance(module, VSA):
        # Scores of spikes: one accumulate where q and k both fire. Then every spike of v is added to all N queries,
        # weighted: the weight is what is accumulated.
        scores = (q.sum(2) * k.sum(2)).sum()
        return {"q k^T": (scores, 0.0), "softmax v": (v.sum() * math.prod(grid), 0.0)}
    # k^T v: one accumulate where k and v of a head both fire. q (k^T v): a spike of q takes a row of the matrix.
    counts: Counts = {
        "k^T v": ((k.sum(-1) * v.sum(-1)).sum(), 0.0),
        "q (k^T v)": (q.sum() * v.shape[-1], 0.0),
    }
    if isinstance(module, LRFSSA) and module.lrf.dilations:
        per_place = spikes["v"].sum((0, 1, 2))
        uses = sum(stencil_uses(*grid, d, per_place.device) for d in module.lrf.dilations)
        counts["lrf"] = ((per_place * uses).sum(), 0.0)
    return counts


def _dendrite_counts(module: LRFDyn, spikes: Spikes, grid: tuple[int, int]) -> Counts:
    v = spikes["v"]
    u = v if module.token == "value" else module.widen(spikes["k"]) * v
    modes = module.dendrites.weight.shape[1]  # k / 2
    none = torch.zeros((), dtype=torch.float64, device=v.device)
    counts: Counts = {
        "dendrites, input": (u.sum() * modes, 0.0),
        # A turn and a decay of two numbers per mode: four products. The read-out: two.
        "dendrites, recurrence": (none, 4.0 * modes * v.numel()),
        "dendrites, read-out": (none, 2.0 * modes * v.numel()),
    }
    if module.lrf.dilations:
        frames = v.numel() // math.prod(grid)
        uses = sum(float(stencil_uses(*grid, d, v.device).sum()) for d in module.lrf.dilations)
        counts["lrf"] = (none, frames * uses)
    return counts
