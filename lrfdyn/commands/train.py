"""Train a model from a recipe.

Every key of the recipe is an option (--schedule.epochs 10). A run that was interrupted goes on with --resume auto.
Under torchrun or accelerate launch the same command uses all processes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from lrfdyn.commands.arguments import add_keys, command_line, given_keys
from lrfdyn.commands.bar import bars
from lrfdyn.commands.recipes import print_recipes
from lrfdyn.training.config import TrainConfig
from lrfdyn.training.logs import Reporter
from lrfdyn.training.recipes import dump_yaml, load_recipe, run_name
from lrfdyn.training.tasks import describe_results, shown_results

if TYPE_CHECKING:
    from lrfdyn.training.trainer import Trainer

MEGA = 2**20


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


def run(arguments: argparse.Namespace) -> int:
    if arguments.recipe is None:
        print_recipes()
        return 0
    changed = given_keys(arguments)
    config = load_recipe(arguments.recipe, changed, arguments.epochs)
    if arguments.dry_run:
        dry_run(config, arguments)
        return 0
    from lrfdyn.training.processes import Stop, Stopped, leave_together
    from lrfdyn.training.run import run_training

    stop, code, name = Stop(arguments.minutes), 0, run_name(arguments.recipe, changed)
    out = arguments.out or Path("results") / "training" / name / f"seed{config.run.seed}"
    with Bar(Console(stderr=arguments.json)) as bar, stop.listening():
        try:
            summary = run_training(
                config,
                out,
                recipe=name,
                command=command_line(),
                resume=arguments.resume,
                restart=arguments.restart,
                reporter=bar,
                stop=stop,
            )
        except Stopped as stopped:
            summary, code = {}, stopped.code
            if bar.active:
                bar.say(str(stopped))
    if summary:  # the first process
        print_summary(summary, out, arguments.json)
    leave_together(code)
    return code


def print_summary(summary: dict[str, Any], out: Path, as_json: bool) -> None:
    if as_json:
        print(json.dumps(summary, indent=1))
    else:
        Console().print(summary_table(summary, out))


def dry_run(config: TrainConfig, arguments: argparse.Namespace) -> None:
    from lrfdyn.training.estimate import estimate

    facts = estimate(config, arguments.processes)
    if arguments.json:
        print(json.dumps({"recipe": config.as_dict(), **facts}, indent=1))
        return
    print(dump_yaml(config.as_dict()))
    memory, absent = facts.pop("memory"), facts.pop("images_not_counted", None)
    for key, value in facts.items():
        print(f"{key}: {value:,}" if isinstance(value, int) else f"{key}: {value}")
    if absent:
        print(f"(train_images: of the whole data set, not counted: {absent})")
    parts = ", ".join(f"{name} {size / MEGA:,.0f}" for name, size in memory.items())
    print(f"memory per process, estimated: {sum(memory.values()) / MEGA:,.0f} MiB ({parts})")
    print("(activations: what the plain operations keep; fused kernels on a GPU keep less)")


class Bar(Reporter):
    """Progress on the terminal, of the first process only."""

    def __init__(self, console: Console) -> None:
        self.progress = bars(console)
        self.active = False
        self.news, self.headline = "", ""

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: Any) -> None:
        if self.active:
            self.progress.stop()

    def start(self, trainer: Trainer) -> None:
        if not trainer.is_main:
            return
        self.active, self.headline = True, trainer.task.headline
        self.num_classes = trainer.source.num_classes
        self.progress.start()
        self.task = self.progress.add_task(
            "epoch 1", total=trainer.total_steps, completed=trainer.done, news=""
        )  # fmt: skip
        how = trainer.graph_obstacle
        step = "captured as a CUDA graph" if not how else f"step by step ({how})"
        self.say(
            f"{trainer.parameters:,} parameters, {trainer.processes} x {trainer.device.type}, "
            f"{trainer.total_steps:,} steps of {trainer.config.run.batch_size} images, {step}"
        )

    def step(self, trainer: Trainer) -> None:
        if not self.active:
            return
        epoch = (trainer.done - 1) // trainer.steps + 1
        self.progress.update(
            self.task,
            completed=trainer.done,
            description=f"epoch {epoch}",
            news=f"{trainer.speed:,.0f} images/s{self.news}",
        )

    def epoch(self, record: dict[str, Any]) -> None:
        if not self.active:
            return
        results = describe_results(record, self.num_classes)
        tested = f", {results}" if results else ""
        # The rest is on the line above it; with all of it, 80 columns would have no room for the time left.
        if self.headline in record:
            self.news = f", {describe_results({self.headline: record[self.headline]}, self.num_classes)}"
        self.say(f"epoch {record['epoch']}: loss {record['train_loss']:.4f}{tested}")
        self.progress.update(self.task, news=f"{record['images_per_s']:,.0f} images/s{self.news}")

    def say(self, message: str) -> None:
        self.progress.console.print(message, highlight=False, soft_wrap=True, markup=False)


def summary_table(summary: dict[str, Any], out: Path) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for key in ("recipe", "model", "attention", "token", "dilations", "epochs", "seed"):
        if summary[key] is not None:
            table.add_row(key, str(summary[key]))
    for name, text in shown_results(summary, summary["num_classes"]).items():
        table.add_row(name, text)
    table.add_row("parameters", f"{summary['parameters']:,}")
    table.add_row("images/s", f"{summary['images_per_s']:,.0f}")
    table.add_row("wall time", f"{summary['wall_s']:,.0f} s")
    table.add_row("run", str(out))
    return table
