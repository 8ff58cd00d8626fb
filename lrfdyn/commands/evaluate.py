"""Measure the accuracy of a trained model on its test images.

SOURCE is the folder of a run (its model, or its newest checkpoint where it has not ended), a model or checkpoint in it,
or a recipe together with --weights.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from lrfdyn.commands.arguments import add_keys, command_line, given_keys
from lrfdyn.commands.bar import bar
from lrfdyn.errors import LrfdynError, require
from lrfdyn.io.checkpoints import list_checkpoints, read_checkpoint
from lrfdyn.sources import find_source
from lrfdyn.training.config import TrainConfig
from lrfdyn.training.processes import leave_together
from lrfdyn.training.recipes import ENDINGS, list_recipes, load_recipe, parse_config
from lrfdyn.training.tasks import describe_results


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "lrfdyn evaluate SOURCE [--option ...] [--section.key VALUE ...]"
    add = parser.add_argument
    add("source", help="the folder of a run, what it saved, or the name or path of a recipe")
    add("--weights", metavar="MODEL", help="with a recipe: folder, .safetensors file or hub repository")
    add("--raw", action="store_true", help="the weights themselves and not their moving average")
    add("--classes", action="store_true", help="of segmentation: print a line for every class too")
    add("--json", action="store_true", help="print JSON")
    add_keys(parser)


def run(arguments: argparse.Namespace) -> None:
    from lrfdyn.training.run import evaluate_weights  # its imports take a second

    config, weights, source = load(arguments)
    first = int(os.environ.get("RANK", "0")) == 0
    with bar(first) as shown:
        task = shown.add_task("test images", total=None)

        def progress(images: int, total: int) -> None:
            shown.update(task, advance=images, total=total)

        result: dict[str, Any] = {"source": source, "command": command_line()}
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


def load(arguments: argparse.Namespace) -> tuple[TrainConfig, dict[str, Any], str]:
    """Configuration, tensors by name, and the file that they are from."""
    given, changed = Path(arguments.source), given_keys(arguments)
    if given.exists() and given.suffix not in ENDINGS:
        require(arguments.weights is None, "weights: only with a recipe; a run and a checkpoint hold their own")
        source = find_source(given, "source")
        if arguments.raw and source.kind != "checkpoint":
            stored = None if source.run is None else source.run / "checkpoints"
            require(
                stored is not None and bool(list_checkpoints(stored)),
                f"raw: {given} has no checkpoint, and its model is what the run ended with",
            )
            assert stored is not None
            source = find_source(stored, "source")
        if source.recipe is not None:
            config = load_recipe(source.recipe, changed)
        else:
            require(
                source.kind == "checkpoint",
                f"source: {given} says nothing of its data; give its recipe and --weights {given}",
            )
            config = parse_config(read_checkpoint(source.path)[1]["config"], str(source.path), changed)
    else:
        if arguments.weights is None and arguments.source not in list_recipes() and given.suffix not in ENDINGS:
            raise LrfdynError(f"source: no such file or folder, and no recipe of that name: {given}")
        config = load_recipe(arguments.source, changed)
        require(arguments.weights is not None, "weights: a recipe needs --weights, a trained model")
        source = find_source(arguments.weights, "weights")
    return config, source.weights(arguments.raw), str(source.path)
