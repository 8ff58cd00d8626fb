"""The memory figure: what attention must hold, and what inference really takes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lrfdyn.analysis.report.style import pyplot
from lrfdyn.errors import require
from lrfdyn.files import writable_folder

INK, GRID = "#333333", "#dddddd"
COLORS = {"spikingjelly": "#c9b458", "eager": "#9aa5b1", "low-memory": "#1f6f8b", "streaming": "#5aa897"}
COLUMNS = 3  # panels side by side
TERM_COLORS = ("#1f6f8b", "#7fb7be", "#c7dfe0", "#b0713f", "#e3b98a", "#f1dcc3")


def check_plot(path: Path) -> None:
    """An error where the figure could not be drawn or written."""
    plt = pyplot("plot")
    formats = sorted(plt.gcf().canvas.get_supported_filetypes())
    plt.close()
    ending = path.suffix.removeprefix(".")
    require(ending in formats, f"plot: expected a name that ends in one of {', '.join(formats)}, got {path}")
    writable_folder(path.parent, "plot")


def _plain(axes: Any, title: str, label: str) -> None:
    axes.set_title(title, fontsize=10, loc="left", color=INK)
    axes.set_ylabel(label, fontsize=9, color=INK)
    axes.grid(axis="y", color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", labelsize=8, colors=INK, length=0)
    axes.tick_params(axis="x", labelsize=7, colors=INK, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def plot_memory(states: dict[str, Sequence[dict[str, Any]]], peaks: Sequence[dict[str, Any]], path: Path) -> None:
    """`states`: label -> terms of one layer. `peaks`: records with `group`, `label`, `implementation` and `mib`; every
    group is a panel."""
    plt = pyplot("plot")
    groups = list(dict.fromkeys(record["group"] for record in peaks))
    columns = min(len(groups) + 1, COLUMNS)
    rows = -(-(len(groups) + 1) // columns)
    widest = max((sum(r["group"] == group for r in peaks) for group in groups), default=0)
    size = (columns * max(0.75 * widest + 0.6, 3.8), 3.2 * rows)
    figure, grid = plt.subplots(rows, columns, figsize=size, squeeze=False)
    panels = list(grid.flat)[: len(groups) + 1]
    for unused in list(grid.flat)[len(panels) :]:
        unused.remove()
    first, *others = panels
    names = list(dict.fromkeys(term["name"] for terms in states.values() for term in terms))
    bottom = [0.0] * len(states)
    for i, name in enumerate(names):
        sizes = [sum(t["bytes"] for t in terms if t["name"] == name) / 1024 for terms in states.values()]
        color = TERM_COLORS[i % len(TERM_COLORS)]
        first.bar(list(states), sizes, bottom=bottom, width=0.6, color=color, label=name, edgecolor="white")
        bottom = [a + b for a, b in zip(bottom, sizes, strict=True)]
    for i, total in enumerate(bottom):
        first.text(i, total, f"{total:,.0f}", ha="center", va="bottom", fontsize=8, color=INK)
    _plain(first, "State of one layer, derived", "KiB per image and time step")
    first.legend(fontsize=7, frameon=False)
    for axes, group in zip(others, groups, strict=True):
        shown = [record for record in peaks if record["group"] == group]
        sizes, colors = [r["mib"] for r in shown], [COLORS[r["implementation"]] for r in shown]
        bars = axes.bar(range(len(shown)), sizes, width=0.6, color=colors)
        axes.bar_label(bars, [f"{size:,.0f}" if size >= 10 else f"{size:.1f}" for size in sizes], fontsize=8, color=INK)
        axes.set_xticks(range(len(shown)), [f"{r['label']}\n{r['implementation']}" for r in shown])
        _plain(axes, f"Peak of inference, {group}", "MiB")
    for axes in panels:
        axes.set_ylim(0, 1.15 * axes.get_ylim()[1])
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
