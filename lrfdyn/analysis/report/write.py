"""What an analysis leaves in a folder: results.json, the report, tables and figures."""

from __future__ import annotations

import csv
import importlib.util
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lrfdyn.analysis.report.figures import Row, figures
from lrfdyn.analysis.report.page import write_report
from lrfdyn.analysis.report.style import NEEDED, STYLE, pyplot
from lrfdyn.errors import LrfdynError, unknown_name
from lrfdyn.files import write_atomic, write_json

FORMATS = ("pdf", "svg", "png")
STAMPS = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}  # the same figure is the same file


def has_matplotlib() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def check_formats(formats: Sequence[str]) -> tuple[str, ...]:
    """Return the formats to write, none for "none"; an unknown one or a missing matplotlib is an error."""
    chosen = () if tuple(formats) == ("none",) else tuple(formats)
    for name in chosen:
        if name not in FORMATS:
            raise unknown_name("figures", name, [*FORMATS, "none"])
    if chosen and not has_matplotlib():
        raise LrfdynError(f"figures: {NEEDED}, or pass --figures none")
    return chosen


def write_all(results: dict[str, Any], out: Path, formats: Sequence[str]) -> str:
    """Write `results` into the folder `out` (results.json, report.html, tables/*.csv and, in every one of `formats`,
    figures/* with captions.txt) and return a line that names what was written."""
    try:
        write_json(out / "results.json", results)
        write_report(results, out / "report.html")
        written = write_tables(results, out / "tables")
        line = (
            f"Report: {out / 'report.html'}   results: {out / 'results.json'}   {len(written)} tables: {out / 'tables'}"
        )
        if formats:
            drawn = write_figures(results, out / "figures", formats)
            line += f"   {len(drawn)} figures: {out / 'figures'}"
    except OSError as error:
        raise LrfdynError(f"out: cannot write in {out} ({error.strerror})") from None
    return line


def write_tables(results: dict[str, Any], folder: Path) -> list[Path]:
    """Write every table that `results` have the numbers of as a CSV file and return the paths."""

    def write(path: Path, rows: Sequence[Row]) -> None:
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(rows)

    tables = {folder / f"{name}.csv": figure.rows for name, figure in figures(results).items()}
    for path, rows in tables.items():
        write_atomic(path, lambda file, rows=rows: write(file, rows))  # type: ignore[misc]
    return list(tables)


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
                save = partial(drawing.savefig, format=form, metadata=STAMPS.get(form))
                write_atomic(paths[-1], save)
            plt.close(drawing)
        captions.append(f"{name}: {figure.caption}\n")
    write_atomic(folder / "captions.txt", lambda file: file.write_text("\n".join(captions), encoding="utf-8"))
    return paths
