"""How local attention is, by weight against Manhattan distance, entropy and how weights are distributed, and a model,
by its receptive field.

The weights of a query are absolute values (`Attention.mixing_weights`), added up over the time steps and normalised to
sum 1 over the tokens. Queries without any weight (no key spike meets them) are left out, and their share is told.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from lrfdyn.analysis.measure.observe import ImageTensors, OnBatch, as_batches, hooked, observe, watch_attentions
from lrfdyn.attention import Attention
from lrfdyn.attention.base import Spikes
from lrfdyn.checks import checked
from lrfdyn.errors import require, shown

BLOCK = 2**24  # numbers of mixing weights that are held at a time
FINE = 192  # bins of entropy that are counted
COARSEST = 8  # of them in one that is shown, at most
DOUBLING = 4  # bins of weights in a doubling
LEAST = -10  # the first of them is for weights of at most about 2^LEAST of the uniform one
DIGITS = 6  # of the map of a receptive field: more would only make files larger
LARGEST_MAP = 64  # cells a side; larger images are averaged in blocks


def manhattan(grid: tuple[int, int], queries: range | None = None) -> Tensor:
    """Distances `[queries, N]` (all of them without `queries`) between the tokens of a grid in raster order."""
    tokens = torch.arange(math.prod(grid))
    chosen = (tokens if queries is None else tokens[queries.start : queries.stop]).unsqueeze(1)
    width = grid[1]
    return (chosen // width - tokens // width).abs() + (chosen % width - tokens % width).abs()


def uniform_over_past(grid: tuple[int, int], short: int) -> dict[str, float]:
    """What equal weights over a query and the tokens before it would measure: looking back only is near, and on few
    tokens, without any preference. The reference for kinds that run over the tokens in one order."""
    distance = manhattan(grid)
    n = torch.arange(1, len(distance) + 1, dtype=torch.float64)
    near, total = (distance <= short).tril().sum(1), distance.tril().sum(1)
    means = {"short_range_share": near / n, "mean_distance": total / n, "entropy_mean": n.log()}
    return {name: float(values.mean()) for name, values in means.items()}


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


def add_by_distance(sums: Tensor, weights: Tensor, distance: Tensor) -> Tensor:
    """Adds weights `[B, queries, N]` at distances `[queries, N]` to `sums` `[2, distances]` of weights and pairs, and
    returns the weights of the queries that have any as distributions `[rows, N]`."""
    total = weights.sum(-1, keepdim=True)
    p = torch.where(total > 0, weights / total.clamp(min=torch.finfo(total.dtype).tiny), 0)
    index = distance.to(sums.device).flatten()
    for added, values in zip(sums, (p.double(), (total > 0).double().expand_as(p)), strict=True):
        added.index_add_(0, index, values.sum(0).flatten())
    return p[total.squeeze(-1) > 0]


def score_bins(tokens: int) -> int:
    """How many bins there are for weights above zero, up to that of one token that has all of a query's weight."""
    return 1 + math.floor(DOUBLING * (math.log2(tokens) - LEAST) + 0.5)


class LayerLocality:
    """Running sums of one attention layer."""

    def __init__(self, grid: tuple[int, int], device: torch.device) -> None:
        self.grid, self.tokens = grid, math.prod(grid)
        self.largest = math.log(self.tokens)  # entropy
        zeros = partial(torch.zeros, dtype=torch.float64, device=device)
        self.sums, self.last_row = zeros(2, sum(grid) - 1), zeros(2, sum(grid) - 1)  # of weights and pairs by distance
        self.entropy, self.histogram = zeros(()), zeros(FINE)
        self.weights = zeros(1 + score_bins(self.tokens))  # how many are zero, and how many are in every bin
        self.seen = 0

    def add(self, queries: range, weights: Tensor) -> None:
        """Takes the weights `[B, queries, N]` of a range of queries."""
        weights = weights.double()
        distance = manhattan(self.grid, queries)
        p = add_by_distance(self.sums, weights, distance)
        value = (-torch.xlogy(p, p).sum(-1)).clamp(0, self.largest)  # entropy in nats
        late = max(0, self.tokens - self.grid[1] - queries.start)
        add_by_distance(self.last_row, weights[:, late:], distance[late:])
        self.seen += weights.shape[0] * weights.shape[1]
        self.entropy += value.sum()
        places = (value / (self.largest / FINE or 1.0)).long().clamp(max=FINE - 1)
        self.histogram += torch.bincount(places, minlength=FINE)
        # 0 for a weight of zero; a bin has the uniform weight in its middle.
        bins = (DOUBLING * ((p * self.tokens).log2() - LEAST) + 0.5).floor().clamp(0, len(self.weights) - 2) + 1
        self.weights += torch.bincount((bins * (p > 0)).long().flatten(), minlength=len(self.weights))

    @property
    def queries(self) -> float:
        """Those that have any weight: each is its only token at distance 0."""
        return float(self.sums[1, 0])


