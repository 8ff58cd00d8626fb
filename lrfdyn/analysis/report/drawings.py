"""How the figures for papers are drawn, with matplotlib.

A function takes pyplot and the models to show as (place, entry), where the place among all models decides colour and
marker and the entry is that of the results with the rows of the table, and returns the matplotlib figure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from lrfdyn.analysis.report.style import COLOURS, LINES, MARKERS, PARTS, REGIONS, WIDTH, Entries, legend, line, wrapped

DASHED = {"linestyle": "--", "linewidth": 0.8}


def _names(entries: Entries) -> list[str]:
    return [wrapped(entry["label"]) for _, entry in entries]


def _only(values: Iterable[Any]) -> Any:
    """The value that all have, or None: models on different grids have no common reference."""
    different = set(values)
    return different.pop() if len(different) == 1 else None


def _first_on_top(axis: Any) -> None:
    """Horizontal bars in the order of the models."""
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)


def attention_distance(plt: Any, entries: Entries) -> Any:
    height = max(2.4, 0.42 * len(entries) + 0.9)
    figure, (left, right) = plt.subplots(1, 2, figsize=(2 * WIDTH, height), width_ratios=(1.6, 1))
    for i, entry in entries:
        left.plot(entry["locality"]["distance"], entry["locality"]["weight"], label=entry["label"], **line(i))
    grid = _only(tuple(entry["locality"]["grid"]) for _, entry in entries)
    if grid:
        left.axhline(1 / math.prod(grid), color="#58616a", label="uniform", **DASHED)
    left.set(xlabel="Manhattan distance (tokens)", ylabel="mean attention weight", ylim=(0, None))
    legend(figure, left, entries)
    shares = [100 * entry["locality"]["short_range_share"] for _, entry in entries]
    bars = right.barh(_names(entries), shares, color=[COLOURS[i % 8] for i, _ in entries])
    right.bar_label(bars, fmt="%.1f", padding=2, fontsize=7)
    right.margins(x=0.14)
    for row, (_, entry) in enumerate(entries):
        uniform = 100 * entry["locality"]["short_range_share_uniform"]
        right.plot([uniform, uniform], [row - 0.4, row + 0.4], color="#1c2126", **DASHED)
    near = _only(entry["locality"]["short_distance"] for _, entry in entries)
    right.set(xlabel=f"% at {'short distance' if near is None else f'distance ≤ {near}'} (dashed: uniform)")
    _first_on_top(right)
    return figure


def attention_distance_layers(plt: Any, entries: Entries) -> Any:
    layers = max(len(entry["locality"]["weight_by_layer"]) for _, entry in entries)
    columns = min(4, layers)
    size = (2 * WIDTH, 1.6 * -(-layers // columns) + 0.4)
    figure, axes = plt.subplots(-(-layers // columns), columns, figsize=size, squeeze=False, sharex=True, sharey=True)
    for layer, axis in enumerate(axes.flat):
        axis.set_visible(layer < layers)
        for i, entry in entries:
            weights = entry["locality"]["weight_by_layer"][layer : layer + 1]
            if weights and weights[0] is not None:
                axis.plot(entry["locality"]["distance"], weights[0], label=entry["label"], **line(i, markersize=2))
        axis.set(title=f"layer {layer + 1}")
    axes[0][0].set(ylim=(0, None))  # behind the last line, which may be the highest
    for axis in axes[-1]:
        axis.set_xlabel("Manhattan distance")
    figure.supylabel("mean attention weight", fontsize=8)
    legend(figure, axes[0][0], entries, fontsize=6)
    return figure


def attention_entropy(plt: Any, entries: Entries) -> Any:
    figure, axis = plt.subplots(figsize=(WIDTH, 2.4))
    ends: list[float] = []
    for i, entry in entries:
        edges, density = (entry["locality"]["entropy_histogram"][name] for name in ("edges", "density"))
        label = f"{entry['label']}, mean {entry['locality']['entropy_mean']:.2f}"
        # Bins are as fine as the sample allows, so heights of different models compare only as shares of the largest.
        heights = [value / max(density) for value in density]
        axis.stairs(heights, edges, color=COLOURS[i % 8], label=label, linewidth=1.1, linestyle=LINES[i % 8])
        taken = [k for k, value in enumerate(density) if value > 0]
        ends += [edges[taken[0]], edges[taken[-1] + 1]]
    uniform = _only(round(entry["locality"]["entropy_uniform"], 9) for _, entry in entries)
    if uniform is not None:
        ends.append(uniform)
        axis.axvline(uniform, color="#58616a", **DASHED)
    # Only where there is something: entropies of trained attention often all lie in the upper part.
    room = 0.04 * (max(ends) - min(ends)) or 0.1
    axis.set(xlabel=f"entropy of attention (nats{'' if uniform is None else '; dashed: uniform'})",
             ylabel="density / largest", xlim=(min(ends) - room, max(ends) + room), ylim=(0, 1.05))  # fmt: skip
    legend(figure, axis, entries, below=True)
    return figure


def receptive_fields(plt: Any, entries: Entries) -> Any:
    columns = min(5, len(entries))
    rows = -(-len(entries) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(2 * WIDTH, 1.7 * rows + 0.25), squeeze=False)
    image = None
    for axis, (_, entry) in zip(axes.flat, entries, strict=False):
        field = entry["receptive_field"]
        values = [[value**0.5 for value in row] for row in field["map"]]
        image = axis.imshow(values, cmap="magma", vmin=0, vmax=1, interpolation="nearest")
        if field.get("centre"):
            row, column = ((at + 0.5) / field["pixels_per_cell"] - 0.5 for at in field["centre"])
            axis.plot(column, row, "+", color="#3ce0c8", markersize=6, markeredgewidth=0.8)
        axis.set_title(wrapped(entry["label"]), fontsize=7)
    for axis in axes.flat:
        axis.set_axis_off()
    figure.colorbar(image, ax=axes, shrink=0.8, label="√(gradient / largest)")
    return figure


def curves(plt: Any, entries: Entries, width: float, scale: float = 1, **axes: Any) -> Any:
    """Draw one line for every model through the last two columns of its rows, the second one times `scale`."""
    figure, axis = plt.subplots(figsize=(width, 2.4))
    for i, entry in entries:
        x, y = zip(*(row[-2:] for row in entry["rows"]), strict=True)
        every = max(1, len(x) // 16)
        axis.plot(x, [scale * value for value in y], label=entry["label"], **line(i, markevery=every))
    axis.set(**axes)
    legend(figure, axis, entries)
    return figure


def percent_curves(xlabel: str, ylabel: str, width: float = WIDTH, top: float | None = None) -> Callable[..., Any]:
    """Return a drawing function for lines of shares, shown as percent."""
    return partial(curves, width=width, scale=100, xlabel=xlabel, ylabel=ylabel, ylim=(0, top))


def energy_parts(layers: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the energy in pJ of the parts of a network: inside attention, its projections, and the rest."""
    parts: dict[str, float] = {}
    for layer in layers:
        names = layer["name"].split(".")
        if layer["kind"] == "attention":
            part = "inside attention"
        elif "attn" in names or "attention" in names:
            part = "projections"
        elif "mlp" in names:
            part = "MLP"
        else:
            part = {"head": "classifier"}.get(names[0], "stem and other convolutions")
        parts[part] = parts.get(part, 0.0) + layer["energy_pj"]
    return parts


