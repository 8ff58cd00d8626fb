"""The figures for papers, with matplotlib: the same numbers as the report, in vector and pixel formats."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lrfdyn.analysis.report.plot_theory import chart_lines, region_map
from lrfdyn.analysis.report.style import (
    COLOURS,
    LINES,
    MARKERS,
    PARTS,
    STYLE,
    WIDTH,
    Entries,
    legend,
    line,
    pyplot,
    wrapped,
)  # fmt: skip
from lrfdyn.files import write_atomic


def write_figures(results: dict[str, Any], folder: Path, formats: Sequence[str]) -> list[Path]:
    """Every figure that `results` have the numbers of, in every format; returns the paths."""
    plt = pyplot("figures")
    paths = []
    for name, draw in figures(results).items():
        with plt.rc_context(STYLE):
            figure = draw(plt)
            for form in formats:
                path = folder / f"{name}.{form}"
                stamp = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}.get(form)
                write_atomic(path, lambda file, f=figure, k=form, m=stamp: f.savefig(file, format=k, metadata=m))  # type: ignore[misc]
                paths.append(path)
            plt.close(figure)
    return paths


def figures(results: dict[str, Any]) -> dict[str, Callable[[Any], Any]]:
    """Names of figures to functions of pyplot that draw them."""
    entries: Entries = list(enumerate(results.get("attentions", {}).values()))
    local = [(i, e) for i, e in entries if (e.get("locality") or {}).get("share")]
    fields = [(i, e) for i, e in entries if (e.get("receptive_field") or {}).get("map")]
    energy = [(i, e) for i, e in entries if (e.get("energy") or {}).get("layers")]
    placed = [(i, e) for i, e in entries if e.get("accuracy_mean") is not None and e.get("state_bytes")]
    curves = [run for run in results.get("runs", []) if run.get("curve")]
    made: dict[str, Callable[[Any], Any]] = {}
    if local:
        made["attention_distance"] = lambda plt: _distance(plt, local)
        made["attention_distance_layers"] = lambda plt: _distance_layers(plt, local)
        made["attention_entropy"] = lambda plt: _entropy(plt, local)
    if fields:
        made["receptive_fields"] = lambda plt: _fields(plt, fields)
        made["receptive_field_share"] = lambda plt: _field_share(plt, fields)
    if energy:
        made["energy"] = lambda plt: _energy(plt, energy)
        made["firing_rates"] = lambda plt: _firing(plt, energy)
    if placed:
        made["memory_accuracy"] = lambda plt: _memory(plt, placed)
    if curves:
        made["convergence"] = lambda plt: _convergence(plt, results)
    for chart in results.get("charts", []):
        draw = region_map if chart["kind"] == "regions" else chart_lines
        made[chart["id"].replace("-", "_")] = lambda plt, draw=draw, chart=chart: draw(plt, chart)  # type: ignore[misc]
    return made


def _distance(plt: Any, entries: Entries) -> Any:
    figure, (left, right) = plt.subplots(1, 2, figsize=(2 * WIDTH, max(2.4, 0.42 * len(entries) + 0.9)),
                                         width_ratios=(1.6, 1))  # fmt: skip
    for i, entry in entries:
        local = entry["locality"]
        left.plot(local["distance"], local["weight"], label=entry["label"], **line(i))
    grids = {tuple(entry["locality"]["grid"]) for _, entry in entries}
    if len(grids) == 1:  # models on other grids have another line each
        height, width = grids.pop()
        left.axhline(1 / (height * width), color="#58616a", linestyle="--", linewidth=0.8, label="uniform")
    left.set(xlabel="Manhattan distance (tokens)", ylabel="mean attention weight", ylim=(0, None))
    legend(figure, left, entries)
    names = [wrapped(entry["label"]) for _, entry in entries]
    shares = [100 * entry["locality"]["short_range_share"] for _, entry in entries]
    bars = right.barh(names, shares, color=[COLOURS[i % 8] for i, _ in entries])
    right.bar_label(bars, fmt="%.1f", padding=2, fontsize=7)
    right.margins(x=0.14)
    near = {entry["locality"]["short_distance"] for _, entry in entries}
    right.set(xlabel=f"% at distance ≤ {near.pop()}" if len(near) == 1 else "% at short distance")
    for row, (_, entry) in enumerate(entries):
        uniform = 100 * entry["locality"]["short_range_share_uniform"]
        right.plot([uniform, uniform], [row - 0.4, row + 0.4], color="#1c2126", linestyle="--", linewidth=0.8)
    right.set(xlabel=f"{right.get_xlabel()} (dashed: uniform)")
    right.invert_yaxis()
    right.grid(axis="y", visible=False)
    return figure


def _distance_layers(plt: Any, entries: Entries) -> Any:
    layers = max(len(entry["locality"]["weight_by_layer"]) for _, entry in entries)
    columns = min(4, layers)
    rows = -(-layers // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(2 * WIDTH, 1.6 * rows + 0.4), squeeze=False, sharex=True, sharey=True
    )
    for layer, axis in enumerate(axes.flat):
        if layer >= layers:
            axis.set_visible(False)
            continue
        for i, entry in entries:
            weights = entry["locality"]["weight_by_layer"]
            if layer < len(weights) and weights[layer] is not None:
                axis.plot(entry["locality"]["distance"], weights[layer], label=entry["label"], **line(i, markersize=2))
        axis.set(title=f"layer {layer + 1}")
    axes[0][0].set(ylim=(0, None))  # behind the last line, which may be the highest
    for axis in axes[-1]:
        axis.set_xlabel("Manhattan distance")
    figure.supylabel("mean attention weight", fontsize=8)
    legend(figure, axes[0][0], entries, fontsize=6)
    return figure


def _entropy(plt: Any, entries: Entries) -> Any:
    figure, axis = plt.subplots(figsize=(WIDTH, 2.4))
    left, right = math.inf, 0.0
    for i, entry in entries:
        local = entry["locality"]
        edges, density = (local["entropy_histogram"][name] for name in ("edges", "density"))
        label = f"{entry['label']}, mean {local['entropy_mean']:.2f}"
        # Bins are as fine as the sample allows, so heights of different models compare only as shares of the largest.
        axis.stairs([value / max(density) for value in density], edges, color=COLOURS[i % 8], label=label,
                    linewidth=1.1, linestyle=LINES[i % 8])  # fmt: skip
        taken = [k for k, value in enumerate(density) if value > 0]
        left, right = min(left, edges[taken[0]]), max(right, edges[taken[-1] + 1])
    levels = {round(entry["locality"]["entropy_uniform"], 9) for _, entry in entries}
    name = "entropy of attention (nats)"
    if len(levels) == 1:  # models on other grids have another line each
        uniform = levels.pop()
        right = max(right, uniform)
        axis.axvline(uniform, color="#58616a", linestyle="--", linewidth=0.8)
        name = "entropy of attention (nats; dashed: uniform)"
    # Only where there is something: entropies of trained attention often all lie in the upper part.
    room = 0.04 * (right - left) or 0.1
    axis.set(xlabel=name, ylabel="density / largest", xlim=(left - room, right + room), ylim=(0, 1.05))
    legend(figure, axis, entries, below=True)
    return figure


def _fields(plt: Any, entries: Entries) -> Any:
    columns = min(5, len(entries))
    rows = -(-len(entries) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(2 * WIDTH, 1.7 * rows + 0.25), squeeze=False)
    image = None
    for axis, (_, entry) in zip(axes.flat, entries, strict=False):
        values = [[value**0.5 for value in row] for row in entry["receptive_field"]["map"]]
        image = axis.imshow(values, cmap="magma", vmin=0, vmax=1, interpolation="nearest")
        if entry["receptive_field"].get("centre"):
            cell = entry["receptive_field"]["pixels_per_cell"]
            row, column = ((at + 0.5) / cell - 0.5 for at in entry["receptive_field"]["centre"])
            axis.plot(column, row, "+", color="#3ce0c8", markersize=6, markeredgewidth=0.8)
        axis.set_title(wrapped(entry["label"]), fontsize=7)
    for axis in axes.flat:
        axis.set_axis_off()
    figure.colorbar(image, ax=axes, shrink=0.8, label="√(gradient / largest)")
    return figure


def _field_share(plt: Any, entries: Entries) -> Any:
    figure, axis = plt.subplots(figsize=(WIDTH, 2.4))
    for i, entry in entries:
        squares = entry["receptive_field"]["share_inside"]
        every = max(1, len(squares) // 16)
        axis.plot([s["side"] for s in squares], [100 * s["share"] for s in squares], label=entry["label"],
                  **line(i, markevery=every))  # fmt: skip
    axis.set(xlabel="side of a centred square (pixels)", ylabel="% of the receptive field inside", ylim=(0, 103))
    legend(figure, axis, entries)
    return figure


def energy_parts(layers: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Energy in pJ of the parts of a network: inside attention, its projections, and the rest by their first name."""
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


