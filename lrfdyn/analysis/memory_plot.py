"""The memory figure: what attention must hold, and what inference really takes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lrfdyn.errors import LrfdynError

INK, GRID = "#333333", "#dddddd"
COLORS = {"eager": "#9aa5b1", "low-memory": "#1f6f8b", "spikingjelly": "#c9b458"}
TERM_COLORS = ("#1f6f8b", "#7fb7be", "#d3a03d", "#9b6a9c")


def pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise LrfdynError("plot: figures need matplotlib; pip install 'lrfdyn[analysis]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _plain(axes: Any, title: str, label: str) -> None:
    axes.set_title(title, fontsize=10, loc="left", color=INK)
    axes.set_ylabel(label, fontsize=9, color=INK)
    axes.grid(axis="y", color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8, colors=INK, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def plot_memory(states: dict[str, Sequence[dict[str, Any]]], peaks: Sequence[dict[str, Any]], path: Path) -> None:
    """`states`: label -> terms of one layer. `peaks`: records with `group`, `label`, `implementation` and `mib`; every
    group is a panel."""
    plt = pyplot()
    groups = list(dict.fromkeys(record["group"] for record in peaks))
    figure, panels = plt.subplots(1, 1 + len(groups), figsize=(4.2 * (1 + len(groups)), 3.4), squeeze=False)
    first, *others = panels[0]
    names = list(dict.fromkeys(term["name"] for terms in states.values() for term in terms))
    bottom = [0.0] * len(states)
    for i, name in enumerate(names):
        sizes = [sum(t["bytes"] for t in terms if t["name"] == name) / 1024 for terms in states.values()]
        color = TERM_COLORS[i % len(TERM_COLORS)]
        first.bar(list(states), sizes, bottom=bottom, width=0.6, color=color, label=name, edgecolor="white")
        bottom = [a + b for a, b in zip(bottom, sizes, strict=True)]
    for i, total in enumerate(bottom):
        first.text(i, total, f"{total:,.0f}", ha="center", va="bottom", fontsize=8, color=INK)
    _plain(first, "State of one attention layer, derived", "KiB per image and time step")
    first.legend(fontsize=7, frameon=False)
    for axes, group in zip(others, groups, strict=True):
        rows = [record for record in peaks if record["group"] == group]
        bars = axes.bar(
            range(len(rows)), [r["mib"] for r in rows], width=0.6, color=[COLORS[r["implementation"]] for r in rows]
        )
        axes.bar_label(bars, [f"{r['mib']:,.0f}" if r["mib"] >= 10 else f"{r['mib']:.1f}" for r in rows], fontsize=8)
        axes.set_xticks(range(len(rows)), [f"{r['label']}\n{r['implementation']}" for r in rows])
        axes.set_yscale("log")
        _plain(axes, f"Peak of inference, {group}", "MiB (log scale)")
    for axes in panels[0]:
        axes.margins(y=0.12)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
