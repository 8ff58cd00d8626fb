"""How the figures for papers are drawn: with matplotlib's pyplot, from the entries of the results to show, each with
the `rows` of the table and its `place` among all models, which decides colour and marker."""

from __future__ import annotations

import math
from base64 import b64decode
from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import partial
from io import BytesIO
from typing import Any

import numpy as np

from lrfdyn.analysis.report.look import (
    BELOW,
    LINES,
    MARKERS,
    WIDTH,
    Entries,
    colour_of,
    line_of,
    with_legend,
    wrapped,
)

# Parts of a network have colours that no model has; what the attentions differ in stands out.
PARTS = {
    "stem and other convolutions": "#c3ccd4",
    "projections": "#8a99a8",
    "inside attention": "#e0a100",
    "MLP": "#54626f",
    "classifier": "#1c2126",
}
REGIONS = ("#bfe3d0", "#fbe2a8", "#e79a86")
DASHED: dict[str, Any] = {"linestyle": "--", "linewidth": 0.9, "zorder": 5}  # a reference, above the curves


def _only(values: Iterable[Any]) -> Any:
    """The value that all have, or None: models on different grids have no common reference."""
    different = set(values)
    return different.pop() if len(different) == 1 else None


def attention_distance(plt: Any, entries: Entries) -> Any:
    height = max(2.4, 0.42 * len(entries) + 0.9)
    figure, (left, right) = plt.subplots(1, 2, figsize=(2 * WIDTH, height), width_ratios=(1.6, 1))
    local = [entry["locality"] for entry in entries]
    for entry, one in zip(entries, local, strict=True):
        left.plot(one["distance"], one["weight"], **line_of(entry))
    grid = _only(tuple(one["grid"]) for one in local)
    if grid:
        left.axhline(1 / math.prod(grid), color="#1c2126", label="uniform", **DASHED)
    left.set(xlabel="Manhattan distance (tokens)", ylabel="mean attention weight", ylim=(0, None))
    shares = [100 * one["short_range_share"] for one in local]
    bars = right.barh([wrapped(entry["label"]) for entry in entries], shares, color=list(map(colour_of, entries)))
    right.bar_label(bars, fmt="%.1f", padding=2, fontsize=7)
    right.margins(x=0.14)
    for row, one in enumerate(local):
        uniform = 100 * one["short_range_share_uniform"]
        right.plot([uniform, uniform], [row - 0.4, row + 0.4], color="#1c2126", **DASHED)
    near = _only(one["short_distance"] for one in local)
    right.set(xlabel=f"% at {'short distance' if near is None else f'distance ≤ {near}'} (dashed: uniform)")
    right.invert_yaxis()  # the first model on top
    right.grid(axis="y", visible=False)
    return with_legend(figure, left, entries)


def attention_distance_layers(plt: Any, entries: Entries) -> Any:
    layers = max(len(entry["locality"]["weight_by_layer"]) for entry in entries)
    rows, columns = -(-layers // 4), min(4, layers)
    size = (2 * WIDTH, 1.6 * rows + 0.4)
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, sharex=True, sharey=True)
    for layer, axis in enumerate(axes.flat):
        axis.set_visible(layer < layers)
        for entry in entries:
            weights = entry["locality"]["weight_by_layer"][layer : layer + 1]
            if weights and weights[0] is not None:
                axis.plot(entry["locality"]["distance"], weights[0], **line_of(entry, markersize=2))
        axis.set(title=f"layer {layer + 1}")
    axes[0][0].set(ylim=(0, None))  # behind the last line, which may be the highest
    plt.setp(axes[-1], xlabel="Manhattan distance")
    figure.supylabel("mean attention weight", fontsize=8)
    return with_legend(figure, axes[0][0], entries, fontsize=6)


def attention_entropy(plt: Any, entries: Entries) -> Any:
    figure, axis = plt.subplots(figsize=(WIDTH, 2.4))
    ends: list[float] = []
    for entry in entries:
        edges, density = (entry["locality"]["entropy_histogram"][name] for name in ("edges", "density"))
        label = f"{entry['label']}, mean {entry['locality']['entropy_mean']:.2f}"
        # Bins are as fine as the sample allows, so heights of different models compare only as shares of the largest.
        heights, style = [value / max(density) for value in density], LINES[entry["place"] % 8]
        axis.stairs(heights, edges, color=colour_of(entry), label=label, linewidth=1.1, linestyle=style)
        taken = [k for k, value in enumerate(density) if value > 0]
        ends += [edges[taken[0]], edges[taken[-1] + 1]]
    uniform = _only(round(entry["locality"]["entropy_uniform"], 9) for entry in entries)
    if uniform is not None:
        ends.append(uniform)
        axis.axvline(uniform, color="#1c2126", **DASHED)
    # Only where there is something: entropies of trained attention often all lie in the upper part.
    room = 0.04 * (max(ends) - min(ends)) or 0.1
    axis.set(xlabel=f"entropy of attention (nats{'' if uniform is None else '; dashed: uniform'})",
             ylabel="density / largest", xlim=(min(ends) - room, max(ends) + room), ylim=(0, 1.05))  # fmt: skip
    return with_legend(figure, axis, entries, below=True)


