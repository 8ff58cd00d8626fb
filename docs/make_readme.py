"""Writes the results tables of the README from the files that hold the measured numbers."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from docs.make_results import read_runs
from docs.pages import table

ROOT = Path(__file__).parent.parent


def digits() -> str:
    results = json.loads((ROOT / "results" / "digits" / "results.json").read_text())
    header = ["attention", "test accuracy", "parameters", "state, derived", "peak memory, measured", "firing rate"]
    body = []
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
        body.append(cells)
    machine = results["machine"]
    source = "[results/digits/results.json](results/digits/results.json)"
    threads = f"{machine['threads']} thread{'' if machine['threads'] == 1 else 's'}"
    rows = table([*header, "energy"], body)
    return f"{rows}\n{machine['cpu']}, {threads}, torch {machine['torch']}. Source: {source}."


def cifar100() -> str:
    """Every run that ended, the longest and best first."""
    runs = [(run, run.summary) for run in read_runs(ROOT / "results" / "cifar100") if run.summary is not None]
    body = [
        [
            run.title,
            "" if run.title in ("SSA", "VSA") else ", ".join(map(str, run.dilations)) or "none",
            f"{run.schedule}{run.settings}",
            f"{summary['top1']:.2f} %",
            f"{summary['parameters']:,}",
        ]
        for run, summary in sorted(runs, key=lambda pair: (-pair[0].schedule, -pair[1]["top1"]))
    ]
    return table(["attention", "dilations", "epochs", "test accuracy", "parameters"], body).rstrip()


def render(text: str) -> str:
    for name, made in {"digits": digits, "cifar100": cifar100}.items():
        block = re.compile(rf"(<!-- {name}: [^\n]*-->\n).*?(<!-- end -->)", re.DOTALL)
        text = block.sub(lambda found, made=made: f"{found[1]}\n{made()}\n\n{found[2]}", text)  # type: ignore[misc]
    return text


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(render(readme.read_text()))