class Locality:
    """Attention weight against distance and entropy of every attention layer."""

    def __init__(self, block: int = BLOCK) -> None:
        self.block = block
        self.layers: dict[str, LayerLocality] = {}
        self.notes: dict[str, None] = {}  # what could not be measured, each line once

    def watch(self, model: nn.Module) -> list[RemovableHandle]:
        return watch_attentions(model, self._add)

    def _add(self, name: str, module: Attention, x: Tensor, spikes: Spikes) -> None:
        grid = (x.shape[3], x.shape[4])
        if module.fixed_mixing and name in self.layers:
            return
        blocks = module.mixing_weights(spikes, grid, self.block)
        if blocks is None:
            self.notes[module.missing("how it mixes tokens (mixing_weights): its locality is left out")] = None
        for queries, weights in blocks or ():
            layer = self.layers.setdefault(name, LayerLocality(grid, x.device))
            require(layer.grid == grid, f"images: expected one size, got grids {layer.grid} and {grid}")
            layer.add(queries, weights)

    def record(self) -> dict[str, Any]:
        """Per layer and averaged over layers; empty without layers. A layer in which no query has any weight is None in
        the lists and in no average."""
        if not self.layers:
            return {}
        layers = list(self.layers.values())
        counted = [layer for layer in layers if layer.queries]
        largest = max(layers, key=lambda layer: layer.tokens)
        reach = sum(largest.grid) - 2
        short = max(1, reach // 4)
        past, steps = uniform_over_past(largest.grid, short), torch.arange(reach + 1, dtype=torch.float64)
        distance = manhattan(largest.grid)

        def by_layer(values: Iterable[Any]) -> list[Any]:
            """The values of the layers that are counted, in the places of all."""
            value = iter(values)
            return [next(value) if layer.queries else None for layer in layers]

        def padded(values: Tensor) -> Tensor:
            return F.pad(values.cpu(), (0, reach + 1 - len(values)))

        weights = [padded(layer.sums[0] / layer.sums[1].clamp(min=1)) for layer in counted]
        shares = [padded(layer.sums[0] / layer.queries) for layer in counted]
        entropies = [float(layer.entropy / layer.queries) for layer in counted]
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
            "uniform_over_past": past,
            "queries_without_weight": sum(1 - layer.queries / layer.seen for layer in layers) / len(layers),
        }
        if not counted:
            return record
        share = torch.stack(shares).mean(0)
        edges = torch.linspace(0, largest.largest, FINE + 1, dtype=torch.float64)
        masses = [placed(a.histogram.cpu() / a.queries, a.largest, largest.largest) for a in counted]
        edges, joined = merged(edges, torch.stack(masses), round(sum(a.queries for a in counted)))
        densities = joined / (float(edges[1] - edges[0]) or 1.0)  # one token has no entropy
        histogram = {"edges": edges.tolist(), "density": densities.mean(0).tolist()}
        scores = [F.pad(a.weights.cpu() / a.weights.sum().cpu(), (0, score_bins(largest.tokens) + 1 - len(a.weights)))
                  for a in counted]  # fmt: skip
        middle = torch.arange(score_bins(largest.tokens) + 1, dtype=torch.float64) - 0.5
        last = [padded(a.last_row[0] / a.last_row[1, 0]) for a in counted if a.last_row[1, 0]]
        return record | {
            "weight": torch.stack(weights).mean(0).tolist(),
            "share": share.tolist(),
            "short_range_share": float(share[: short + 1].sum()),
            "mean_distance": float((share * steps).sum()),
            # Of the queries that come last in raster order, which may look at every token, or nearly, in any kind.
            "last_row_short_range_share": float(torch.stack(last).mean(0)[: short + 1].sum()) if last else None,
            "last_row_short_range_share_uniform": float((distance[-largest.grid[1] :] <= short).double().mean()),
            "entropy_mean": sum(entropies) / len(counted),
            "entropy_histogram": histogram | {"density_by_layer": by_layer(densities.tolist())},
            # Of all pairs of a query and a key, by weight in units of the uniform one: those without, and by bins.
            "score_histogram": {
                "edges": (2 ** (middle / DOUBLING + LEAST)).tolist(),
                "zero": float(torch.stack(scores).mean(0)[0]),
                "share": torch.stack(scores).mean(0)[1:].tolist(),
                "share_by_layer": by_layer(s[1:].tolist() for s in scores),
            },
        }


@checked
def locality(model: nn.Module, images: ImageTensors) -> dict[str, Any]:
    """Attention weight against distance and entropy of `model` on `images` `[n, C, H, W]` or batches of them, per layer
    and averaged over layers."""
    measured = Locality()
    (record,) = observe(model, images, measured)
    none = f"model: expected one with attention layers, got {type(model).__name__}"
    require(bool(record), next(iter(measured.notes), none))
    return record


