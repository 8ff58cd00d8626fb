"""What the pages that are made from measurements share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(header: Sequence[str], body: Iterable[Sequence[str]], numbers: bool = False) -> str:
    """A Markdown table; with `numbers`, all columns but the first are aligned to the right."""
    rule = ["---", *["---:" if numbers else "---"] * (len(header) - 1)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (header, rule, *body))