def energy(plt: Any, entries: Entries) -> Any:
    figure, axis = plt.subplots(figsize=(WIDTH, 0.42 * len(entries) + 1.3))
    parts = [energy_parts(entry["energy"]["layers"]) for _, entry in entries]
    start = [0.0] * len(entries)
    for part in dict.fromkeys(key for one in parts for key in one):
        values = [one.get(part, 0.0) / 1e6 for one in parts]
        axis.barh(_names(entries), values, left=start, color=PARTS[part], label=part, height=0.65)
        start = [a + b for a, b in zip(start, values, strict=True)]
    axis.set(xlabel="energy per image (µJ)")
    _first_on_top(axis)
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def memory_accuracy(plt: Any, entries: Entries) -> Any:
    figure, axes = plt.subplots(1, 2, figsize=(2 * WIDTH, 2.5), sharey=True)
    most = max(entry["parameters"] for _, entry in entries)
    for axis, key, unit, label in (
        (axes[0], "state_bytes", 1024, "attention state, derived (KiB)"),
        (axes[1], "peak_inference_bytes", 2**20, "peak memory, measured, batch 1 (MiB)"),
    ):
        for i, entry in entries:
            x, y, count = entry[key] / unit, 100 * entry["accuracy_mean"], entry["parameters"]
            name = f"{entry['label']}, {f'{count / 1e6:.2f} M' if count >= 1e6 else f'{count / 1e3:.1f} k'}"
            look = {"color": COLOURS[i % 8], "zorder": 3, "alpha": 0.85}
            axis.errorbar(x, y, yerr=100 * (entry["accuracy_spread"] or 0), color=COLOURS[i % 8], linewidth=1)
            axis.scatter(x, y, s=110 * count / most, marker=MARKERS[i % 8], label=name, **look)
        sizes = [entry[key] for _, entry in entries]
        axis.set(xlabel=label)
        if max(sizes) > 8 * min(sizes):
            axis.set(xscale="log", xlabel=f"{label}, log scale")
            axis.xaxis.set_major_locator(plt.LogLocator(subs=(1, 2, 5)))
            axis.xaxis.set_minor_locator(plt.NullLocator())
            axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.margins(0.15)
    axes[0].set(ylabel="test accuracy (%)")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, markerscale=0.5)
    return figure


