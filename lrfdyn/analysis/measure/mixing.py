"""Attention weights a few queries at a time, from the spikes of the projections.

The same numbers as `Attention.weights` (absolute values, mean over heads or channels, added up over the time steps),
but never more than a block of rows of the N x N matrices of the heads is held.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lrfdyn.analysis.measure.observe import Spikes
from lrfdyn.attention import LRFSSA, SDSA, SSA, VSA, Attention, LRFDyn
from lrfdyn.attention.base import to_heads, to_tokens
from lrfdyn.errors import LrfdynError
from lrfdyn.ops.lrf import lrf

BLOCK = 2**24  # numbers held at a time


def weight_blocks(
    module: Attention, spikes: Spikes, grid: tuple[int, int], block: int = BLOCK
) -> Iterator[tuple[range, Tensor]]:
    """Ranges of queries and their weights `[B, queries, N]` (B = 1 where they do not depend on the image)."""
    n = math.prod(grid)
    if isinstance(module, LRFDyn):
        yield range(n), dendrite_weights(module, grid, block).unsqueeze(0)
        return
    if isinstance(module, SDSA):
        # What token j adds to the gate, the same for every query.
        given = to_tokens(module.widen(spikes["k"]) * spikes["v"]).abs().mean(-1)
        given = given.unflatten(0, spikes["v"].shape[:2]).sum(0)
        rows = max(1, block // (given.shape[0] * n))
        yield from ((queries, given.unsqueeze(1).expand(-1, len(queries), -1)) for queries in _ranges(n, rows))
        return
    if not isinstance(module, SSA):
        raise LrfdynError(f"attention: weights of {type(module).__name__} are not known here")
    q, k = (to_heads(spikes[name], module.heads) for name in ("q", "k"))
    rows = max(1, block // (q.shape[0] * max(module.heads * n, module.value_dim)))
    for queries in _ranges(n, rows):
        weights = _score_weights(module, q[:, :, queries.start : queries.stop], k, queries, grid)
        yield queries, weights.unflatten(0, spikes["q"].shape[:2]).sum(0)


def _ranges(n: int, size: int) -> Iterator[range]:
    for start in range(0, n, size):
        yield range(start, min(n, start + size))


def _score_weights(module: SSA, q: Tensor, k: Tensor, queries: range, grid: tuple[int, int]) -> Tensor:
    """`[T * B, queries, N]` of the kinds that score queries against keys."""
    if isinstance(module, VSA):
        return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1).mean(1)
    scores = module.scale * (q @ k.mT)
    if module.causal:
        scores = scores.tril(queries.start)
    weights = scores.abs().mean(1)
    if isinstance(module, LRFSSA):
        for (dy, dx), stencil in stencil_taps(module.lrf.weight, module.lrf.dilations).items():
            rows, keys = _neighbours(queries, grid, dy, dx, q.device)
            # Absolute values per channel, since stencils of opposite sign must not cancel.
            taps = stencil.reshape(1, module.heads, -1, 1)
            weights[:, rows, keys] = (scores[:, :, rows, keys].unsqueeze(2) + taps).abs().mean((1, 2))
    return weights


def stencil_taps(weight: Tensor, dilations: Sequence[int]) -> dict[tuple[int, int], Tensor]:
    """Offsets (dy, dx) of all stencils to their weights `[C]`, those of the same offset added."""
    taps: dict[tuple[int, int], Tensor] = {}
    for stencil, dilation in zip(weight, dilations, strict=True):
        for a in range(3):
            for b in range(3):
                offset = ((a - 1) * dilation, (b - 1) * dilation)
                taps[offset] = taps[offset] + stencil[:, a, b] if offset in taps else stencil[:, a, b]
    return taps


def _neighbours(queries: range, grid: tuple[int, int], dy: int, dx: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows of the block whose neighbour at this offset is on the grid, and that neighbour's token."""
    height, width = grid
    token = torch.arange(queries.start, queries.stop, device=device)
    y, x = token // width + dy, token % width + dx
    rows = ((y >= 0) & (y < height) & (x >= 0) & (x < width)).nonzero().squeeze(1)
    return rows, (y * width + x)[rows]


def dendrite_weights(module: LRFDyn, grid: tuple[int, int], block: int = BLOCK) -> Tensor:
    """|(I + LRF) Toeplitz(kappa)| `[N, N]`, mean over channels, a few input tokens at a time."""
    kernel = module.dendrites.kernel(grid).detach()  # [N, C]
    n, channels = kernel.shape
    token = torch.arange(n, device=kernel.device)
    columns = []
    for sources in _ranges(n, max(1, block // (n * channels))):
        lag = token - torch.arange(sources.start, sources.stop, device=kernel.device).unsqueeze(1)
        soma = (kernel[lag.clamp(min=0)] * (lag >= 0).unsqueeze(-1)).mT.unflatten(2, grid)
        columns.append(lrf(soma, module.lrf.weight.detach(), module.lrf.dilations, soma).abs().mean(1).flatten(1))
    return torch.cat(columns).T
