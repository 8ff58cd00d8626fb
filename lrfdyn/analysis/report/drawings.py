"""How the figures for papers are drawn: with matplotlib's pyplot, from the entries of the results to show, each with
the `rows` of the table and its `place` among all models, which decides colour and marker."""

from __future__ import annotations

import math
import textwrap
from base64 import b64decode
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from lrfdyn.attention import attention_label
from lrfdyn.errors import needs, require
from lrfdyn.files import writable_folder, write_atomic

NEEDED = "figures need matplotlib; pip install 'lrfdyn[analysis]'"
# The attentions that have the same colour and marker in every figure and report; others take those that are left.
KINDS = ("vsa", "ssa", "causal_ssa", "lrf_ssa", "lrf_dyn", "sdsa")
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
DASHED: dict[str, Any] = {"linestyle": "--", "linewidth": 0.9, "zorder": 5}  # a reference, above the curves
IMPLEMENTATIONS = {"spikingjelly": "#c9b458", "eager": "#9aa5b1", "low-memory": "#1f6f8b", "streaming": "#5aa897"}
TERMS = ("#1f6f8b", "#7fb7be", "#c7dfe0", "#b0713f", "#e3b98a", "#f1dcc3")
BELOW = "outside lower center"  # where legends are that would cover data
Entries = list[dict[str, Any]]