class EvenTies(TorchFunctionMode):
    """While it is open, the gradient of a max pool is shared by all inputs that reach the maximum. Among spikes many
    do, and PyTorch gives all of it to the first in raster order, which moves the field up and to the left."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if func in (F.max_pool2d, torch.max_pool2d) and not given.pop("return_indices", False):
            return even_max_pool(*args, **given)
        return func(*args, **(kwargs or {}))


def even_max_pool(
    x: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
) -> Tensor:
    """Compute `F.max_pool2d` along one axis and then the other: `amax` shares its gradient among equals."""
    size = F.max_pool2d(x.detach(), kernel_size, stride, padding, dilation, ceil_mode).shape[-2:]
    given = (kernel_size, stride or kernel_size, padding, dilation)
    for axis in (-2, -1):
        kernel, step, pad, gap = (value if isinstance(value, int) else value[axis] for value in given)
        window = (kernel - 1) * gap + 1
        after = max(0, (size[axis] - 1) * step + window - pad - x.shape[axis])
        x = F.pad(x, (pad, after) if axis == -1 else (0, 0, pad, after), value=-torch.inf)
        x = x.unfold(axis, window, step)[..., ::gap].amax(-1)
    return x


@checked
def receptive_field(
    model: nn.Module, images: ImageTensors, on_batch: OnBatch = lambda _: None, through_attention: bool = True
) -> Tensor:
    """|d centre output / d input| `[H, W]` of images `[n, C, H, W]` or batches of them, summed over channels, averaged
    over images. Spikes pass their surrogate gradient, max pools share theirs among equals. Without `through_attention`,
    no gradient passes q, k and v: only that of the convolutions and shortcuts is left."""
    attentions = [] if through_attention else [m for m in model.modules() if isinstance(m, Attention)]
    layers = [getattr(attention, name) for attention in attentions for name in attention.projections]
    handles = [layer.register_forward_hook(lambda _module, _args, spikes: spikes.detach()) for layer in layers]
    total, count, host = torch.zeros(()), 0, cast(Any, model)  # whatever has feature maps
    require(hasattr(host, "forward_features"), f"model: expected one with `forward_features`, got {shown(model)}")
    with hooked(model, handles), EvenTies():
        for batch in as_batches(images):
            x = batch.detach().clone().requires_grad_()
            features = host.forward_features(x)
            row, column = features.shape[-2] // 2, features.shape[-1] // 2
            (gradient,) = torch.autograd.grad(features[..., row, column].sum(), x)
            total = total.to(x.device) + gradient.abs().sum(-3).flatten(0, -3).sum(0)
            count += batch.shape[-4]
            on_batch(batch.shape[-4])
    return total / count


@checked
def share_inside(field: Tensor, centre: Sequence[int]) -> list[dict[str, Any]]:
    """The share of `field` `[H, W]` inside squares of side 1, 3, 5, ... around the pixel `centre`. The last one is the
    whole field, whose side is the longer one of `field`: no square is larger."""
    row, column = ((torch.arange(size) - at).abs() for size, at in zip(field.shape, centre, strict=True))
    ring = torch.maximum(row.unsqueeze(1), column)
    sums = torch.zeros(int(ring.max()) + 1, dtype=field.dtype).index_add_(0, ring.flatten(), field.flatten())
    total = field.sum()
    shares = sums.cumsum(0) / total if total > 0 else torch.zeros_like(sums)
    inside = {min(2 * r + 1, max(field.shape)): float(share) for r, share in enumerate(shares)}
    return [{"side": side, "share": share} for side, share in inside.items()]


@checked
def receptive_field_record(
    model: nn.Module, images: ImageTensors, on_batch: OnBatch = lambda _: None
) -> dict[str, Any]:
    """Measure the receptive field of a model on images `[n, C, H, W]` or batches of them: the map in cells of
    `pixels_per_cell`, scaled to a maximum of 1, the pixel `centre` that the output looks at, the share inside growing
    squares around it, and the side of the square that holds half. `without_attention` has the same shares with the
    gradient of attention cut, and how much of all gradient is left."""
    batches = list(as_batches(images))
    field = receptive_field(model, batches, on_batch).double().cpu()
    stride = cast(Any, model).feature_info[-1].stride
    # All hosts shrink with odd kernels and a padding of half of one: output i looks straight at pixel i * stride.
    centre = [-(-size // stride) // 2 * stride for size in field.shape]
    shares = share_inside(field, centre)
    block = -(-max(field.shape) // LARGEST_MAP)
    cells = F.avg_pool2d(field[None, None], block, ceil_mode=True)[0, 0]
    scaled = cells / cells.max() if cells.max() > 0 else cells
    record: dict[str, Any] = {
        "pixels_per_cell": block,
        "centre": centre,
        "map": [[round(value, DIGITS) for value in row] for row in scaled.tolist()],
        "share_inside": shares,
        "half_side": next((s["side"] for s in shares if s["share"] >= 0.5), None),
    }
    if any(isinstance(module, Attention) for module in model.modules()):
        rest = receptive_field(model, batches, on_batch, through_attention=False).double().cpu()
        left = float(rest.sum() / field.sum()) if field.sum() > 0 else None
        record["without_attention"] = {"gradient": left, "share_inside": share_inside(rest, centre)}
    return record
