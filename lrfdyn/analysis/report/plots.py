"""Figures that commands draw into a file: memory of layers and networks, and when images may stop."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lrfdyn.analysis.report.look import COLOURS, MARKERS, STYLE, WIDTH, line_of, places, pyplot
from lrfdyn.attention import attention_label
from lrfdyn.errors import require
from lrfdyn.files import writable_folder, write_atomic

IMPLEMENTATIONS = {"spikingjelly": "#c9b458", "eager": "#9aa5b1", "low-memory": "#1f6f8b", "streaming": "#5aa897"}
TERMS = ("#1f6f8b", "#7fb7be", "#c7dfe0", "#b0713f", "#e3b98a", "#f1dcc3")


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
            look = line_of({"place": place, "label": name}, linestyle="-" if place == 0 else "none")
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
