"""What the figures for papers share: sizes, colours, markers, names and legends."""

from __future__ import annotations

import textwrap
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
Entries = list[tuple[int, dict[str, Any]]]


def pyplot(argument: str) -> Any:
    """Import matplotlib without a screen; an error names `argument` where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise LrfdynError(f"{argument}: {NEEDED}") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def wrapped(label: str, width: int = 20) -> str:
    """Break a long name into lines."""
    return textwrap.fill(label, width, break_long_words=False, break_on_hyphens=False)


def legend(figure: Any, axis: Any, entries: Entries, below: bool = False, **more: Any) -> None:
    """Put the legend inside the axes where the names are short, under them where they would cover the data or with
    `below`."""
    few = max(len(entry["label"]) for _, entry in entries) <= 24 and len(entries) <= 6
    if few and not below:
        axis.legend(**more)
        return
    columns = 2 if few or figure.get_figwidth() > WIDTH else 1
    handles, names = axis.get_legend_handles_labels()
    names = [wrapped(name, 42) for name in names]
    lines = sum(name.count("\n") + 1 for name in names)
    figure.set_figheight(figure.get_figheight() + 0.16 * -(-lines // columns))
    figure.legend(handles, names, loc="outside lower center", ncols=columns)


def line(index: int, **more: Any) -> dict[str, Any]:
    """Return colour, marker and line of a model. They start over at the ninth, with another kind of line."""
    style = {"color": COLOURS[index % 8], "marker": MARKERS[index % 8], "linestyle": LINES[index // 8 % 8]}
    return {**style, "markeredgewidth": 0, **more}
