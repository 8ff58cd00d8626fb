"""The figures of the theorems: lines, and maps of regions."""

from __future__ import annotations

from typing import Any

from lrfdyn.analysis.report.style import REGIONS, WIDTH, line


def _scales(axis: Any, chart: dict[str, Any]) -> None:
    for name in "xy":
        if chart[name].get("log"):
            getattr(axis, f"set_{name}scale")("log")
        getattr(axis, f"set_{name}label")(chart[name]["label"])


def chart_lines(plt: Any, chart: dict[str, Any]) -> Any:
    figure, axis = plt.subplots(figsize=(WIDTH, 2.4))
    for i, series in enumerate(chart["series"]):
        x, y = zip(*series["points"], strict=True)
        axis.plot(x, y, label=series["label"], **line(i, markevery=max(1, len(x) // 10)))
    _scales(axis, chart)
    axis.legend()
    return figure


def region_map(plt: Any, chart: dict[str, Any]) -> Any:
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    figure, axis = plt.subplots(figsize=(WIDTH, 2.9))
    classes = chart["classes"]
    colours = REGIONS if len(classes) == 3 else (REGIONS[0], REGIONS[2])
    axis.pcolormesh(chart["x"]["values"], chart["y"]["values"], chart["cells"], cmap=ListedColormap(colours), vmin=-0.5,
                    vmax=len(classes) - 0.5, shading="nearest", rasterized=True)  # fmt: skip
    _scales(axis, chart)
    axis.grid(visible=False)
    figure.legend(handles=[Patch(color=colour, label=label) for colour, label in zip(colours, classes, strict=True)],
                  loc="outside lower center", ncols=1 if max(map(len, classes)) > 28 else 2)  # fmt: skip
    return figure
