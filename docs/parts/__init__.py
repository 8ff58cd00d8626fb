"""The filled parts of the pages: one module for each page, which makes its tables from the files in `results/`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"


def read(name: str) -> Any:
    """The content of `results/NAME`, a JSON file; an empty list where it does not exist."""
    path = RESULTS / name
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []


def table(header: Sequence[str], body: Iterable[Sequence[str]], numbers: bool = False) -> str:
    """A Markdown table; with `numbers`, all columns but the first are aligned to the right."""
    rule = ["---", *["---:" if numbers else "---"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rule, *body))


class Blank:
    """Stands for a value that is not there: nothing, in any format."""

    def __format__(self, _: str) -> str:
        return ""


def listing(records: Iterable[dict[str, Any]], columns: dict[str, str], numbers: bool = False) -> str:
    """A table with a row for each record; `columns` are formats of its values by their headers."""
    known = [{key: Blank() if value is None else value for key, value in record.items()} for record in records]
    body = [[form.format(**record).replace(" ()", "") for form in columns.values()] for record in known]
    return table(list(columns), body, numbers)


def percent(share: float | None, digits: int = 1) -> str:
    """A share in percent, with a space that does not break."""
    return "–" if share is None else f"{100 * share:.{digits}f}\u00a0%"


def kib(count: float | None, digits: int = 1) -> str:
    return "–" if count is None else f"{count / 1024:,.{digits}f} KiB"
