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
from lrfdyn.attention.base import Spikes
from lrfdyn.errors import require

BLOCK = 2**24  # numbers of mixing weights that are held at a time


def manhattan(grid: tuple[int, int], queries: range | None = None) -> Tensor:
    """Distances `[queries, N]` (all of them without `queries`) between the tokens of a grid in raster order."""
    height, width = grid
    row = torch.arange(height).repeat_interleave(width)
    column = torch.arange(width).repeat(height)
    chosen = slice(None) if queries is None else slice(queries.start, queries.stop)
    return (row[chosen].unsqueeze(1) - row).abs() + (column[chosen].unsqueeze(1) - column).abs()


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

    def add(self, weights: Tensor, distance: Tensor) -> Tensor:
        """Takes weights `[B, queries, N]` and the distances `[queries, N]`, and returns the weights of the queries that
        have any as distributions `[rows, N]`."""
        total = weights.sum(-1, keepdim=True)
        has_weight = total.squeeze(-1) > 0
        p = torch.where(total > 0, weights / total.clamp(min=torch.finfo(total.dtype).tiny), 0)
        count, index = has_weight.double().sum(0), distance.to(weights.device).flatten()
        self.weight.index_add_(0, index, p.double().sum(0).flatten())
        self.pairs.index_add_(0, index, count.unsqueeze(1).expand(-1, weights.shape[-1]).flatten())
        self.queries += count.sum()
        return p[has_weight]

    def mean_weight(self) -> Tensor:
        return self.weight / self.pairs.clamp(min=1)

    def share(self) -> Tensor:
        return self.weight / self.queries.clamp(min=1)


class LayerLocality:
    """Running sums of one attention layer."""

    def __init__(self, grid: tuple[int, int], device: torch.device) -> None:
        self.grid, self.tokens = grid, math.prod(grid)
        self.largest = math.log(self.tokens)  # entropy
        self.sums, self.last_row = (DistanceSums(sum(grid) - 1, device) for _ in range(2))
        self.entropy = torch.zeros((), dtype=torch.float64, device=device)
        self.histogram = torch.zeros(FINE, dtype=torch.float64, device=device)
        self.seen = 0

    def add(self, queries: range, weights: Tensor) -> None:
        """Takes the weights `[B, queries, N]` of a range of queries."""
        weights = weights.double()
        distance = manhattan(self.grid, queries)
        value = entropy(self.sums.add(weights, distance)).clamp(0, self.largest)
        late = max(0, self.tokens - self.grid[1] - queries.start)
        self.last_row.add(weights[:, late:], distance[late:])
        self.seen += weights.shape[0] * weights.shape[1]
        self.entropy += value.sum()
        places = (value / (self.largest / FINE or 1.0)).long().clamp(max=FINE - 1)
        self.histogram += torch.bincount(places, minlength=FINE)


class Locality:
    """Attention weight against distance and entropy of every attention layer."""

    def __init__(self, block: int = BLOCK) -> None:
        self.block = block
        self.layers: dict[str, LayerLocality] = {}
        self.notes: dict[str, None] = {}  # what could not be measured, each line once

    def watch(self, model: nn.Module) -> list[RemovableHandle]:
        return watch_attentions(model, self.note)

    def note(self, name: str, module: Attention, x: Tensor, spikes: Spikes) -> None:
        """Takes the spikes of an attention layer for a batch of images."""
        grid = (x.shape[3], x.shape[4])
        if module.fixed_mixing and name in self.layers:
            return
        blocks = module.mixing_weights(spikes, grid, self.block)
        if blocks is None:
            self.notes[module.missing("how it mixes tokens (mixing_weights): its locality is left out")] = None
            return
        layer = self.layers.setdefault(name, LayerLocality(grid, x.device))
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
        steps = torch.arange(reach + 1, dtype=torch.float64)
        counted = [layer for layer in layers if float(layer.sums.queries)]

        def by_layer(values: Iterable[Any]) -> list[Any]:
            """The values of the layers that are counted, in the places of all."""
            value = iter(values)
            return [next(value) if float(layer.sums.queries) else None for layer in layers]

        weights = [_padded(layer.sums.mean_weight(), reach) for layer in counted]
        shares = [_padded(layer.sums.share(), reach) for layer in counted]
        entropies = [float(layer.entropy / layer.sums.queries) for layer in counted]
        record: dict[str, Any] = {
            "layers": list(self.layers),
            "grid": list(largest.grid),
            "distance": list(range(reach + 1)),
            "weight_by_layer": by_layer(w.tolist() for w in weights),
            "share_by_layer": by_layer(s.tolist() for s in shares),
            "short_distance": short,
            "short_range_share_by_layer": by_layer(float(s[: short + 1].sum()) for s in shares),
            "short_range_share_uniform": float((distance <= short).double().mean()),
            "mean_distance_by_layer": by_layer(float((s * steps).sum()) for s in shares),
            "mean_distance_uniform": float(distance.double().mean()),
            "entropy_uniform": largest.largest,
            "entropy_by_layer": by_layer(entropies),
            "uniform_over_past": uniform_over_past(largest.grid, short),
            "queries_without_weight": sum(1 - float(a.sums.queries) / a.seen for a in layers) / len(layers),
        }
        if not counted:
            return record
        share = torch.stack(shares).mean(0)
        edges = torch.linspace(0, largest.largest, FINE + 1, dtype=torch.float64)
        masses = torch.stack(
            [placed(a.histogram.cpu() / float(a.sums.queries), a.largest, largest.largest) for a in counted]
        )
        edges, masses = merged(edges, masses, round(sum(float(a.sums.queries) for a in counted)))
        densities = masses / (float(edges[1] - edges[0]) or 1.0)  # one token has no entropy
        last = [_padded(a.last_row.share(), reach) for a in counted if float(a.last_row.queries)]
        return record | {
            "weight": torch.stack(weights).mean(0).tolist(),
            "share": share.tolist(),
            "short_range_share": float(share[: short + 1].sum()),
            "mean_distance": float((share * steps).sum()),
            # Of the queries that come last in raster order, which may look at every token, or nearly, in any kind.
            "last_row_short_range_share": float(torch.stack(last).mean(0)[: short + 1].sum()) if last else None,
            "last_row_short_range_share_uniform": float((distance[-largest.grid[1] :] <= short).double().mean()),
            "entropy_mean": sum(entropies) / len(counted),
            "entropy_histogram": {
                "edges": edges.tolist(),
                "density": densities.mean(0).tolist(),
                "density_by_layer": by_layer(densities.tolist()),
            },
        }


def _padded(values: Tensor, reach: int) -> Tensor:
    """On the distances of the largest grid."""
    return torch.nn.functional.pad(values.cpu(), (0, reach + 1 - len(values)))


def locality(model: nn.Module, images: Tensor | Iterable[Tensor]) -> dict[str, Any]:
    """Attention weight against distance and entropy of `model` on `images` `[n, C, H, W]` or batches of them, per layer
    and averaged over layers."""
    attentions = any(isinstance(module, Attention) for module in model.modules())
    require(attentions, f"model: expected one with attention layers, got {type(model).__name__}")
    measured = Locality()
    observe(model, as_batches(images), [measured])
    return measured.record()
