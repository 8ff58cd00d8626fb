"""Parts on Tiny-ImageNet, all of ADE20K and pets, from the runs that their sweeps keep in results/: a folder for every
run, with its recipe, log and summary."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

from docs.parts import RESULTS, table
from docs.parts.findings import UNKNOWN, claim
from docs.parts.results import several
from lrfdyn.attention import attention_label
from lrfdyn.errors import require

ORDER = ("ssa", "lrf_ssa", "lrf_dyn")
UNTIL_THEN = "Not measured yet."
NAMES = {"tiny_imagenet": "Tiny-ImageNet, top-1 %", "ade20k": "ADE20K at 256 pixels, mIoU %", "pets": "pets, mIoU %"}
MEASURES = {"tiny_imagenet": "top1", "ade20k": "miou", "pets": "miou"}
SHARED = ("epochs", "precision", "data")  # by all runs of a folder
Run = tuple[Path, dict[str, Any]]
Groups = dict[tuple[str, str], list[Run]]


def groups(name: str, results: Path = RESULTS) -> Groups:
    """The runs of a sweep by model and attention, in the usual order, each with its seeds in theirs."""
    found = [(path.parent, json.loads(path.read_text("utf-8"))) for path in (results / name).glob("*/summary.json")]
    for key in SHARED:
        values = {run[key] for _, run in found}
        require(len(values) <= 1, f"results/{name}: {key}: expected the same in all runs, got {sorted(values)}")
    rows: Groups = {}
    for run in sorted(found, key=lambda run: (run[1]["model"], ORDER.index(run[1]["attention"]), run[1]["seed"])):
        rows.setdefault((run[1]["model"], run[1]["attention"]), []).append(run)
    return rows


def runs(name: str, others: dict[str, str], results: Path = RESULTS) -> str:
    """A row for every model and attention: the measure over the seeds and of each, with its log; `others` are keys of
    a summary by their headers."""
    body, measure = [], MEASURES[name]
    for (model, attention), own in groups(name, results).items():
        each = [f"[{run[measure]:.2f}](../results/{name}/{folder.name}/log.jsonl)" for folder, run in own]
        first, values = own[0][1], [run[measure] for _, run in own]
        more = [f"{mean(run[key] for _, run in own):.2f}" for key in others.values()]
        size = f"{first['parameters'] / 1e6:.2f}"
        speed = [f"{first['images_per_s']:,.0f}", f"{first['wall_s']:,.0f}", first["device"]]
        body.append([f"`{model}`", attention_label(attention), several(values), ", ".join(each), *more, size, *speed])
    if not body:
        return UNTIL_THEN
    first = next(iter(groups(name, results).values()))[0][1]
    header = ["model", "attention", NAMES[name].rpartition(", ")[2], "of each seed", *others, "parameters (M)"]
    facts = f"{first['epochs']} epochs, {first['precision']}; the last epoch of every run."
    return f"{table([*header, 'images/s', 'wall s', 'device'], body)}\n\n{facts}"


def claims_of(name: str, results: Path = RESULTS) -> Iterator[list[str]]:
    """Whether LRF helps every host, and by more than the spread of both."""
    found, measure = groups(name, results), MEASURES[name]
    for model in dict.fromkeys(model for model, _ in found):
        for kind in ORDER[1:]:
            pair = [[run[measure] for _, run in found.get((model, one), [])] for one in (kind, "ssa")]
            spread = sum((max(values) - min(values)) / 2 for values in pair if values)
            text = f"{attention_label(kind)} is above SSA: {NAMES[name]}, `{model}`"
            means = [mean(values) if values else None for values in pair]
            row = claim(
                text, "by more than both spreads together", means, lambda x, y, s=spread: x - y > s, "{:.2f}".format
            )
            alone = row[2] != UNKNOWN and min(map(len, pair)) < 2
            yield [*row[:3], "not decided: one seed"] if alone else row


def claims(results: Path = RESULTS) -> str:
    rows = [row for name in NAMES for row in claims_of(name, results)]
    return table(["the paper's claim", "rule", "measured", "seen here"], rows) if rows else UNTIL_THEN


SCORES = {"mean accuracy %": "mean_accuracy", "pixel accuracy %": "pixel_accuracy"}
PARTS = {
    "tiny_imagenet_runs": lambda: runs("tiny_imagenet", {"top-5 %": "top5"}),
    "ade20k_runs": lambda: runs("ade20k", SCORES),
    "pets_runs": lambda: runs("pets", SCORES),
    "findings_other_data": claims,
}