def convergence(plt: Any, entries: Entries) -> Any:
    """Draw the mean over the seeds, and a band from the lowest to the highest."""
    figure, axes = plt.subplots(1, 2, figsize=(2 * WIDTH, 2.4))
    for axis, key, unit, name in zip(axes, ("test_accuracy", "train_loss"), (100.0, 1.0),
                                     ("test accuracy (%)", "train loss"), strict=True):  # fmt: skip
        for i, entry in entries:
            epochs: dict[int, list[float]] = {}
            for record in (record for run in entry["runs"] for record in run["curve"] or []):
                if record.get(key) is not None:
                    epochs.setdefault(record["epoch"], []).append(unit * record[key])
            if epochs:
                x, values = zip(*sorted(epochs.items()), strict=True)
                mean = [sum(seeds) / len(seeds) for seeds in values]
                axis.plot(x, mean, label=entry["label"], **line(i, markevery=max(1, len(x) // 12)))
                low, high = list(map(min, values)), list(map(max, values))
                axis.fill_between(x, low, high, color=COLOURS[i % 8], alpha=0.15, linewidth=0)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.set(xlabel="epoch", ylabel=name)
    legend(figure, axes[0], entries)
    return figure


def theory_chart(plt: Any, chart: dict[str, Any]) -> Any:
    """Draw a chart of the theorems: lines, or a map of regions."""
    scales = {f"{name}label": chart[name]["label"] for name in "xy"}
    scales |= {f"{name}scale": "log" for name in "xy" if chart[name].get("log")}
    if chart["kind"] == "lines":
        series = [{"label": one["label"], "rows": one["points"]} for one in chart["series"]]
        return curves(plt, list(enumerate(series)), WIDTH, **scales)
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    figure, axis = plt.subplots(figsize=(WIDTH, 2.9))
    classes = chart["classes"]
    colours = REGIONS if len(classes) == 3 else (REGIONS[0], REGIONS[2])
    axis.pcolormesh(chart["x"]["values"], chart["y"]["values"], chart["cells"], cmap=ListedColormap(colours), vmin=-0.5,
                    vmax=len(classes) - 0.5, shading="nearest", rasterized=True)  # fmt: skip
    axis.set(**scales)
    axis.grid(visible=False)
    figure.legend(handles=[Patch(color=colour, label=label) for colour, label in zip(colours, classes, strict=True)],
                  loc="outside lower center", ncols=1 if max(map(len, classes)) > 28 else 2)  # fmt: skip
    return figure
