"""How the figures for papers are drawn, with matplotlib.

A drawing takes pyplot and the models to show, each the entry of the results with the rows of the table (`rows`) and its
place among all models (`place`), which decides colour and marker, and returns the matplotlib figure.
"""

from __future__ import annotations

import math
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import zip_longest
from typing import Any

from lrfdyn.errors import LrfdynError

NEEDED = "figures need matplotlib; pip install 'lrfdyn[analysis]'"
# One colour, marker and line per model, told apart with any colour vision and in print.
COLOURS = ("#0b6fb8", "#cc5206", "#06805f", "#b0417f", "#a27000", "#2f93cc", "#5b4bb3", "#5c6672")
MARKERS = "os^Dv*Ph"
LINES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (8, 2)))
# Parts of a network have colours that no model has; what the attentions differ in stands out.
PARTS = {
    "stem and other convolutions": "#c3ccd4",
    "projections": "#8a99a8",
    "inside attention": "#e0a100",
    "MLP": "#54626f",
    "classifier": "#1c2126",
}
REGIONS = ("#bfe3d0", "#fbe2a8", "#e79a86")
STYLE = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e8e6",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "lines.linewidth": 1.3,
    "lines.markersize": 3.5,
    "legend.frameon": False,
    "legend.fontsize": 7,
    "figure.constrained_layout.use": True,
    "savefig.dpi": 200,
    "pdf.fonttype": 42,  # text stays text
    "svg.fonttype": "none",
    "svg.hashsalt": "lrfdyn",  # the same figure is the same file
}
WIDTH = 3.4  # inches, one column
DASHED = {"linestyle": "--", "linewidth": 0.8}
BELOW = "outside lower center"  # where legends are that would cover data
Entries = list[dict[str, Any]]


