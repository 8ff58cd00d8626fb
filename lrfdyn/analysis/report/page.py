"""The interactive HTML report of results, whoever made them: one file that needs no network."""

from __future__ import annotations

import html
import json
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from lrfdyn.errors import require
from lrfdyn.files import finite, write_atomic

RESULTS_FORMAT = "lrfdyn-results/1"

# Inlined in this order: the later scripts use the functions of the earlier ones.
_SCRIPTS = ("report_base.js", "report_charts.js", "report_figures.js", "report_tables.js", "report_energy.js",
            "report_theory.js", "report.js")  # fmt: skip


def write_report(results: dict[str, Any], path: Path) -> None:
    """Write the report of `results` to `path`, replacing an older one only when the new one is complete."""
    page = render_report(results)
    write_atomic(Path(path), lambda file: file.write_text(page, encoding="utf-8", newline="\n"))


def render_report(results: dict[str, Any]) -> str:
    """Return the report of `results` as one HTML page with its style, scripts and data inside."""
    found = results.get("format")
    require(found == RESULTS_FORMAT, f"results: expected the format {RESULTS_FORMAT!r}, got {found!r}")
    return Template(_asset("report.html")).substitute(
        title=html.escape(str(results.get("title", "lrfdyn report"))),
        style=_asset("report.css"),
        data=_embed(results),
        script="\n".join(_asset(name) for name in _SCRIPTS),
    )


def _asset(name: str) -> str:
    return resources.files("lrfdyn.analysis.report").joinpath(name).read_text(encoding="utf-8")


def _embed(value: Any) -> str:
    """Return `value` as JSON that is safe inside a script element."""
    text = json.dumps(finite(value), allow_nan=False, separators=(",", ":"))
    # A bare "<" could close the element ("</script>") or open a comment in it ("<!--").
    return text.replace("<", "\\u003c")
