"""Parts of mutants.md, from results/mutants.jsonl."""

from __future__ import annotations

import json
from typing import Any

from docs.parts import RESULTS, table

# Of a record that say which mutant it is; its newest line counts.
NAMES = ("path", "start", "end", "after")


def load() -> list[dict[str, Any]]:
    lines = (RESULTS / "mutants.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    return list({tuple(record[name] for name in NAMES): record for record in records}.values())


def by_room() -> str:
    """How many mutants were tried in each package, and what became of them."""
    records = load()
    rooms = sorted({record["room"] for record in records})
    rows = [(f"`{room}`", [r for r in records if r["room"] == room]) for room in rooms] + [("all", records)]

    def counts(tried: list[dict[str, Any]]) -> list[int]:
        closed, left = sum("again" in record for record in tried), len(survivors(tried))
        return [len(tried), len(tried) - closed - left, closed, left]

    body = [[name, *map(str, counts(tried)), seeds(tried)] for name, tried in rows]
    return table(["package", "tried", "noticed", "closed since", "survived", "seed"], body, numbers=True)


def seeds(records: list[dict[str, Any]]) -> str:
    return ", ".join(map(str, sorted({record["seed"] for record in records})))


def survivors(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted((r for r in records if r["noticed"] is None), key=lambda r: (r["path"], r["line"]))


def reasons() -> str:
    """The mutants that no test noticed, with the reason that was added to their records by hand."""

    def code(text: str) -> str:
        return f"`{' '.join(text.split())}`".replace("|", "\\|")

    body = [
        [
            f"`{r['path'].removeprefix('lrfdyn/')}:{r['line']}`",
            code(r["before"]),
            code(r["after"]),
            r.get("reason", "not looked at yet"),
        ]
        for r in survivors(load())
    ]
    return table(["place", "code", "changed to", "why no test notices"], body)


PARTS = {"mutants_by_room": by_room, "mutants_survivors": reasons}
