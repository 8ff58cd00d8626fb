"""The memory figure: what attention must hold, and what inference really takes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from lrfdyn.analysis.report.drawings import STYLE, pyplot
from lrfdyn.errors import require
from lrfdyn.files import writable_folder

COLORS = {"spikingjelly": "#c9b458", "eager": "#9aa5b1", "low-memory": "#1f6f8b", "streaming": "#5aa897"}
COLUMNS = 3  # panels side by side
TERM_COLORS = ("#1f6f8b", "#7fb7be", "#c7dfe0", "#b0713f", "#e3b98a", "#f1dcc3")


def check_plot(path: Path) -> None:
    """Raise an error where the figure could not be drawn or written."""
    plt = pyplot("plot")
    formats = sorted(plt.gcf().canvas.get_supported_filetypes())
    plt.close()
    ending = path.suffix.removeprefix(".")
    require(ending in formats, f"plot: expected a name that ends in one of {', '.join(formats)}, got {path}")
    writable_folder(path.parent, "plot")


def plot_memory(states: dict[str, Sequence[dict[str, Any]]], peaks: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the derived state of one layer and the measured peaks into the file `path`.

    `states` has the terms of one layer by label. `peaks` are records with `group`, `label`, `implementation` and `mib`;
    every group is a panel.
    """
    plt = pyplot("plot")
    groups = list(dict.fromkeys(record["group"] for record in peaks))
    columns = min(len(groups) + 1, COLUMNS)
    rows = -(-(len(groups) + 1) // columns)
    widest = max((sum(r["group"] == group for r in peaks) for group in groups), default=0)
    size = (columns * max(0.75 * widest + 0.6, 3.8), 3.2 * rows)
    with plt.rc_context({**STYLE, "axes.grid.axis": "y", "axes.titlelocation": "left", "axes.ymargin": 0.15}):
        figure, grid = plt.subplots(rows, columns, figsize=size, squeeze=False)
        first, *others = grid.flat
        bottom = [0.0] * len(states)
        for i, name in enumerate(dict.fromkeys(term["name"] for terms in states.values() for term in terms)):
            sizes = [sum(t["bytes"] for t in terms if t["name"] == name) / 1024 for terms in states.values()]
            color = TERM_COLORS[i % len(TERM_COLORS)]
            first.bar(range(len(states)), sizes, 0.6, bottom, color=color, label=name, edgecolor="white")
            bottom = [a + b for a, b in zip(bottom, sizes, strict=True)]
        for i, total in enumerate(bottom):
            first.text(i, total, f"{total:,.0f}", ha="center", va="bottom")
        first.set_xticks(range(len(states)), list(states))
        first.set(title="State of one layer, derived", ylabel="KiB per image and time step")
        if any(states.values()):  # an attention need not say what it holds
            first.legend()
        for axes, group in zip_longest(others, groups):
            if group is None:
                axes.remove()
                continue
            shown = [record for record in peaks if record["group"] == group]
            sizes, colors = [r["mib"] for r in shown], [COLORS[r["implementation"]] for r in shown]
            bars = axes.bar(range(len(shown)), sizes, width=0.6, color=colors)
            axes.bar_label(bars, [f"{size:,.0f}" if size >= 10 else f"{size:.1f}" for size in sizes])
            axes.set_xticks(range(len(shown)), [f"{r['label']}\n{r['implementation']}" for r in shown], fontsize=7)
            axes.set(title=f"Peak of inference, {group}", ylabel="MiB")
        figure.savefig(path, dpi=150)
    plt.close(figure)