def attention_scores(plt: Any, entries: Entries) -> Any:
    figure, axis = plt.subplots(figsize=(WIDTH, 2.4))
    used = {1.0}
    for entry in entries:
        local = entry["locality"]
        edges, share, zero = (local["score_histogram"][name] for name in ("edges", "share", "zero"))
        label = f"{entry['label']}: entropy {local['entropy_mean']:.2f}, {zero:.0%} zero"
        style = {"color": colour_of(entry), "linestyle": LINES[entry["place"] % 8], "linewidth": 1.1}
        axis.stairs([100 * value for value in share], edges, baseline=None, label=label, **style)
        used.update(edge for i, value in enumerate(share) if value > 0 for edge in edges[i : i + 2])
    axis.axvline(1, color="#1c2126", **DASHED)
    axis.set(xlabel="attention weight / uniform weight (dashed)", ylabel="% of query-key pairs", xscale="log",
             yscale="log", xlim=(min(used) / 1.2, 1.2 * max(used)), ylim=(0.05, 150))  # fmt: skip
    return with_legend(figure, axis, entries, below=True)


def _overlay(plt: Any, axis: Any, picture: Any, looks: dict[str, Any], query: int, field: Any = None) -> None:
    """Draw a picture in grey under the map `field` of a query, or as it is without one, and outline the query."""
    height, width = looks["grid"]
    frame = (-0.5, width - 0.5, height - 0.5, -0.5)  # in tokens
    grey = picture if picture.ndim == 2 else picture[..., :3] @ np.array([0.299, 0.587, 0.114])
    plain = field is None and picture.ndim == 3
    axis.imshow(picture if plain else grey, cmap="gray", vmin=0, vmax=1, extent=frame, interpolation="nearest")
    if field is not None:
        values = np.array(field)
        values = values / (values.max() or 1.0)
        look = {"cmap": "magma", "vmin": 0, "vmax": 1, "alpha": 0.3 + 0.6 * values, "extent": frame}
        axis.imshow(values, interpolation="nearest", **look)
    row, column = looks["queries"][query]
    outline = {"fill": False, "edgecolor": "#3ce0c8", "linewidth": 1.0}
    axis.add_patch(plt.Rectangle((column - 0.5, row - 0.5), 1, 1, **outline))
    axis.set(xticks=[], yticks=[], xlim=frame[:2], ylim=frame[2:])
    axis.grid(visible=False)
    for side in axis.spines.values():
        side.set_visible(False)


def _rows_of_maps(entry: dict[str, Any], plt: Any) -> list[tuple[str, Any, int, int]]:
    """A row for every picture and query: its name, the picture, and the numbers of both."""
    pictures = [plt.imread(BytesIO(b64decode(one["source"].partition(",")[2]))) for one in entry["pictures"]]
    places = [f"row {row}, column {column}" for row, column in entry["attention_maps"]["queries"]]
    return [
        (f"{entry['pictures'][i]['name']}\n{place}", picture, i, q)
        for i, picture in enumerate(pictures)
        for q, place in enumerate(places)
    ]


def _map_axes(plt: Any, rows: int, columns: int) -> Any:
    side = 2 * WIDTH / max(columns, 5)
    figure, axes = plt.subplots(rows, columns, figsize=(side * columns + 0.9, side * rows + 0.3), squeeze=False)
    scale = plt.cm.ScalarMappable(cmap="magma")
    figure.colorbar(scale, ax=axes, shrink=min(1.0, 2.5 / rows), label="weight / largest", pad=0.02)
    return figure, axes


def attention_maps(plt: Any, entries: Entries) -> Any:
    """Draw a row for every picture and query: the picture, and over it the map of every model."""
    rows = _rows_of_maps(entries[0], plt)
    figure, axes = _map_axes(plt, len(rows), len(entries) + 1)
    for line, (name, picture, i, q) in zip(axes, rows, strict=True):
        _overlay(plt, line[0], picture, entries[0]["attention_maps"], q)
        line[0].set_ylabel(name, fontsize=6)
        for axis, entry in zip(line[1:], entries, strict=True):
            looks = entry["attention_maps"]
            _overlay(plt, axis, picture, looks, q, looks["maps"][i][q]["average"])
    for axis, entry in zip(axes[0][1:], entries, strict=True):
        axis.set_title(wrapped(entry["label"], 22), fontsize=7)
    return figure


