"""What results leave in a folder, whoever made them: results.json, tables, figures, and the interactive report, one
HTML file that needs no network."""

from __future__ import annotations

import csv
import html
import importlib.util
import json
from collections.abc import Sequence
from functools import partial
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from lrfdyn.analysis.report.drawings import NEEDED, STYLE, pyplot
from lrfdyn.analysis.report.figures import Row, figures
from lrfdyn.errors import LrfdynError, require, unknown_name
from lrfdyn.files import finite, write_atomic, write_json

RESULTS_FORMAT = "lrfdyn-results/1"
FORMATS = ("pdf", "svg", "png")
STAMPS = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}  # the same figure is the same file
# Inlined in this order: the later scripts use the functions of the earlier ones.
SCRIPTS = ("_base", "_charts", "_figures", "_tables", "_energy", "_theory", "")


def has_matplotlib() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def check_formats(formats: Sequence[str]) -> tuple[str, ...]:
    """Return the formats to write, none for "none"; an unknown one or a missing matplotlib is an error."""
    chosen = () if tuple(formats) == ("none",) else tuple(formats)
    for name in chosen:
        if name not in FORMATS:
            raise unknown_name("figures", name, [*FORMATS, "none"])
    require(not chosen or has_matplotlib(), f"figures: {NEEDED}, or pass --figures none")
    return chosen


def write_all(results: dict[str, Any], out: Path, formats: Sequence[str]) -> str:
    """Write `results` into the folder `out` (results.json, report.html, tables/*.csv and, in every one of `formats`,
    figures/* with captions.txt) and return a line that names what was written."""

    def write_rows(rows: Sequence[Row], path: Path) -> None:
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(rows)

    report, data, tables = out / "report.html", out / "results.json", out / "tables"
    try:
        write_json(data, results)
        write_report(results, report)
        made = figures(results)
        for name, figure in made.items():
            write_atomic(tables / f"{name}.csv", partial(write_rows, figure.rows))
        line = f"Report: {report}   results: {data}   {len(made)} tables: {tables}"
        if formats:
            drawn = write_figures(results, out / "figures", formats)
            line += f"   {len(drawn)} figures: {out / 'figures'}"
    except OSError as error:
        raise LrfdynError(f"out: cannot write in {out} ({error.strerror})") from None
    return line


def write_figures(results: dict[str, Any], folder: Path, formats: Sequence[str]) -> list[Path]:
    """Draw every figure that `results` have the numbers of in every format, write captions.txt beside them, and return
    the paths of the figures."""
    plt = pyplot("figures")
    paths, captions = [], []
    for name, figure in figures(results).items():
        if figure.draw is None:
            continue
        with plt.rc_context(STYLE):
            drawing = figure.draw(plt)
            for form in formats:
                paths.append(folder / f"{name}.{form}")
                write_atomic(paths[-1], partial(drawing.savefig, format=form, metadata=STAMPS.get(form)))
            plt.close(drawing)
        captions.append(f"{name}: {figure.caption}\n")
    write_atomic(folder / "captions.txt", lambda file: file.write_text("\n".join(captions), encoding="utf-8"))
    return paths


def write_report(results: dict[str, Any], path: Path) -> None:
    """Write the report of `results` to `path`, replacing an older one only when the new one is complete."""
    page = render_report(results)
    write_atomic(Path(path), lambda file: file.write_text(page, encoding="utf-8", newline="\n"))


def render_report(results: dict[str, Any]) -> str:
    """Return the report of `results` as one HTML page with its style, scripts and data inside."""
    found = results.get("format")
    require(found == RESULTS_FORMAT, f"results: expected the format {RESULTS_FORMAT!r}, got {found!r}")

    def asset(name: str) -> str:
        return resources.files("lrfdyn.analysis.report").joinpath(name).read_text(encoding="utf-8")

    data = json.dumps(finite(results), allow_nan=False, separators=(",", ":"))
    return Template(asset("report.html")).substitute(
        title=html.escape(str(results.get("title", "lrfdyn report"))),
        style=asset("report.css"),
        # A bare "<" could close the script element ("</script>") or open a comment in it ("<!--").
        data=data.replace("<", "\\u003c"),
        script="\n".join(asset(f"report{name}.js") for name in SCRIPTS),
    )