def places(kinds: Sequence[str]) -> list[int]:
    """Return for each of `kinds`, names of attentions or others, its place among colours and markers: for an attention
    the same in every report. A second model of one kind has the next place that is free, a ninth model begins anew."""
    wanted = [KINDS.index(kind) if kind in KINDS else len(KINDS) + crc32(kind.encode()) % 2 for kind in kinds]
    taken: dict[int, int] = {}  # by number in `kinds`
    for i in sorted(range(len(kinds)), key=lambda i: kinds[i] not in KINDS or kinds[i] in kinds[:i]):
        choices = (len(taken) // 8 * 8 + (wanted[i] + step) % 8 for step in range(8))
        taken[i] = next(place for place in choices if place not in taken.values())
    return [taken[i] for i in range(len(kinds))]


def pyplot(argument: str) -> Any:
    """Import matplotlib without a screen; an error names `argument` where it is not installed."""
    with needs(f"{argument}: {NEEDED}"):
        import matplotlib
        import matplotlib.pyplot as plt
    matplotlib.use("Agg")
    return plt


def _wrapped(label: str, width: int = 20) -> str:
    return textwrap.fill(label, width, break_long_words=False, break_on_hyphens=False)


def _legend(figure: Any, axis: Any, entries: Entries, below: bool = False, **more: Any) -> Any:
    """Return the figure with its legend inside the axes where the names are short, under them where they would cover
    the data or with `below`."""
    for shown in figure.axes:
        _uncover(shown)
    few = max(len(entry["label"]) for entry in entries) <= 24 and len(entries) <= 6
    if few and not below:
        axis.legend(**more)
        return figure
    handles, names = axis.get_legend_handles_labels()
    columns = 2 if (few and max(map(len, names)) <= 26) or figure.get_figwidth() > WIDTH else 1
    names = [_wrapped(name, 42) for name in names]
    lines = sum(name.count("\n") + 1 for name in names)
    figure.set_figheight(figure.get_figheight() + 0.16 * -(-lines // columns))
    figure.legend(handles, names, loc=BELOW, ncols=columns)
    return figure


def _uncover(axis: Any) -> None:
    """Make the markers of a line larger for every later line with a marker at the same place: a rim stays visible."""
    axis.autoscale_view()
    lines = [(line, *line.get_markevery()) for line in axis.lines if line.get_markevery()]
    points = [axis.transData.transform(line.get_xydata()[first::step]) for line, first, step in lines]
    for i, (line, *_) in enumerate(lines):
        covers = sum(bool((np.abs(points[i][:, None] - later).max(-1) < 2).any()) for later in points[i + 1 :])
        line.set_markersize(line.get_markersize() + 1.3 * min(4, covers))


def _colour(entry: dict[str, Any]) -> str:
    return COLOURS[entry["place"] % 8]


def _line(entry: dict[str, Any], points: int = 1, **more: Any) -> dict[str, Any]:
    """Label, colour, marker and line of a model with so many points, of which some 16 are marked, others for every
    model. They start over at the ninth, with another kind of line."""
    place, step = entry["place"], max(1, points // 16)
    style = {"marker": MARKERS[place % 8], "linestyle": LINES[place // 8 % 8], "markevery": (place % step, step)}
    rim = {"markeredgewidth": 0.4, "markeredgecolor": "white"}
    return {"label": entry["label"], "color": _colour(entry), **style, **rim, **more}


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
        left.axhline(1 / math.prod(grid), color="#1c2126", label="uniform", **DASHED)
    left.set(xlabel="Manhattan distance (tokens)", ylabel="mean attention weight", ylim=(0, None))
    shares = [100 * one["short_range_share"] for one in local]
    bars = right.barh([_wrapped(entry["label"]) for entry in entries], shares, color=list(map(_colour, entries)))
    right.bar_label(bars, fmt="%.1f", padding=2, fontsize=7)
    right.margins(x=0.14)
    for row, one in enumerate(local):
        uniform = 100 * one["short_range_share_uniform"]
        right.plot([uniform, uniform], [row - 0.4, row + 0.4], color="#1c2126", **DASHED)
    near = _only(one["short_distance"] for one in local)
    right.set(xlabel=f"% at {'short distance' if near is None else f'distance ≤ {near}'} (dashed: uniform)")
    right.invert_yaxis()  # the first model on top
    right.grid(axis="y", visible=False)
    return _legend(figure, left, entries)


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
                axis.plot(entry["locality"]["distance"], weights[0], **_line(entry, markersize=2))
        axis.set(title=f"layer {layer + 1}")
    axes[0][0].set(ylim=(0, None))  # behind the last line, which may be the highest
    plt.setp(axes[-1], xlabel="Manhattan distance")
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
        axis.axvline(uniform, color="#1c2126", **DASHED)
    # Only where there is something: entropies of trained attention often all lie in the upper part.
    room = 0.04 * (max(ends) - min(ends)) or 0.1
    axis.set(xlabel=f"entropy of attention (nats{'' if uniform is None else '; dashed: uniform'})",
             ylabel="density / largest", xlim=(min(ends) - room, max(ends) + room), ylim=(0, 1.05))  # fmt: skip
    return _legend(figure, axis, entries, below=True)


def attention_scores(plt: Any, entries: Entries) -> Any:
    figure, axis = plt.subplots(figsize=(WIDTH, 2.4))
    used = {1.0}
    for entry in entries:
        local = entry["locality"]
        edges, share, zero = (local["score_histogram"][name] for name in ("edges", "share", "zero"))
        label = f"{entry['label']}: entropy {local['entropy_mean']:.2f}, {zero:.0%} zero"
        style = {"color": _colour(entry), "linestyle": LINES[entry["place"] % 8], "linewidth": 1.1}
        axis.stairs([100 * value for value in share], edges, baseline=None, label=label, **style)
        used.update(edge for i, value in enumerate(share) if value > 0 for edge in edges[i : i + 2])
    axis.axvline(1, color="#1c2126", **DASHED)
    axis.set(xlabel="attention weight / uniform weight (dashed)", ylabel="% of query-key pairs", xscale="log",
             yscale="log", xlim=(min(used) / 1.2, 1.2 * max(used)), ylim=(0.05, 150))  # fmt: skip
    return _legend(figure, axis, entries, below=True)


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
        axis.set_title(_wrapped(entry["label"], 22), fontsize=7)
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
        line[0].set_ylabel(f"{_wrapped(entry['label'], 22)}\n{name}", fontsize=6)
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
        axis.set_title(_wrapped(entry["label"]), fontsize=7)
    figure.colorbar(image, ax=axes, shrink=0.8, label="√(gradient / largest)")
    return figure


def curves(plt: Any, entries: Entries, width: float = WIDTH, scale: float = 100, **axes: Any) -> Any:
    """Draw one line for every model through the last two columns of its rows, the second one times `scale`."""
    figure, axis = plt.subplots(figsize=(width, 2.4))
    for entry in entries:
        x, y = zip(*(row[-2:] for row in entry["rows"]), strict=True)
        axis.plot(x, [scale * value for value in y], **_line(entry, len(x)))
    axis.set(**axes)
    return _legend(figure, axis, entries)


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
    names, parts = [_wrapped(entry["label"]) for entry in entries], [Counter[str]() for _ in entries]
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
            colour, count = _colour(entry), entry["parameters"]
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
                axis.plot(x, mean, **_line(entry, len(x)))
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


def check_plot(path: Path) -> None:
    """Raise an error where the figure could not be drawn or written."""
    endings = sorted(pyplot("plot").FigureCanvasBase.filetypes)
    one_of = f"one of {', '.join(endings)}, got {path}"
    require(path.suffix.removeprefix(".") in endings, f"plot: expected a name that ends in {one_of}")
    writable_folder(path.parent, "plot")
    require(not path.is_dir(), f"plot: expected a file, got the folder {path}")


def plot_memory(states: dict[str, Sequence[dict[str, Any]]], peaks: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the terms of one layer by label (`states`), and in a panel for every group the measured `peaks`, records
    with `group`, `label`, `implementation` and `mib`, into the file `path`."""
    plt = pyplot("plot")
    groups = list(dict.fromkeys(record["group"] for record in peaks))
    rows, columns = 1 + len(groups) // 3, min(len(groups) + 1, 3)
    widest = max((sum(r["group"] == group for r in peaks) for group in groups), default=0)
    size = (columns * max(0.75 * widest + 0.6, 3.8), 3.2 * rows)
    with plt.rc_context({**STYLE, "axes.grid.axis": "y", "axes.titlelocation": "left", "axes.ymargin": 0.15}):
        figure, grid = plt.subplots(rows, columns, figsize=size, squeeze=False)
        first, *panels = grid.flat
        bottom = [0.0] * len(states)
        for i, name in enumerate(dict.fromkeys(term["name"] for terms in states.values() for term in terms)):
            sizes = [sum(t["bytes"] for t in terms if t["name"] == name) / 1024 for terms in states.values()]
            first.bar(range(len(states)), sizes, 0.6, bottom, color=TERMS[i % 6], label=name, edgecolor="white")
            bottom = [a + b for a, b in zip(bottom, sizes, strict=True)]
        for i, total in enumerate(bottom):
            first.text(i, total, f"{total:,.0f}", ha="center", va="bottom")
        first.set_xticks(range(len(states)), list(states))
        first.set(title="State of one layer, derived", ylabel="KiB per image and time step")
        if any(states.values()):  # an attention need not say what it holds
            first.legend()
        for unused in panels[len(groups) :]:
            unused.remove()
        for axes, group in zip(panels, groups, strict=False):
            shown = [record for record in peaks if record["group"] == group]
            sizes, colors = [r["mib"] for r in shown], [IMPLEMENTATIONS[r["implementation"]] for r in shown]
            bars = axes.bar(range(len(shown)), sizes, width=0.6, color=colors)
            axes.bar_label(bars, [f"{size:,.0f}" if size >= 10 else f"{size:.1f}" for size in sizes])
            axes.set_xticks(range(len(shown)), [f"{r['label']}\n{r['implementation']}" for r in shown], fontsize=7)
            axes.set(title=f"Peak of inference, {group}", ylabel="MiB")
        write_atomic(path, partial(figure.savefig, dpi=150, format=path.suffix[1:]))
    plt.close(figure)


def plot_sizes(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the peak of one attention layer against the side of the image, a line for every kind and form, in a panel
    for every batch size, into the file `path`. `records` are those of `profile_attention`."""
    plt = pyplot("plot")
    batches = list(dict.fromkeys(record["batch"] for record in records))
    kinds = list(dict.fromkeys(record["attention"] for record in records))
    of_kind = dict(zip(kinds, places(kinds), strict=True))
    with plt.rc_context(STYLE):
        figure, (axes,) = plt.subplots(1, len(batches), figsize=(WIDTH * len(batches), 2.6), squeeze=False)
        for axis, batch in zip(axes, batches, strict=True):
            shown = [record for record in records if record["batch"] == batch]
            for kind, form in dict.fromkeys((record["attention"], record["form"]) for record in shown):
                own = [r for r in shown if (r["attention"], r["form"]) == (kind, form)]
                look = {"linestyle": "--" if form == "streaming" else "-", "color": COLOURS[of_kind[kind] % 8]}
                sizes, peaks = zip(*((r["image_size"], r["peak_bytes"] / 2**20) for r in own), strict=True)
                axis.plot(
                    sizes, peaks, marker=MARKERS[of_kind[kind] % 8], label=f"{attention_label(kind)}, {form}", **look
                )
            axis.set(xlabel="side of the image (pixels)", ylabel="peak of one attention layer (MiB)", ylim=(0, None))
            axis.set_title(f"T = {shown[0]['time_steps']}, batch {batch}", loc="left")
        axes[0].legend()
        write_atomic(path, partial(figure.savefig, dpi=200, format=path.suffix[1:]))
    plt.close(figure)


def plot_exits(result: dict[str, Any], path: Path) -> None:
    """Draw what `evaluate_exits` gives into the file `path`: accuracy against mean steps, and when images leave."""
    plt = pyplot("plot")
    curve, threshold = result["curve"], result["exit"]
    (chosen,) = (row for row in curve if row["threshold"] == threshold)
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(2 * WIDTH, 2.4), width_ratios=(1.6, 1))
        for rows, place, name in ((curve, 0, "stop when sure"), (result["steps"], 1, "so many steps for all")):
            look = _line({"place": place, "label": name}, linestyle="-" if place == 0 else "none")
            left.plot([row["mean_steps"] for row in rows], [row["top1"] for row in rows], **look)
        mark = {"color": "#1c2126", "markersize": 9, "markerfacecolor": "none", "linestyle": "none"}
        left.plot(chosen["mean_steps"], chosen["top1"], "o", label=f"threshold {threshold:g}", **mark)
        left.set(xlabel="mean time steps", ylabel="accuracy (%)")
        left.legend(loc="lower right")
        steps = range(1, len(chosen["exits"]) + 1)
        right.bar(steps, [100 * count / result["images"] for count in chosen["exits"]], color=COLOURS[0])
        right.set(xlabel="time step", ylabel=f"% of images that stop at {threshold:g}", xticks=steps)
        write_atomic(path, partial(figure.savefig, dpi=200, format=path.suffix[1:]))
    plt.close(figure)
