"""Train a model from a recipe.

Every key of the recipe is an option (--schedule.epochs 10). A run that was interrupted goes on with --resume auto.
Under torchrun or accelerate launch the same command uses all processes.
"""

from __future__ import annotations

import argparse
import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from lrfdyn.commands.recipes import print_recipes
from lrfdyn.commands.shared import MIB, add_keys, bars, command_line, given_keys, plain_console, print_json
from lrfdyn.io.hub import SIZES
from lrfdyn.training.config import ATTENTION_KEYS, TrainConfig
from lrfdyn.training.logs import Reporter
from lrfdyn.training.processes import Stop, Stopped, choose_threads, leave_together
from lrfdyn.training.recipes import dump_yaml, load_recipe, run_name
from lrfdyn.training.tasks import describe_results, shown_results

if TYPE_CHECKING:
    from lrfdyn.training.trainer import Trainer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "lrfdyn train [RECIPE] [--option ...] [--section.key VALUE ...]"
    add = parser.add_argument
    add("recipe", nargs="?", help="the name of a recipe, or the path of a .yaml file; none lists the recipes")
    add("--out", type=Path, help="folder of the run; default results/training/RECIPE/seedN")
    add("--epochs", type=int, metavar="N", help="the whole schedule in N epochs, every part of it in proportion")
    add("--resume", default="no", metavar="auto|no|FILE", help="go on from the newest checkpoint, or from this one")
    add("--restart", action="store_true", help="discard what the folder holds of an earlier run")
    add("--minutes", type=float, metavar="X", help="stop after so long, with a checkpoint to go on from")
    add("--dry-run", action="store_true", help="print the resolved recipe and what it takes, and stop")
    add("--processes", type=int, default=1, help="of the dry run")
    add("--json", action="store_true", help="print the dry run or the summary as JSON")
    add_keys(parser)


def run(args: argparse.Namespace) -> int:
    if args.recipe is None:
        print_recipes()
        return 0
    changed = given_keys(args)
    config = load_recipe(args.recipe, changed, args.epochs)
    if args.dry_run:
        dry_run(config, args)
        return 0
    from lrfdyn.training.run import run_training

    stop, code, name = Stop(args.minutes), 0, run_name(args.recipe, changed)
    out = args.out or Path("results") / "training" / name / f"seed{config.run.seed}"
    how: dict[str, Any] = {"recipe": name, "command": command_line(), "resume": args.resume, "restart": args.restart}
    with Bar(plain_console(stderr=args.json)) as bar, stop.listening():
        try:
            summary = run_training(config, out, **how, reporter=bar, stop=stop)
        except Stopped as stopped:
            summary, code = {}, stopped.code
            bar.say(str(stopped))
    if summary and args.json:  # of the first process
        print_json(summary)
    elif summary:
        print_summary(summary, out)
    leave_together(code)
    return code


def dry_run(config: TrainConfig, args: argparse.Namespace) -> None:
    from lrfdyn.training.estimate import estimate

    facts = estimate(config, args.processes)
    if args.json:
        print_json({"recipe": config.as_dict(), **facts})
        return
    print(dump_yaml(config.as_dict()))
    memory, absent = facts.pop("memory"), facts.pop("images_not_counted", None)
    for key, value in facts.items():
        print(f"{key}: {value:,}" if isinstance(value, int) else f"{key}: {value}")
    if absent:
        print(f"(images and classes: of the whole data set, not counted: {absent})")
    parts = ", ".join(f"{name} {size / MIB:,.0f}" for name, size in memory.items())
    print(f"memory per process, estimated: {sum(memory.values()) / MIB:,.0f} MiB ({parts})")
    print("(activations: what the plain operations keep; fused kernels on a GPU keep less)")


class Bar(Reporter, AbstractContextManager["Bar"]):
    """Progress on the terminal, of the first process only."""

    def __init__(self, console: Console) -> None:
        self.progress, self.news, self.threads = bars(console), "", torch.get_num_threads()

    def __exit__(self, *_: object) -> None:
        torch.set_num_threads(self.threads)
        if self.progress.live.is_started:
            self.progress.stop()

    def start(self, trainer: Trainer) -> None:
        self.headline, self.num_classes = trainer.task.headline, trainer.source.num_classes
        self.task = self.progress.add_task("epoch 1", total=trainer.total_steps, completed=trainer.done, news="")
        self.progress.console.quiet = not trainer.is_main
        if trainer.is_main:
            self.progress.start()
        if trainer.device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(trainer.threads or choose_threads(trainer.parameters))
            self.say(f"{torch.get_num_threads()} of {self.threads} threads (the variable OMP_NUM_THREADS sets others)")
        obstacle = trainer.graph_obstacle
        how = f"step by step ({obstacle})" if obstacle else "captured as a CUDA graph"
        steps = f"{trainer.total_steps:,} steps of {trainer.config.run.batch_size} images, {how}"
        self.say(f"{trainer.parameters:,} parameters, {trainer.processes} x {trainer.device.type}, {steps}")

    def step(self, trainer: Trainer) -> None:
        news = f"{trainer.speed:,.0f} images/s{self.news}"
        self.progress.update(self.task, completed=trainer.done, description=f"epoch {trainer.epoch}", news=news)

    def epoch(self, record: dict[str, Any]) -> None:
        results = describe_results(record, self.num_classes)
        tested = f", {results}" if results else ""
        # The rest is on the line above it; with all of it, 80 columns would have no room for the time left.
        if self.headline in record:
            self.news = f", {describe_results({self.headline: record[self.headline]}, self.num_classes)}"
        steps = f" (T = {record['time_steps']})" if "time_steps" in record else ""
        self.say(f"epoch {record['epoch']}{steps}: loss {record['train_loss']:.4f}{tested}")
        self.progress.update(self.task, news=f"{record['images_per_s']:,.0f} images/s{self.news}")

    def say(self, message: str) -> None:
        self.progress.console.print(message, soft_wrap=True)


def print_summary(summary: dict[str, Any], out: Path) -> None:
    keys = ("recipe", "model", *SIZES, *ATTENTION_KEYS, "epochs", "seed")
    rows = {key: summary[key] for key in keys if summary.get(key) is not None}
    rows |= shown_results(summary, summary["num_classes"])
    rows |= {"parameters": f"{summary['parameters']:,}", "images/s": f"{summary['images_per_s']:,.0f}"}
    for key, value in {**rows, "wall time": f"{summary['wall_s']:,.0f} s", "run": out}.items():
        print(f"{key:<14} {value}")
