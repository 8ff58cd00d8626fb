"""How local attention is: weight against Manhattan distance, and entropy.

The weights of a query are absolute values (`Attention.weights`), added up over the time steps and normalised to sum 1
over the tokens. Queries without any weight (no key spike meets them at any step) are left out, and their share is told.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lrfdyn.attention import Attention
from lrfdyn.errors import require


def attention_inputs(model: nn.Module, images: Tensor) -> dict[str, Tensor]:
    """The input `[T, B, C, H, W]` of every attention layer, by name."""
    inputs: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
            inputs[name] = args[0].detach()

        return hook

    handles = [
        module.register_forward_pre_hook(keep(name))
        for name, module in model.named_modules()
        if isinstance(module, Attention)
    ]
    try:
        model.eval()
        with torch.no_grad():
            model(images)
    finally:
        for handle in handles:
            handle.remove()
    return inputs


def manhattan(grid: tuple[int, int]) -> Tensor:
    """Distances `[N, N]` between the tokens of a grid in raster order."""
    height, width = grid
    row = torch.arange(height).repeat_interleave(width)
    column = torch.arange(width).repeat(height)
    return (row.unsqueeze(1) - row).abs() + (column.unsqueeze(1) - column).abs()


def normalize(weights: Tensor) -> Tensor:
    """Rows of `[..., N, N]` as distributions `[rows, N]`, empty rows left out."""
    rows = weights.flatten(0, -2)
    total = rows.sum(-1, keepdim=True)
    return (rows / total)[total.squeeze(-1) > 0]


def entropy(p: Tensor) -> Tensor:
    """Entropy in nats of the distributions in the last axis."""
    return -torch.xlogy(p, p).sum(-1)


def weight_by_distance(weights: Tensor, distance: Tensor) -> tuple[Tensor, Tensor]:
    """Mean normalised weight of a query-key pair, and share of all weight, at each distance 0, 1, 2, ..."""
    n = distance.shape[0]
    per_query = weights.reshape(-1, n, n)
    total = per_query.sum(-1, keepdim=True)
    p = torch.where(total > 0, per_query / total.clamp(min=torch.finfo(total.dtype).tiny), 0)
    queries = (total.squeeze(-1) > 0).to(p.dtype)
    bins = int(distance.max()) + 1
    index = distance.flatten()
    weight = torch.zeros(bins, dtype=p.dtype).index_add_(0, index, p.sum(0).flatten())
    pairs = torch.zeros(bins, dtype=p.dtype).index_add_(0, index, queries.sum(0).unsqueeze(1).expand(n, n).flatten())
    return weight / pairs.clamp(min=1), weight / queries.sum().clamp(min=1)


def locality(model: nn.Module, images: Tensor, bins: int = 24) -> dict[str, Any]:
    """Attention weight against distance and entropy, per layer and averaged over layers.

    A layer in which no query has any weight is None in the lists and in no average.
    """
    inputs = attention_inputs(model, images)
    require(len(inputs) > 0, f"model: expected one with attention layers, got {type(model).__name__}")
    modules = dict(model.named_modules())
    by_layer: list[Tensor | None] = []
    shares, entropies, empty = [], [], []
    distance = torch.zeros(1, 1, dtype=torch.int64)
    for name, x in inputs.items():
        module = modules[name]
        assert isinstance(module, Attention)
        with torch.no_grad():
            weights = module.weights(x).unflatten(0, x.shape[:2]).sum(0).double().cpu()
        distance = manhattan((x.shape[3], x.shape[4]))
        p = normalize(weights)
        empty.append(1 - len(p) / weights[..., 0].numel())
        entropies.append(entropy(p))
        weight, share = weight_by_distance(weights, distance)
        by_layer.append(weight if len(p) else None)
        if len(p):
            shares.append(share)
    n = distance.shape[0]
    reach = int(distance.max())
    short = max(1, reach // 4)
    record: dict[str, Any] = {
        "distance": list(range(reach + 1)),
        "weight_by_layer": [None if w is None else w.tolist() for w in by_layer],
        "short_distance": short,
        "short_range_share_uniform": float((distance <= short).double().mean()),
        "entropy_uniform": math.log(n),
        "entropy_by_layer": [float(e.mean()) if len(e) else None for e in entropies],
        "queries_without_weight": sum(empty) / len(empty),
    }
    if not shares:
        return record
    share = torch.stack(shares).mean(0)
    everything = torch.cat(entropies)
    edges = torch.linspace(0, math.log(n), bins + 1, dtype=torch.float64)
    histogram, _ = torch.histogram(everything.clamp(max=math.log(n)), bins=edges, density=True)
    return record | {
        "weight": torch.stack([w for w in by_layer if w is not None]).mean(0).tolist(),
        "short_range_share": float(share[: short + 1].sum()),
        "mean_distance": float((share * torch.arange(len(share))).sum()),
        "entropy_mean": float(everything.mean()),
        "entropy_histogram": {"edges": edges.tolist(), "density": histogram.tolist()},
    }
