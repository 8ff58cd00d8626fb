"""What all figures for papers have in common: colours, markers, style and legends."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any
from zlib import crc32

import numpy as np

from lrfdyn.errors import needs

NEEDED = "figures need matplotlib; pip install 'lrfdyn[analysis]'"
# The attentions that have the same colour and marker in every figure and report; others take those that are left.
KINDS = ("vsa", "ssa", "causal_ssa", "lrf_ssa", "lrf_dyn", "sdsa")
# One colour, marker and line per model, told apart with any colour vision and in print.
COLOURS = ("#0b6fb8", "#cc5206", "#06805f", "#b0417f", "#a27000", "#2f93cc", "#5b4bb3", "#5c6672")
MARKERS = "os^Dv*Ph"
LINES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (8, 2)))
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


def wrapped(label: str, width: int = 20) -> str:
    return textwrap.fill(label, width, break_long_words=False, break_on_hyphens=False)


def with_legend(figure: Any, axis: Any, entries: Entries, below: bool = False, **more: Any) -> Any:
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
    names = [wrapped(name, 42) for name in names]
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


def colour_of(entry: dict[str, Any]) -> str:
    return COLOURS[entry["place"] % 8]


def line_of(entry: dict[str, Any], points: int = 1, **more: Any) -> dict[str, Any]:
    """Label, colour, marker and line of a model with so many points, of which some 16 are marked, others for every
    model. They start over at the ninth, with another kind of line."""
    place, step = entry["place"], max(1, points // 16)
    style = {"marker": MARKERS[place % 8], "linestyle": LINES[place // 8 % 8], "markevery": (place % step, step)}
    rim = {"markeredgewidth": 0.4, "markeredgecolor": "white"}
    return {"label": entry["label"], "color": colour_of(entry), **style, **rim, **more}
