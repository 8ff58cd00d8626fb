"""Measure the accuracy of a trained model on its test images.

SOURCE is the folder of a run (its model, or its newest checkpoint where it has not ended), a model or checkpoint in it,
a model of the zoo, or a recipe together with --weights.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from lrfdyn.commands.shared import add_keys, bar, command_line, given_keys, make_table, plain_console, print_json
from lrfdyn.errors import LrfdynError, require
from lrfdyn.io.weights import list_checkpoints, read_checkpoint
from lrfdyn.io.zoo import zoo_entry, zoo_hint
from lrfdyn.sources import find_source
from lrfdyn.training.config import TrainConfig
from lrfdyn.training.processes import leave_together
from lrfdyn.training.recipes import ENDINGS, list_recipes, load_recipe, parse_config
from lrfdyn.training.tasks import describe_results


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "lrfdyn evaluate SOURCE [--option ...] [--section.key VALUE ...]"
    add = parser.add_argument
    add("source", help="the folder of a run, what it saved, or the name or path of a recipe")
    add("--weights", metavar="MODEL", help="with a recipe: folder, .safetensors file, zoo's name or hub repository")
    add("--raw", action="store_true", help="the weights themselves and not their moving average")
    add("--classes", action="store_true", help="of segmentation: print a line for every class too")
    sure = "stop at the time step at which this confidence is passed; auto: chosen on held-out training images"
    add("--exit", metavar="0..1|auto", help=sure)
    add("--exit-loss", type=float, metavar="POINTS", help="of accuracy, that --exit auto may lose (default: 0.2)")
    add("--plot", type=Path, metavar="FILE", help="with --exit: also draw a figure (needs matplotlib)")
    add("--json", action="store_true", help="print JSON")
    add_keys(parser)


def run(args: argparse.Namespace) -> None:
    measure = measurement(args)
    config, weights, source = load(args)
    first = int(os.environ.get("RANK", "0")) == 0
    with bar(first) as shown:
        task = shown.add_task("test images", total=None)
        result: dict[str, Any] = {"source": source, "command": command_line()} | measure(
            config, weights, Path(source), lambda images, total: shown.update(task, advance=images, total=total)
        )
    if first and args.plot is not None:
        from lrfdyn.analysis.report.plots import plot_exits

        plot_exits(result, args.plot)
    if first and args.json:  # all processes have the same numbers
        print_json(result)
    elif first and args.exit is not None:
        print_exits(result)
    elif first:
        where = f" on {result['held_out']:,} held-out training images" if "held_out" in result else ""
        print(f"{source}: {describe_results(result, result['num_classes'])}, loss {result['test_loss']:.4f}{where}")
        seen = [row for row in result.get("classes", []) if args.classes and row["iou"] is not None]
        for row in sorted(seen, key=lambda row: -row["iou"]):
            accuracy = "" if row["accuracy"] is None else f"{row['accuracy']:.2f}"
            print(f"{row['class']:<24} IoU {row['iou']:6.2f} %  accuracy {accuracy:>6} %  {row['pixels']:>12,} pixels")
    leave_together()


def measurement(args: argparse.Namespace) -> Callable[..., dict[str, Any]]:
    """What is measured of configuration, weights, the path of these and a callback."""
    from lrfdyn.training.run import evaluate_weights  # imports here take a second

    auto = args.exit == "auto"
    require(auto or args.exit_loss is None, "exit-loss: only with --exit auto")
    require(args.exit is not None or args.plot is None, "plot: only with --exit")
    if args.exit is None:
        return evaluate_weights
    from lrfdyn.analysis.measure.exits import evaluate_exits
    from lrfdyn.analysis.report.plots import check_plot

    own = not auto or "data.held_out" not in given_keys(args)
    require(own, "data.held_out: --exit auto needs images that the run itself has held out, and takes no others")
    points = 0.2 if args.exit_loss is None else args.exit_loss
    require(0 <= points < math.inf, f"exit-loss: expected a number >= 0, got {points}")
    if args.plot is not None:
        check_plot(args.plot)
    return partial(evaluate_exits, threshold=None if auto else threshold(args.exit), points=points)


def threshold(text: str) -> float:
    with suppress(ValueError):
        if 0 <= float(text) <= 1:
            return float(text)
    raise LrfdynError(f"exit: expected a number from 0 to 1 or auto, got {text!r}")


def print_exits(result: dict[str, Any]) -> None:
    """A table of thresholds, one of the time steps at the threshold of the test, and how this was chosen."""
    console, threshold, count = plain_console(), result["exit"], result["images"]
    where = "held-out training images" if "held_out" in result else "test images"
    print(f"{result['source']}: {count:,} {where}\n")
    table = make_table("", ">threshold", ">top-1 %", ">mean steps")
    for row in result["curve"]:
        cells = f"{row['threshold']:g}", f"{row['top1']:.2f}", f"{row['mean_steps']:.3f}"
        table.add_row(">" if row["threshold"] == threshold else "", *cells)
    console.print(table)
    (at,) = (row for row in result["curve"] if row["threshold"] == threshold)
    print(f"\nAt {threshold:g}, of {count:,}:\n")
    table = make_table("step", ">stop here", ">right, %", ">if all stop here, %")
    for step, (left, right, fixed) in enumerate(zip(at["exits"], at["right"], result["steps"], strict=True), 1):
        table.add_row(str(step), f"{left:,}", f"{100 * right / left:.2f}" if left else "-", f"{fixed['top1']:.2f}")
    console.print(table)
    if "chosen_on" in result:
        loss, held = result["chosen_on"]["points"], result["chosen_on"]["images"]
        words = f"of those tried, the smallest that loses at most {loss:g} points on {held:,} held-out training images"
        print(f"\n{threshold:g} is, {words}.")
    elif "held_out" not in result:
        print("\nA threshold that is picked from this table is picked on test images; --exit auto takes others.")


def load(args: argparse.Namespace) -> tuple[TrainConfig, dict[str, Any], str]:
    """Configuration, tensors by name, and the file that they are from."""
    given, changed = Path(args.source), given_keys(args)
    if (not given.exists() and zoo_entry(args.source) is None) or given.suffix in ENDINGS:
        known = args.weights or args.source.lower() in map(str.lower, list_recipes()) or given.suffix in ENDINGS
        require(
            bool(known), f"source: no such file or folder, and no recipe of that name: {given}{zoo_hint(args.source)}"
        )
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
