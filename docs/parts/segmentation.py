"""Parts of segmentation.md: counts from results/segmentation, measurements from results/ade20k_subset."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from docs.parts import RESULTS, read, table
from lrfdyn.attention import attention_label
from lrfdyn.errors import require
from lrfdyn.paper import SEGMENTATION

SHARED = ("model", "train_images", "test_images", "crop", "epochs", "batch_size", "seed", "device", "precision")
ORDER = ("ssa", "lrf_ssa", "lrf_dyn")


def parameters() -> str:
    """Backbone and head of every recipe, in millions, next to the paper's."""

    def order(row: dict[str, Any]) -> tuple[Any, ...]:
        """The ANNs, then ours by size and attention."""
        if row["model"].startswith("timm/"):
            return 0, row["backbone"]
        return 1, "sml".index(row["model"][-1]), ORDER.index(row["attention"])

    body = []
    for row in sorted(read("segmentation/parameters.json"), key=order):
        name = row["model"].removeprefix("timm/") + (" (timm)" if row["model"].startswith("timm/") else "")
        counts = [f"{n / 1e6:.2f}" for n in (row["backbone"], row["head"], row["backbone"] + row["head"])]
        stride_2 = f"{row['head_stride_2'] / 1e6:.2f}" if "head_stride_2" in row else ""
        body.append(
            [
                name,
                attention_label(row["attention"]) if row["attention"] else "",
                *counts,
                SEGMENTATION.get((row["model"], row["attention"]), ("", ""))[1],
                stride_2,
            ]
        )
    header = ["backbone", "attention", "backbone (M)", "head (M)", "together", "paper (M)", "head at stride 2 (M)"]
    return table(header, body)


def subset(folder: Path = RESULTS / "ade20k_subset") -> str:
    """The runs on the small part of ADE20K: what they share, and what each reached."""
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*/summary.json")]
    runs = sorted((run for run in runs if run["attention"] in ORDER), key=lambda run: ORDER.index(run["attention"]))
    if not runs:
        return "Not measured yet."
    for key in SHARED:
        found = [run[key] for run in runs]
        require(len(set(found)) == 1, f"{folder}: {key}: expected the same in all runs, got {found}")
    first = runs[0]
    backbones = [run["backbone"] for run in runs if run["backbone"] is not None]
    require(len(backbones) in (0, len(runs)), f"{folder}: backbone: expected one in all runs or in none")
    facts = [
        ["model", first["model"]],
        ["start", ", ".join(backbones) or "from scratch"],
        ["training and validation pairs", f"{first['train_images']:,} and {first['test_images']:,}"],
        ["epochs, crops a step, pixels of a crop", f"{first['epochs']}, {first['batch_size']}, {first['crop']}"],
        ["device, precision", f"{first['device']}, {first['precision']}"],
        ["command", f"`{first['command']}`"],
        *(
            ["the GPU was shared", f"{attention_label(r['attention'])} beside {r['beside']}"]
            for r in runs
            if r.get("beside")
        ),
    ]
    body = []
    for run in runs:
        ious = class_ious(folder / f"{run['model']}_{run['attention']}" / "classes.csv")
        scores = [f"{run[key]:.2f}" for key in ("miou", "mean_accuracy", "pixel_accuracy")]
        seen = f"{sum(iou > 0 for iou in ious)} of {len(ious)}"
        speed = [f"{run['images_per_s']:,.0f}", f"{run['wall_s']:,.0f}"]
        body.append([attention_label(run["attention"]), *scores, seen, f"{run['parameters']:,}", *speed])
    header = ["attention", "mIoU %", "mean accuracy %", "pixel accuracy %", "classes found", "parameters"]
    return f"{table([*header, 'training images/s', 'wall s'], body)}\n\n{table(['all three', ''], facts)}"


def class_ious(path: Path) -> list[float]:
    """Of the classes that occur or were predicted."""
    with path.open(encoding="utf-8") as file:
        return [float(row["iou"]) for row in csv.DictReader(file) if row["iou"]]


def paper() -> str:
    rows = [[name, count, str(steps), f"{miou:.1f}"] for name, count, steps, miou in SEGMENTATION.values()]
    return table(["model", "parameters (M)", "T", "mIoU %"], rows)


PARTS = {"segmentation_parameters": parameters, "segmentation_subset": subset, "segmentation_paper": paper}