def _energy(plt: Any, entries: Entries) -> Any:
    figure, axis = plt.subplots(figsize=(WIDTH, 0.42 * len(entries) + 1.3))
    parts = [energy_parts(entry["energy"]["layers"]) for _, entry in entries]
    names = [wrapped(entry["label"]) for _, entry in entries]
    start = [0.0] * len(entries)
    for part in dict.fromkeys(key for one in parts for key in one):
        values = [one.get(part, 0.0) / 1e6 for one in parts]
        axis.barh(names, values, left=start, color=PARTS[part], label=part, height=0.65)
        start = [a + b for a, b in zip(start, values, strict=True)]
    axis.set(xlabel="energy per image (µJ)")
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def _firing(plt: Any, entries: Entries) -> Any:
    figure, axis = plt.subplots(figsize=(2 * WIDTH, 2.6))
    for i, entry in entries:
        rates = [100 * rate for rate in entry["firing_by_layer"].values()]
        axis.plot([n / max(1, len(rates) - 1) for n in range(len(rates))], rates, label=entry["label"],
                  **line(i, markersize=2.5))  # fmt: skip
    axis.set(xlabel="depth (first to last neuron layer)", ylabel="firing rate (%)", ylim=(0, None))
    legend(figure, axis, entries, ncols=2)
    return figure


