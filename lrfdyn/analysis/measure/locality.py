"""How local attention is: weight against Manhattan distance, and entropy.

The weights of a query are absolute values (`Attention.mixing_weights`), added up over the time steps and normalised to
sum 1 over the tokens. Queries without any weight (no key spike meets them at any step) are left out, and their share is
told.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lrfdyn.analysis.measure.histogram import FINE, merged, placed
from lrfdyn.analysis.measure.observe import as_batches, observe, watch_attentions
from lrfdyn.attention import Attention
from lrfdyn.attention.base import BLOCK, Spikes
from lrfdyn.errors import require


def manhattan(grid: tuple[int, int], queries: range | None = None) -> Tensor:
    """Distances `[queries, N]` (all of them without `queries`) between the tokens of a grid in raster order."""
    height, width = grid
    row = torch.arange(height).repeat_interleave(width)
    column = torch.arange(width).repeat(height)
    chosen = slice(None) if queries is None else slice(queries.start, queries.stop)
    return (row[chosen].unsqueeze(1) - row).abs() + (column[chosen].unsqueeze(1) - column).abs()


def normalize(weights: Tensor) -> Tensor:
    """Rows of `[..., N, N]` as distributions `[rows, N]`, empty rows left out."""
    rows = weights.flatten(0, -2)
    total = rows.sum(-1, keepdim=True)
    return (rows / total)[total.squeeze(-1) > 0]


def entropy(p: Tensor) -> Tensor:
    """Entropy in nats of the distributions in the last axis."""
    return -torch.xlogy(p, p).sum(-1)


def uniform_over_past(grid: tuple[int, int], short: int) -> dict[str, float]:
    """What equal weights over a query and the tokens before it would measure: looking back only is near, and on few
    tokens, without any preference. The reference for kinds that run over the tokens in order."""
    distance = manhattan(grid)
    n = torch.arange(1, len(distance) + 1, dtype=torch.float64)
    near = (distance <= short).tril().sum(1)
    return {
        "short_range_share": float((near / n).mean()),
        "mean_distance": float((distance.tril().sum(1) / n).mean()),
        "entropy_mean": float(n.log().mean()),
    }


class DistanceSums:
    """Sums of weights and of pairs by distance, over queries that come in blocks."""

    def __init__(self, bins: int, device: torch.device) -> None:
        self.weight, self.pairs = (torch.zeros(bins, dtype=torch.float64, device=device) for _ in range(2))
        self.queries = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, weights: Tensor, distance: Tensor) -> None:
        """Weights `[B, queries, N]` and the distances `[queries, N]`."""
        total = weights.sum(-1, keepdim=True)
        p = torch.where(total > 0, weights / total.clamp(min=torch.finfo(total.dtype).tiny), 0)
        has_weight = (total.squeeze(-1) > 0).double().sum(0)
        index = distance.to(weights.device).flatten()
        self.weight.index_add_(0, index, p.double().sum(0).flatten())
        self.pairs.index_add_(0, index, has_weight.unsqueeze(1).expand(-1, weights.shape[-1]).flatten())
        self.queries += has_weight.sum()

    def mean_weight(self) -> Tensor:
        return self.weight / self.pairs.clamp(min=1)

    def share(self) -> Tensor:
        return self.weight / self.queries.clamp(min=1)


class LayerLocality:
    """Running sums of one attention layer."""

    def __init__(self, grid: tuple[int, int], bins: int, device: torch.device) -> None:
        height, width = grid
        self.grid, self.tokens = grid, height * width
        self.sums, self.last_row = (DistanceSums(height + width - 1, device) for _ in range(2))
        self.entropy = torch.zeros((), dtype=torch.float64, device=device)
        self.histogram = torch.zeros(bins, dtype=torch.float64, device=device)
        self.seen = 0

    def add(self, queries: range, weights: Tensor) -> None:
        weights = weights.double()
        distance = manhattan(self.grid, queries)
        self.sums.add(weights, distance)
        late = max(0, self.tokens - self.grid[1] - queries.start)
        self.last_row.add(weights[:, late:], distance[late:])
        self.seen += weights.shape[0] * weights.shape[1]
        value = entropy(normalize(weights)).clamp(0, self.largest)
        self.entropy += value.sum()
        width = self.largest / len(self.histogram) or 1.0
        places = (value / width).long().clamp(max=len(self.histogram) - 1)
        self.histogram += torch.bincount(places, minlength=len(self.histogram))

    @property
    def largest(self) -> float:
        return math.log(self.tokens)


class Locality:
    """Attention weight against distance and entropy of every attention layer."""

    def __init__(self, bins: int | None = None, block: int = BLOCK) -> None:
        self.bins, self.block = bins, block
        self.layers: dict[str, LayerLocality] = {}
        self.notes: dict[str, None] = {}  # what could not be measured, each line once

    def watch(self, model: nn.Module) -> list[RemovableHandle]:
        return watch_attentions(model, self.note)

    def note(self, name: str, module: Attention, x: Tensor, spikes: Spikes) -> None:
        grid = (x.shape[3], x.shape[4])
        if module.fixed_mixing and name in self.layers:
            return
        blocks = module.mixing_weights(spikes, grid, self.block)
        if blocks is None:
            self.notes[module.missing("how it mixes tokens (mixing_weights): its locality is left out")] = None
            return
        layer = self.layers.setdefault(name, LayerLocality(grid, self.bins or FINE, x.device))
        require(layer.grid == grid, f"images: expected one size, got grids {layer.grid} and {grid}")
        for queries, weights in blocks:
            layer.add(queries, weights)

    def record(self) -> dict[str, Any]:
        """Per layer and averaged over layers. A layer in which no query has any weight is None in the lists and in no
        average."""
        require(bool(self.layers), next(iter(self.notes), "model: expected one with attention layers"))
        layers = list(self.layers.values())
        largest = max(layers, key=lambda layer: layer.tokens)
        reach = sum(largest.grid) - 2
        short = max(1, reach // 4)
        distance = manhattan(largest.grid)
        alive = [layer if float(layer.sums.queries) else None for layer in layers]
        weights = [None if a is None else _padded(a.sums.mean_weight(), reach) for a in alive]
        shares = [None if a is None else _padded(a.sums.share(), reach) for a in alive]
        steps = torch.arange(reach + 1, dtype=torch.float64)
        record: dict[str, Any] = {
            "layers": list(self.layers),
            "grid": list(largest.grid),
            "distance": list(range(reach + 1)),
            "weight_by_layer": [None if w is None else w.tolist() for w in weights],
            "share_by_layer": [None if s is None else s.tolist() for s in shares],
            "short_distance": short,
            "short_range_share_by_layer": [None if s is None else float(s[: short + 1].sum()) for s in shares],
            "short_range_share_uniform": float((distance <= short).double().mean()),
            "mean_distance_by_layer": [None if s is None else float((s * steps).sum()) for s in shares],
            "mean_distance_uniform": float(distance.double().mean()),
            "entropy_uniform": largest.largest,
            "entropy_by_layer": [None if a is None else float(a.entropy / a.sums.queries) for a in alive],
            "uniform_over_past": uniform_over_past(largest.grid, short),
            "queries_without_weight": sum(1 - float(a.sums.queries) / a.seen for a in layers) / len(layers),
        }
        found = [s for s in shares if s is not None]
        if not found:
            return record
        share = torch.stack(found).mean(0)
        counted = [a for a in alive if a is not None]
        edges = torch.linspace(0, largest.largest, (self.bins or FINE) + 1, dtype=torch.float64)
        masses = torch.stack(
            [placed(a.histogram.cpu() / float(a.sums.queries), a.largest, largest.largest) for a in counted]
        )
        if self.bins is None:
            edges, masses = merged(edges, masses, round(sum(float(a.sums.queries) for a in counted)))
        densities = masses / (float(edges[1] - edges[0]) or 1.0)  # one token has no entropy
        by_layer = iter(densities)
        last = [_padded(a.last_row.share(), reach) for a in counted if float(a.last_row.queries)]
        return record | {
            "weight": torch.stack([w for w in weights if w is not None]).mean(0).tolist(),
            "share": share.tolist(),
            "short_range_share": float(share[: short + 1].sum()),
            "mean_distance": float((share * steps).sum()),
            # Of the queries that come last in raster order, which may look at every token, or nearly, in any kind.
            "last_row_short_range_share": float(torch.stack(last).mean(0)[: short + 1].sum()) if last else None,
            "last_row_short_range_share_uniform": float((distance[-largest.grid[1] :] <= short).double().mean()),
            "entropy_mean": sum(float(a.entropy / a.sums.queries) for a in counted) / len(counted),
            "entropy_histogram": {
                "edges": edges.tolist(),
                "density": densities.mean(0).tolist(),
                "density_by_layer": [None if a is None else next(by_layer).tolist() for a in alive],
            },
        }


def _padded(values: Tensor, reach: int) -> Tensor:
    """On the distances of the largest grid."""
    return torch.nn.functional.pad(values.cpu(), (0, reach + 1 - len(values)))


def locality(model: nn.Module, images: Tensor | Iterable[Tensor], bins: int | None = None) -> dict[str, Any]:
    """Attention weight against distance and entropy, per layer and averaged over layers. Without `bins`, the histogram
    of entropies is as fine as the number of queries allows."""
    require(bins is None or bins >= 1, f"bins: expected an integer >= 1, got {bins}")
    require(
        any(isinstance(m, Attention) for m in model.modules()),
        f"model: expected one with attention layers, got {type(model).__name__}",
    )
    measured = Locality(bins)
    observe(model, as_batches(images), [measured])
    return measured.record()
