"""Measure the accuracy of a trained model on its test images.

SOURCE is the folder of a run (its newest checkpoint is taken, or its model where no checkpoint was kept), a checkpoint,
or a recipe together with --weights.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Any

from lrfdyn.commands.bar import bar
from lrfdyn.commands.train import add_keys, overrides
from lrfdyn.errors import LrfdynError, require
from lrfdyn.io.weights import load_tensors
from lrfdyn.training.config import TrainConfig, parse_config
from lrfdyn.training.recipes import ENDINGS, apply_override, find_recipe, list_recipes, load_recipe
from lrfdyn.training.tasks import describe_results


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.allow_abbrev = False
    parser.usage = "lrfdyn evaluate SOURCE [--option ...] [--section.key VALUE ...]"
    add = parser.add_argument
    add("source", help="the folder of a run, a checkpoint, or the name or path of a recipe")
    add("--weights", type=Path, help="with a recipe: a .safetensors file or a folder of save_pretrained")
    add("--raw", action="store_true", help="the weights themselves and not their moving average")
    add("--classes", action="store_true", help="of segmentation: print a line for every class too")
    add("--json", action="store_true", help="print JSON")
    add_keys(parser)


def run(arguments: argparse.Namespace) -> None:
    from lrfdyn.training.evaluation import evaluate_weights
    from lrfdyn.training.processes import leave_together

    config, weights, source = load(arguments)
    first = int(os.environ.get("RANK", "0")) == 0
    with bar(first) as shown:
        task = shown.add_task("test images", total=None)

        def progress(images: int, total: int) -> None:
            shown.update(task, advance=images, total=total)

        result: dict[str, Any] = {"source": source, "command": shlex.join(["lrfdyn", *sys.argv[1:]])}
        result |= evaluate_weights(config, weights, Path(source), progress)
    if first:  # all processes have the same numbers
        print_result(result, arguments)
    leave_together()


def print_result(result: dict[str, Any], arguments: argparse.Namespace) -> None:
    if arguments.json:
        print(json.dumps(result, indent=1))
        return
    print(f"{result['source']}: {describe_results(result, result['num_classes'])}, loss {result['test_loss']:.4f}")
    if arguments.classes and "classes" in result:
        print_classes(result["classes"])


def print_classes(rows: list[dict[str, Any]]) -> None:
    """Of segmentation: every class that occurs or was predicted, the best first."""
    for row in sorted((row for row in rows if row["iou"] is not None), key=lambda row: -row["iou"]):
        accuracy = "" if row["accuracy"] is None else f"{row['accuracy']:.2f}"
        print(f"{row['class']:<24} IoU {row['iou']:6.2f} %  accuracy {accuracy:>6} %  {row['pixels']:>12,} pixels")


def load_ended(run: Path, arguments: argparse.Namespace) -> tuple[TrainConfig, dict[str, Any], str]:
    """What is left of a run that has ended when its checkpoints were thrown away."""
    recipe, model = run / "recipe.yaml", run / "model" / "model.safetensors"
    require(
        recipe.is_file() and model.is_file(),
        f"source: {run} holds no checkpoint; for a saved model give its recipe and --weights {run}",
    )
    require(not arguments.raw, f"raw: {run} has no checkpoint, and its model is what the run ended with")
    return load_recipe(recipe, overrides(arguments)), load_tensors(model)[0], str(model)


def load(arguments: argparse.Namespace) -> tuple[TrainConfig, dict[str, Any], str]:
    """Configuration, tensors by name, and where they are from."""
    from lrfdyn.io import checkpoints

    source = Path(arguments.source)
    if source.is_dir() or source.suffix == ".safetensors":
        require(
            arguments.weights is None, "weights: a run and a checkpoint hold their own; --weights goes with a recipe"
        )
        if source.is_dir():
            found = checkpoints.newest_checkpoint(source / "checkpoints", partial(print, file=sys.stderr))
            if found is None:
                return load_ended(source, arguments)
            path, tensors, meta = found
        else:
            path, (tensors, meta) = source, checkpoints.read_checkpoint(source)
        values = meta["config"]
        for key, text in overrides(arguments).items():
            apply_override(values, key, text)
        return parse_config(values, str(path)), checkpoints.model_weights(tensors, raw=arguments.raw), str(path)
    if arguments.weights is None and arguments.source not in list_recipes() and source.suffix not in ENDINGS:
        raise LrfdynError(f"source: no such folder, and no recipe of that name: {source}")
    config = load_recipe(find_recipe(arguments.source), overrides(arguments))
    require(arguments.weights is not None, "weights: a recipe needs --weights, a file or folder")
    path = arguments.weights / "model.safetensors" if arguments.weights.is_dir() else arguments.weights
    return config, load_tensors(path)[0], str(path)
