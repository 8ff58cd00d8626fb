"""The part of results.md on N-MNIST, from the runs in results/nmnist_small.

`cpu` and `gpu` hold what `lrfdyn sweep benchmarks/nmnist.yaml --keep` left there: a folder for every run, with its
recipe, log and summary."""

from __future__ import annotations

import json
from itertools import groupby
from statistics import mean

from docs.parts import RESULTS, table
from docs.parts.results import several
from lrfdyn.attention import attention_label

FOLDER = RESULTS / "nmnist_small"


def runs() -> str:
    """A row for every attention and device: accuracy over the seeds, each of them, and the time of training."""
    found = [(path, json.loads(path.read_text(encoding="utf-8"))) for path in sorted(FOLDER.glob("*/*/summary.json"))]
    body = []
    for (device, attention), lines in groupby(
        sorted(found, key=lambda run: (run[1]["device"], run[1]["attention"] != "ssa", run[1]["attention"])),
        key=lambda run: (run[1]["device"], run[1]["attention"]),
    ):
        own = sorted(lines, key=lambda run: run[1]["seed"])
        links = [f"[{run['top1']:.0f}](../{path.parent.relative_to(RESULTS.parent)}/log.jsonl)" for path, run in own]
        accuracies, seconds = [run["top1"] for _, run in own], mean(run["train_s"] for _, run in own)
        parameters = f"{own[0][1]['parameters']:,}"
        body.append([attention_label(attention), device, several(accuracies), ", ".join(links), parameters,
                     f"{seconds:,.0f}"])  # fmt: skip
    header = ["attention", "device", "top-1 %", "seeds 0, 1, 2", "parameters", "training s"]
    return table(header, body) if body else "Not measured yet."


PARTS = {"nmnist_runs": runs}
