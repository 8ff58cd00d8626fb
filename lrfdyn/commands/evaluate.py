"""Measure the accuracy of a trained model on its test images.

SOURCE is the folder of a run (its model, or its newest checkpoint where it has not ended), a model or checkpoint in it,
or a recipe together with --weights.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from lrfdyn.commands.shared import add_keys, bar, command_line, given_keys, print_json
from lrfdyn.errors import require
from lrfdyn.io.weights import list_checkpoints, read_checkpoint
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


def run(args: argparse.Namespace) -> None:
    from lrfdyn.training.run import evaluate_weights  # its imports take a second

    config, weights, source = load(args)
    first = int(os.environ.get("RANK", "0")) == 0
    with bar(first) as shown:
        task = shown.add_task("test images", total=None)
        result: dict[str, Any] = {"source": source, "command": command_line()} | evaluate_weights(
            config, weights, Path(source), lambda images, total: shown.update(task, advance=images, total=total)
        )
    if first and args.json:  # all processes have the same numbers
        print_json(result)
    elif first:
        print(f"{source}: {describe_results(result, result['num_classes'])}, loss {result['test_loss']:.4f}")
        seen = [row for row in result.get("classes", []) if args.classes and row["iou"] is not None]
        for row in sorted(seen, key=lambda row: -row["iou"]):
            accuracy = "" if row["accuracy"] is None else f"{row['accuracy']:.2f}"
            print(f"{row['class']:<24} IoU {row['iou']:6.2f} %  accuracy {accuracy:>6} %  {row['pixels']:>12,} pixels")
    leave_together()


def load(args: argparse.Namespace) -> tuple[TrainConfig, dict[str, Any], str]:
    """Configuration, tensors by name, and the file that they are from."""
    given, changed = Path(args.source), given_keys(args)
    if not given.exists() or given.suffix in ENDINGS:
        known = args.weights or args.source.lower() in map(str.lower, list_recipes()) or given.suffix in ENDINGS
        require(bool(known), f"source: no such file or folder, and no recipe of that name: {given}")
        config = load_recipe(args.source, changed)
        require(args.weights is not None, "weights: a recipe needs --weights, a trained model")
        source = find_source(args.weights, "weights")
        return config, source.weights(args.raw), str(source.path)
    require(args.weights is None, "weights: only with a recipe; a run and a checkpoint hold their own")
    source = find_source(given, "source")
    if args.raw and source.kind != "checkpoint":
        stored = [] if source.run is None else list_checkpoints(source.run / "checkpoints")
        require(bool(stored), f"raw: {given} has no checkpoint, and its model is what the run ended with")
        source = find_source(stored[0].parent, "source")
    if source.recipe is not None:
        config = load_recipe(source.recipe, changed)
    else:
        known = source.kind == "checkpoint"
        require(known, f"source: {given} says nothing of its data; give its recipe and --weights {given}")
        config = parse_config(read_checkpoint(source.path)[1]["config"], str(source.path), changed)
    return config, source.weights(args.raw), str(source.path)
