"""Counts the parameters of every segmentation recipe, backbone and head, into results/segmentation/parameters.json.

The ANN rows need timm; without it their last count stays.

    python benchmarks/segmentation_parameters.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.common import parser
from lrfdyn.errors import LrfdynError
from lrfdyn.models.summary import count_parameters
from lrfdyn.segmentation.model import create_segmenter
from lrfdyn.training.recipes import list_recipes, load_recipe

RESULT = Path(__file__).parents[1] / "results" / "segmentation" / "parameters.json"


def count(recipe: Path) -> dict[str, Any]:
    model = load_recipe(recipe).model
    arguments = {key: value for key, value in model.arguments().items() if key != "pretrained"}
    with torch.device("meta"):
        built = create_segmenter(model.name, head_options=model.head or None, **arguments)
        published = create_segmenter(model.name, head_options={"output_stride": 2}, **arguments)
    parts = {"backbone": count_parameters(built.backbone), "head": count_parameters(built.head)}
    if not model.name.startswith("timm/"):
        parts["head_stride_2"] = count_parameters(published.head)
    return {"recipe": recipe.stem, "model": model.name, "attention": model.attention, **parts}


def main() -> None:
    parser(__doc__).parse_args()
    before = {row["recipe"]: row for row in json.loads(RESULT.read_text())} if RESULT.exists() else {}
    rows = []
    for name, path in list_recipes().items():
        if not name.startswith("ade20k_") or name.startswith("ade20k_subset_"):
            continue
        try:
            rows.append(count(path))
        except LrfdynError as error:
            print(f"{name}: {error}")
            rows += [before[name]] if name in before else []
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