def pyplot(argument: str) -> Any:
    """Import matplotlib without a screen; an error names `argument` where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise LrfdynError(f"{argument}: {NEEDED}") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _wrapped(label: str, width: int = 20) -> str:
    return textwrap.fill(label, width, break_long_words=False, break_on_hyphens=False)


def _legend(figure: Any, axis: Any, entries: Entries, below: bool = False, **more: Any) -> Any:
    """Return the figure with its legend inside the axes where the names are short, under them where they would cover
    the data or with `below`."""
    few = max(len(entry["label"]) for entry in entries) <= 24 and len(entries) <= 6
    if few and not below:
        axis.legend(**more)
        return figure
    columns = 2 if few or figure.get_figwidth() > WIDTH else 1
    handles, names = axis.get_legend_handles_labels()
    names = [_wrapped(name, 42) for name in names]
    lines = sum(name.count("\n") + 1 for name in names)
    figure.set_figheight(figure.get_figheight() + 0.16 * -(-lines // columns))
    figure.legend(handles, names, loc=BELOW, ncols=columns)
    return figure


def _colour(entry: dict[str, Any]) -> str:
    return COLOURS[entry["place"] % 8]


def _line(entry: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Label, colour, marker and line of a model. They start over at the ninth, with another kind of line."""
    style = {"marker": MARKERS[entry["place"] % 8], "linestyle": LINES[entry["place"] // 8 % 8], "markeredgewidth": 0}
    return {"label": entry["label"], "color": _colour(entry), **style, **more}


def _names(entries: Entries) -> list[str]:
    return [_wrapped(entry["label"]) for entry in entries]


def _first_on_top(axis: Any) -> None:
    """Horizontal bars in the order of the models."""
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)


def _only(values: Iterable[Any]) -> Any:
    """The value that all have, or None: models on different grids have no common reference."""
    different = set(values)
    return different.pop() if len(different) == 1 else None


def attention_distance(plt: Any, entries: Entries) -> Any:
    height = max(2.4, 0.42 * len(entries) + 0.9)
    figure, (left, right) = plt.subplots(1, 2, figsize=(2 * WIDTH, height), width_ratios=(1.6, 1))
    local = [entry["locality"] for entry in entries]
    for entry, one in zip(entries, local, strict=True):
        left.plot(one["distance"], one["weight"], **_line(entry))
    grid = _only(tuple(one["grid"]) for one in local)
    if grid:
        left.axhline(1 / math.prod(grid), color="#58616a", label="uniform", **DASHED)
    left.set(xlabel="Manhattan distance (tokens)", ylabel="mean attention weight", ylim=(0, None))
    shares = [100 * one["short_range_share"] for one in local]
    bars = right.barh(_names(entries), shares, color=list(map(_colour, entries)))
    right.bar_label(bars, fmt="%.1f", padding=2, fontsize=7)
    right.margins(x=0.14)
    for row, one in enumerate(local):
        uniform = 100 * one["short_range_share_uniform"]
        right.plot([uniform, uniform], [row - 0.4, row + 0.4], color="#1c2126", **DASHED)
    near = _only(one["short_distance"] for one in local)
    right.set(xlabel=f"% at {'short distance' if near is None else f'distance ≤ {near}'} (dashed: uniform)")
    _first_on_top(right)
    return _legend(figure, left, entries)


def attention_distance_layers(plt: Any, entries: Entries) -> Any:
    layers = max(len(entry["locality"]["weight_by_layer"]) for entry in entries)
    columns = min(4, layers)
    rows = -(-layers // columns)
    size = (2 * WIDTH, 1.6 * rows + 0.4)
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, sharex=True, sharey=True)
    for layer, axis in enumerate(axes.flat):
        axis.set_visible(layer < layers)
        for entry in entries:
            weights = entry["locality"]["weight_by_layer"][layer : layer + 1]
            if weights and weights[0] is not None:
                axis.plot(entry["locality"]["distance"], weights[0], **_line(entry, markersize=2))
        axis.set(title=f"layer {layer + 1}")
    axes[0][0].set(ylim=(0, None))  # behind the last line, which may be the highest
    for axis in axes[-1]:
        axis.set_xlabel("Manhattan distance")
    figure.supylabel("mean attention weight", fontsize=8)
    return _legend(figure, axes[0][0], entries, fontsize=6)


def attention_entropy(plt: Any, entries: Entries) -> Any:
    figure, axis = plt.subplots(figsize=(WIDTH, 2.4))
    ends: list[float] = []
    for entry in entries:
        edges, density = (entry["locality"]["entropy_histogram"][name] for name in ("edges", "density"))
        label = f"{entry['label']}, mean {entry['locality']['entropy_mean']:.2f}"
        # Bins are as fine as the sample allows, so heights of different models compare only as shares of the largest.
        heights, style = [value / max(density) for value in density], LINES[entry["place"] % 8]
        axis.stairs(heights, edges, color=_colour(entry), label=label, linewidth=1.1, linestyle=style)
        taken = [k for k, value in enumerate(density) if value > 0]
        ends += [edges[taken[0]], edges[taken[-1] + 1]]
    uniform = _only(round(entry["locality"]["entropy_uniform"], 9) for entry in entries)
    if uniform is not None:
        ends.append(uniform)
        axis.axvline(uniform, color="#58616a", **DASHED)
    # Only where there is something: entropies of trained attention often all lie in the upper part.
    room = 0.04 * (max(ends) - min(ends)) or 0.1
    axis.set(xlabel=f"entropy of attention (nats{'' if uniform is None else '; dashed: uniform'})",
             ylabel="density / largest", xlim=(min(ends) - room, max(ends) + room), ylim=(0, 1.05))  # fmt: skip
    return _legend(figure, axis, entries, below=True)


def receptive_fields(plt: Any, entries: Entries) -> Any:
    columns = min(5, len(entries))
    rows = -(-len(entries) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(2 * WIDTH, 1.7 * rows + 0.25), squeeze=False)
    for axis, entry in zip_longest(axes.flat, entries):
        axis.set_axis_off()
        if entry is None:
            continue
        field = entry["receptive_field"]
        values = [[value**0.5 for value in row] for row in field["map"]]
        image = axis.imshow(values, cmap="magma", vmin=0, vmax=1, interpolation="nearest")
        if field.get("centre"):
            row, column = ((at + 0.5) / field["pixels_per_cell"] - 0.5 for at in field["centre"])
            axis.plot(column, row, "+", color="#3ce0c8", markersize=6, markeredgewidth=0.8)
        axis.set_title(_wrapped(entry["label"]), fontsize=7)
    figure.colorbar(image, ax=axes, shrink=0.8, label="√(gradient / largest)")
    return figure


def curves(plt: Any, entries: Entries, width: float = WIDTH, scale: float = 1, **axes: Any) -> Any:
    """Draw one line for every model through the last two columns of its rows, the second one times `scale`."""
    figure, axis = plt.subplots(figsize=(width, 2.4))
    for entry in entries:
        x, y = zip(*(row[-2:] for row in entry["rows"]), strict=True)
        axis.plot(x, [scale * value for value in y], **_line(entry, markevery=max(1, len(x) // 16)))
    axis.set(**axes)
    return _legend(figure, axis, entries)


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
    parts: list[Counter[str]] = [Counter() for _ in entries]
    for sums, entry in zip(parts, entries, strict=True):
        for layer in entry["energy"]["layers"]:
            sums[_part(layer)] += layer["energy_pj"]
    start = [0.0] * len(entries)
    for part in dict.fromkeys(key for sums in parts for key in sums):
        values = [sums[part] / 1e6 for sums in parts]
        axis.barh(_names(entries), values, left=start, color=PARTS[part], label=part, height=0.65)
        start = [a + b for a, b in zip(start, values, strict=True)]
    axis.set(xlabel="energy per image (µJ)")
    _first_on_top(axis)
    figure.legend(loc=BELOW, ncols=2)
    return figure


def memory_accuracy(plt: Any, entries: Entries) -> Any:
    figure, axes = plt.subplots(1, 2, figsize=(2 * WIDTH, 2.5), sharey=True)
    most = max(entry["parameters"] for entry in entries)
    for axis, key, unit, label in (
        (axes[0], "state_bytes", 1024, "attention state, derived (KiB)"),
        (axes[1], "peak_inference_bytes", 2**20, "peak memory, measured, batch 1 (MiB)"),
    ):
        for entry in entries:
            x, y, count = entry[key] / unit, 100 * entry["accuracy_mean"], entry["parameters"]
            name = f"{entry['label']}, {f'{count / 1e6:.2f} M' if count >= 1e6 else f'{count / 1e3:.1f} k'}"
            look = {"color": _colour(entry), "marker": MARKERS[entry["place"] % 8], "zorder": 3, "alpha": 0.85}
            axis.errorbar(x, y, yerr=100 * (entry["accuracy_spread"] or 0), color=_colour(entry), linewidth=1)
            axis.scatter(x, y, s=110 * count / most, label=name, **look)
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
    """Draw the mean over the seeds, and a band from the lowest to the highest."""
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
                axis.plot(x, mean, **_line(entry, markevery=max(1, len(x) // 12)))
                low, high = list(map(min, values)), list(map(max, values))
                axis.fill_between(x, low, high, color=_colour(entry), alpha=0.15, linewidth=0)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.set(xlabel="epoch", ylabel=name)
    return _legend(figure, axes[0], entries)


def theory_chart(plt: Any, chart: dict[str, Any]) -> Any:
    """Draw a chart of the theorems: lines, or a map of regions."""
    scales = {f"{name}label": chart[name]["label"] for name in "xy"}
    scales |= {f"{name}scale": "log" for name in "xy" if chart[name].get("log")}
    if chart["kind"] == "lines":
        series = [{"label": s["label"], "rows": s["points"], "place": i} for i, s in enumerate(chart["series"])]
        return curves(plt, series, **scales)
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    figure, axis = plt.subplots(figsize=(WIDTH, 2.9))
    classes = chart["classes"]
    colours = REGIONS if len(classes) == 3 else (REGIONS[0], REGIONS[2])
    axis.pcolormesh(chart["x"]["values"], chart["y"]["values"], chart["cells"], cmap=ListedColormap(colours), vmin=-0.5,
                    vmax=len(classes) - 0.5, shading="nearest", rasterized=True)  # fmt: skip
    axis.set(**scales)
    axis.grid(visible=False)
    patches = [Patch(color=colour, label=label) for colour, label in zip(colours, classes, strict=True)]
    figure.legend(handles=patches, loc=BELOW, ncols=1 if max(map(len, classes)) > 28 else 2)
    return figure
