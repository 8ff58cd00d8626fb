"""Fills the parts of the pages that come from measurements.

Prose is written by hand. What stands between `<!-- fill: NAME -->` and `<!-- end -->` is made by the function NAME of a
module in `docs/parts/`, from the files in `results/`.

    python docs/fill.py              # writes the parts anew
    python docs/fill.py --check      # writes nothing; fails where a part is not current
    python docs/fill.py --figures    # draws the figures of the pages too (needs matplotlib)
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from docs.parts import (
    ROOT,
    data,
    deployment,
    edge,
    evidence,
    findings,
    imagenet,
    models,
    mutants,
    nmnist,
    performance,
    readme,
    results,
    segmentation,
    times,
    zoo,
)

MODULES = (
    data, deployment, edge, evidence, findings, imagenet, models, mutants, nmnist, performance, readme, results,
    segmentation, times, zoo,
)  # fmt: skip
PARTS: dict[str, Callable[[], str]] = {name: part for module in MODULES for name, part in module.PARTS.items()}
MARKED = re.compile(r"(<!-- fill: (\w+) -->).*?(<!-- end -->)", re.DOTALL)


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def fill(text: str) -> str:
    """The text of a page with every part made anew. An unknown name is a `KeyError`."""
    return MARKED.sub(lambda found: f"{found[1]}\n\n{PARTS[found[2]]()}\n\n{found[3]}", text)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, fail where a part is not current")
    parser.add_argument("--figures", action="store_true", help="draw the figures too")
    options = parser.parse_args(argv)
    stale = []
    for page in pages():
        text = page.read_text(encoding="utf-8")
        filled = fill(text)
        if filled != text:
            stale.append(page)
            if not options.check:
                page.write_text(filled, encoding="utf-8")
    if options.figures:
        for module in (deployment, edge, findings, performance, results):
            module.draw()
    if options.check and stale:
        print(f"not current: {', '.join(str(page.relative_to(ROOT)) for page in stale)}; run: python docs/fill.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
