"""What the trainings of the paper's Table 1 are made of, counted and not measured: steps of their recipes, parameters,
batch norms, and per image the operations of a forward pass and what the plain ones keep for the backward pass.

    python benchmarks/imagenet_counts.py --json results/performance/imagenet_counts.json
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import common
from lrfdyn.paper import IMAGENET
from lrfdyn.training.config import TrainConfig
from lrfdyn.training.estimate import estimate
from lrfdyn.training.recipes import list_recipes, load_recipe
from lrfdyn.training.tasks import Classification

FINE_TUNED = {"sdt_v2_15m": 4, "sdt_v2_55m": 4}  # time steps of a second training, without which they are not the row
FINE_TUNING_EPOCHS = 20


def recipe_of(model: str) -> str:
    return next(name for name in list_recipes() if f"imagenet_{model}".startswith(name))


def trainings() -> Iterator[tuple[str, TrainConfig]]:
    """Recipe and settings of every training, in the order of `lrfdyn.paper`."""
    for model, rows in IMAGENET.items():
        name = recipe_of(model)
        kinds = [{"attention": "ssa" if row == "base" else row} for row in rows] if len(rows) > 1 else [{}]
        for kind in kinds:
            yield name, load_recipe(name, {"model": model, **kind})
        if model in FINE_TUNED:
            longer = {"model": model, "model.time_steps": FINE_TUNED[model]}
            yield name, load_recipe(name, longer, FINE_TUNING_EPOCHS)


def count(name: str, config: TrainConfig) -> dict[str, Any]:
    facts = estimate(config)
    with torch.device("meta"):
        model = Classification().build_model(config, num_classes=facts["num_classes"], image_size=224, in_channels=3)
        with FlopCounterMode(display=False) as counter:
            model(torch.zeros(1, *model.input_size))
    taken = ("model", "attention", "parameters", "train_images", "test_images", "batch_size", "epochs", "steps")
    return {
        "recipe": name, **{key: facts.get(key) for key in taken}, "time_steps": config.model.time_steps,
        "test_epochs": config.run.test_epochs, "optimizer_bytes": facts["memory"]["optimizer"],
        "norms": sum(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()),
        "forward_flop": counter.get_total_flops(),
        "kept_bytes": facts["memory"]["activations"] // facts["micro_batch"],
    }  # fmt: skip


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--json", help="file for the records")
    given = parser.parse_args()
    records = [count(name, config) for name, config in trainings()]
    common.write(records, given.json)
    columns = (
        "model",
        "attention",
        "time_steps",
        "parameters",
        "norms",
        "epochs",
        "steps",
        "forward_flop",
        "kept_bytes",
    )
    print(common.table(records, columns))


if __name__ == "__main__":
    main()
