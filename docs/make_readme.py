"""Writes the results table of the README from the file that holds the measured numbers."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"(<!-- digits: [^\n]*-->\n).*?(<!-- end -->)", re.DOTALL)


def table(results: dict) -> str:
    lines = [
        "| attention | test accuracy | parameters | state, derived | peak memory, measured | firing rate | energy |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in results["attentions"].values():
        cells = [
            row["label"],
            f"{row['accuracy_mean']:.1%} ± {row['accuracy_spread']:.1%}",
            f"{row['parameters']:,}",
            f"{row['state_bytes'] / 1024:.1f} KiB",
            f"{row['peak_inference_bytes'] / 1024:,.0f} KiB",
            f"{row['firing_rate']:.1%}",
            f"{row['energy']['energy_pj'] / 1e6:.2f} µJ",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    machine = results["machine"]
    source = "[results/digits/results.json](results/digits/results.json)"
    threads = f"{machine['threads']} thread{'' if machine['threads'] == 1 else 's'}"
    lines += ["", f"{machine['cpu']}, {threads}, torch {machine['torch']}. Source: {source}."]
    return "\n".join(lines)


def render(text: str) -> str:
    results = json.loads((ROOT / "results" / "digits" / "results.json").read_text())
    return BLOCK.sub(lambda found: f"{found[1]}\n{table(results)}\n\n{found[2]}", text)


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(render(readme.read_text()))
