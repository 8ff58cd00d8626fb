"""Counts the parameters of every segmentation recipe, backbone and head, into results/segmentation/parameters.json.

The ANN rows need timm; without it their last count stays.

    python benchmarks/segmentation_parameters.py
"""

from __future__ import annotations

import json
import sys
from itertools import product
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.common import parser
from lrfdyn.errors import LrfdynError
from lrfdyn.models.summary import count_parameters
from lrfdyn.segmentation.model import create_segmenter
from lrfdyn.training.recipes import find_recipe, load_recipe, recipe_notes

RESULT = Path(__file__).parents[1] / "results" / "segmentation" / "parameters.json"


RECIPES = ("ade20k_sdt_v3", "ade20k_ann")


def count(recipe: str, choice: dict[str, str]) -> dict[str, Any]:
    model = load_recipe(recipe, choice).model
    arguments = {key: value for key, value in model.arguments().items() if key != "pretrained"}
    with torch.device("meta"):
        built = create_segmenter(model.name, head_options=model.head or None, **arguments)
        published = create_segmenter(model.name, head_options={"output_stride": 2}, **arguments)
    parts = {"backbone": count_parameters(built.backbone), "head": count_parameters(built.head)}
    if not model.name.startswith("timm/"):
        parts["head_stride_2"] = count_parameters(published.head)
    return {"recipe": recipe, "model": model.name, "attention": model.attention, **parts}


def main() -> None:
    parser(__doc__).parse_args()
    kept = json.loads(RESULT.read_text()) if RESULT.exists() else []
    before = {(row["model"], row["attention"]): row for row in kept}
    rows = []
    for recipe in RECIPES:
        _, _, variants = recipe_notes(find_recipe(recipe))
        for values in product(*variants.values()):
            choice = dict(zip(variants, values, strict=True))
            known = before.get((choice["model"], choice.get("attention")))
            try:
                rows.append(count(recipe, choice))
            except LrfdynError as error:
                print(f"{recipe} {choice}: {error}")
                rows += [known] if known else []
    rows.sort(key=lambda row: (row["model"].removeprefix("timm/"), row["attention"] or ""))
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
