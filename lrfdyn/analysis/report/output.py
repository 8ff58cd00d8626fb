"""What an analysis leaves in a folder: results.json, the report, tables and figures."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lrfdyn.analysis.report.captions import captions
from lrfdyn.analysis.report.page import write_report
from lrfdyn.analysis.report.style import NEEDED
from lrfdyn.analysis.report.tables import write_tables
from lrfdyn.errors import LrfdynError, unknown_name
from lrfdyn.files import write_atomic, write_json

FORMATS = ("pdf", "svg", "png")


def has_matplotlib() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def check_formats(formats: Sequence[str]) -> tuple[str, ...]:
    """The formats to write, none for "none"; an error before any work is done."""
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
        return _write_all(results, out, formats)
    except OSError as error:
        raise LrfdynError(f"out: cannot write in {out} ({error.strerror})") from None


def _write_all(results: dict[str, Any], out: Path, formats: Sequence[str]) -> str:
    write_json(out / "results.json", results)
    write_report(results, out / "report.html")
    written = write_tables(results, out / "tables")
    line = f"results: {out / 'results.json'}   {len(written)} tables: {out / 'tables'}"
    if formats:
        from lrfdyn.analysis.report.plots import write_figures

        figures = write_figures(results, out / "figures", formats)
        drawn = {path.stem for path in figures}
        texts = [f"{name}: {text}\n" for name, text in captions(results).items() if name in drawn]
        write_atomic(out / "figures" / "captions.txt", lambda file: file.write_text("\n".join(texts), encoding="utf-8"))
        line += f"   {len(figures)} figures: {out / 'figures'}"
    return line