def attention_maps_layers(plt: Any, entries: Entries) -> Any:
    """Draw a row for every picture, query and model, with the map of every layer."""
    rows = [(row, entry) for row in _rows_of_maps(entries[0], plt) for entry in entries]
    columns = max(len(entry["attention_maps"]["layers"]) for entry in entries)
    figure, axes = _map_axes(plt, len(rows), columns)
    for line, ((name, picture, i, q), entry) in zip(axes, rows, strict=True):
        looks = entry["attention_maps"]
        for axis, field in zip(line, looks["maps"][i][q]["by_layer"], strict=False):
            _overlay(plt, axis, picture, looks, q, field)
        for axis in line[len(looks["layers"]) :]:
            axis.set_axis_off()
        line[0].set_ylabel(f"{wrapped(entry['label'], 22)}\n{name}", fontsize=6)
    for layer, axis in enumerate(axes[0]):
        axis.set_title(f"layer {layer + 1}", fontsize=7)
    return figure


def receptive_fields(plt: Any, entries: Entries) -> Any:
    rows, columns = -(-len(entries) // 5), min(5, len(entries))
    figure, axes = plt.subplots(rows, columns, figsize=(2 * WIDTH, 1.7 * rows + 0.25), squeeze=False)
    for axis in axes.flat:
        axis.set_axis_off()
    for axis, entry in zip(axes.flat, entries, strict=False):
        field = entry["receptive_field"]
        values = [[value**0.5 for value in row] for row in field["map"]]
        image = axis.imshow(values, cmap="magma", vmin=0, vmax=1, interpolation="nearest")
        if field.get("centre"):
            row, column = ((at + 0.5) / field["pixels_per_cell"] - 0.5 for at in field["centre"])
            axis.plot(column, row, "+", color="#3ce0c8", markersize=6, markeredgewidth=0.8)
        axis.set_title(wrapped(entry["label"]), fontsize=7)
    figure.colorbar(image, ax=axes, shrink=0.8, label="√(gradient / largest)")
    return figure


def curves(plt: Any, entries: Entries, width: float = WIDTH, scale: float = 100, **axes: Any) -> Any:
    """Draw one line for every model through the last two columns of its rows, the second one times `scale`."""
    figure, axis = plt.subplots(figsize=(width, 2.4))
    for entry in entries:
        x, y = zip(*(row[-2:] for row in entry["rows"]), strict=True)
        axis.plot(x, [scale * value for value in y], **line_of(entry, len(x)))
    axis.set(**axes)
    return with_legend(figure, axis, entries)


receptive_field_share = partial(
    curves, xlabel="side of a centred square (pixels)", ylabel="% of the receptive field inside", ylim=(0, 103)
)
firing_rates = partial(
    curves, xlabel="depth (first to last neuron layer)", ylabel="firing rate (%)", ylim=(0, None), width=2 * WIDTH
)


def _part(layer: dict[str, Any]) -> str:
    """The part of a network that a layer belongs to."""
    names = layer["name"].split(".")
    if layer["kind"] == "attention":
        return "inside attention"
    if "attn" in names or "attention" in names:
        return "projections"
    return "MLP" if "mlp" in names else "classifier" if names[0] == "head" else "stem and other convolutions"


def energy(plt: Any, entries: Entries) -> Any:
    figure, axis = plt.subplots(figsize=(WIDTH, 0.42 * len(entries) + 1.3))
    names, parts = [wrapped(entry["label"]) for entry in entries], [Counter[str]() for _ in entries]
    for sums, entry in zip(parts, entries, strict=True):
        for layer in entry["energy"]["layers"]:
            sums[_part(layer)] += layer["energy_pj"]
    start = [0.0] * len(entries)
    for part in (part for part in PARTS if any(part in sums for sums in parts)):
        values = [sums[part] / 1e6 for sums in parts]
        axis.barh(names, values, left=start, color=PARTS[part], label=part, height=0.65)
        start = [a + b for a, b in zip(start, values, strict=True)]
    axis.set(xlabel=f"energy per {entries[0].get('noun', 'image')} (µJ)")
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)
    figure.legend(loc=BELOW, ncols=2)
    return figure