def count_text(parameters: int) -> str:
    return f"{parameters / 1e6:.2f} M" if parameters >= 1e6 else f"{parameters / 1e3:.1f} k"


def _memory(plt: Any, entries: Entries) -> Any:
    figure, axes = plt.subplots(1, 2, figsize=(2 * WIDTH, 2.5), sharey=True)
    most = max(entry["parameters"] for _, entry in entries)
    for axis, key, unit, label in (
        (axes[0], "state_bytes", 1024, "attention state, derived (KiB)"),
        (axes[1], "peak_inference_bytes", 2**20, "peak memory, measured, batch 1 (MiB)"),
    ):
        for i, entry in entries:
            x, y = entry[key] / unit, 100 * entry["accuracy_mean"]
            axis.errorbar(x, y, yerr=100 * (entry["accuracy_spread"] or 0), color=COLOURS[i % 8], linewidth=1)
            axis.scatter(x, y, s=110 * entry["parameters"] / most, color=COLOURS[i % 8], marker=MARKERS[i % 8],
                         label=f"{entry['label']}, {count_text(entry['parameters'])}", alpha=0.85, zorder=3,
                         )  # fmt: skip
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


def _convergence(plt: Any, results: dict[str, Any]) -> Any:
    figure, axes = plt.subplots(1, 2, figsize=(2 * WIDTH, 2.4))
    for i, (key, entry) in enumerate(results["attentions"].items()):
        curves = [run["curve"] for run in results["runs"] if run["attention"] == key and run["curve"]]
        for axis, name, unit in ((axes[0], "test_accuracy", 100.0), (axes[1], "train_loss", 1.0)):
            epochs: dict[int, list[float]] = {}
            for record in (record for curve in curves for record in curve):
                if record.get(name) is not None:
                    epochs.setdefault(record["epoch"], []).append(unit * record[name])
            if not epochs:
                continue
            x = sorted(epochs)
            mean = [sum(epochs[e]) / len(epochs[e]) for e in x]
            axis.plot(x, mean, label=entry["label"], **line(i, markevery=max(1, len(x) // 12)))
            axis.fill_between(x, [min(epochs[e]) for e in x], [max(epochs[e]) for e in x],
                              color=COLOURS[i % 8], alpha=0.15, linewidth=0)  # fmt: skip
    for axis in axes:
        axis.xaxis.get_major_locator().set_params(integer=True)
    axes[0].set(xlabel="epoch", ylabel="test accuracy (%)")
    axes[1].set(xlabel="epoch", ylabel="train loss")
    legend(figure, axes[0], list(enumerate(results["attentions"].values())))
    return figure