def memory_accuracy(plt: Any, entries: Entries) -> Any:
    """Draw a point for every model, hollow where it would cover another; nothing for one model, a lone dot."""
    if len(entries) < 2:
        return None
    figure, axes = plt.subplots(1, 2, figsize=(2 * WIDTH, 2.5), sharey=True)
    most = max(entry["parameters"] for entry in entries)
    for axis, key, unit, label in (
        (axes[0], "state_bytes", 1024, "attention state, derived (KiB)"),
        (axes[1], "peak_inference_bytes", 2**20, "peak memory, measured, batch 1 (MiB)"),
    ):
        points = [(entry[key] / unit, 100 * entry["accuracy_mean"]) for entry in entries]
        for i, (entry, (x, y)) in enumerate(zip(entries, points, strict=True)):
            covers = any(abs(math.log(x / a)) < 0.05 and abs(y - b) < 0.1 for a, b in points[:i])
            colour, count = colour_of(entry), entry["parameters"]
            name = f"{entry['label']}, {f'{count / 1e6:.2f} M' if count >= 1e6 else f'{count / 1e3:.1f} k'}"
            look = {"marker": MARKERS[entry["place"] % 8], "facecolor": "none" if covers else colour, "linewidth": 1.2}
            axis.errorbar(x, y, yerr=100 * (entry["accuracy_spread"] or 0), color=colour, linewidth=1)
            axis.scatter(x, y, s=110 * count / most, label=name, edgecolor=colour, zorder=3, alpha=0.85, **look)
        sizes = [entry[key] for entry in entries]
        axis.set(xlabel=label)
        if max(sizes) > 8 * min(sizes):
            axis.set(xscale="log", xlabel=f"{label}, log scale")
            axis.xaxis.set_major_locator(plt.LogLocator(subs=(1, 2, 5)))
            axis.xaxis.set_minor_locator(plt.NullLocator())
            axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.margins(0.15)
    axes[0].set(ylabel="test accuracy (%)")
    figure.legend(*axes[0].get_legend_handles_labels(), loc=BELOW, ncols=3, markerscale=0.5)
    return figure


def convergence(plt: Any, entries: Entries) -> Any:
    """Draw the mean over the seeds, and a band from the lowest to the highest; nothing for one epoch, lone dots."""
    if len({record["epoch"] for entry in entries for run in entry["runs"] for record in run["curve"] or []}) < 2:
        return None
    figure, axes = plt.subplots(1, 2, figsize=(2 * WIDTH, 2.4))
    panels = (("test_accuracy", 100.0, "test accuracy (%)"), ("train_loss", 1.0, "train loss"))
    for axis, (key, unit, name) in zip(axes, panels, strict=True):
        for entry in entries:
            epochs: defaultdict[int, list[float]] = defaultdict(list)
            for record in (record for run in entry["runs"] for record in run["curve"] or []):
                if record.get(key) is not None:
                    epochs[record["epoch"]].append(unit * record[key])
            if epochs:
                x, values = zip(*sorted(epochs.items()), strict=True)
                mean = [sum(seeds) / len(seeds) for seeds in values]
                axis.plot(x, mean, **line_of(entry, len(x)))
                low, high = list(map(min, values)), list(map(max, values))
                axis.fill_between(x, low, high, color=colour_of(entry), alpha=0.15, linewidth=0)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.set(xlabel="epoch", ylabel=name)
    return with_legend(figure, axes[0], entries)


def theory_chart(plt: Any, chart: dict[str, Any]) -> Any:
    """Draw a chart of the theorems: lines, or a map of regions."""
    scales = {f"{name}label": chart[name]["label"] for name in "xy"}
    scales |= {f"{name}scale": "log" for name in "xy" if chart[name].get("log")}
    if chart["kind"] == "lines":
        series = [{"place": i, **s, "rows": s["points"]} for i, s in enumerate(chart["series"])]
        return curves(plt, series, scale=1, **scales)
    from matplotlib import colors, patches

    figure, axis = plt.subplots(figsize=(WIDTH, 2.9))
    classes = chart["classes"]
    shown = REGIONS if len(classes) == 3 else (REGIONS[0], REGIONS[2])
    cells = {"cmap": colors.ListedColormap(shown), "vmin": -0.5, "vmax": len(classes) - 0.5, "shading": "nearest"}
    axis.pcolormesh(chart["x"]["values"], chart["y"]["values"], chart["cells"], rasterized=True, **cells)
    axis.set(**scales)
    axis.grid(visible=False)
    handles = [patches.Patch(color=colour, label=label) for colour, label in zip(shown, classes, strict=True)]
    figure.legend(handles=handles, loc=BELOW, ncols=1 if max(map(len, classes)) > 28 else 2)
    return figure
