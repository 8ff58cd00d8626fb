"""Train a list of recipes, seeds and overrides, some of them side by side, and compare them in one table.

FILE is YAML: a list of runs, or keys that all of them share and the list as `runs`. A run has a recipe, seeds, epochs,
a name, a teacher, and any key of the recipe (attention: lrf_dyn, model.options: {dim: 64}). The teacher is another run
of the list, NAME-seedN, which is trained first. Options --section.key are for all runs. Every run has its folder in
OUT/runs; sweep.json and table.csv hold the table. Started again, the same command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from lrfdyn.commands import shared
from lrfdyn.files import sole_user
from lrfdyn.training.sweep import Sweep, SweepReporter, SweepRun, group_rows, load_sweep
from lrfdyn.training.tasks import describe_results

NUMBERS = {"accuracy": ".2f", "best": ".2f", "parameters": ",.0f", "images_per_s": ",.0f", "wall_s": ",.0f"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "lrfdyn sweep FILE [--option ...] [--section.key VALUE ...]"
    add = parser.add_argument
    add("file", type=Path, help="the list of runs, a .yaml file")
    add("--out", type=Path, help="folder of the sweep; default results/sweeps/FILE")
    add("--together", type=int, default=1, metavar="N", help="runs at a time")
    add("--restart", action="store_true", help="discard what the folder holds of these runs")
    add("--keep", type=Path, metavar="FOLDER", help="copy summary, log and recipe of every run there, for the record")
    add("--dry-run", action="store_true", help="print the runs, and stop")
    add("--json", action="store_true", help="print the table as JSON")
    shared.add_keys(parser)


def run(args: argparse.Namespace) -> int:
    out, runs = args.out or Path("results") / "sweeps" / args.file.stem, load_sweep(args.file, shared.given_keys(args))
    sweep = Sweep(runs, out, together=args.together, command=shared.command_line())
    if args.dry_run:
        for each in sweep.runs:
            state = " (ended)" if sweep.summary(each) else ""
            print(f"{each.name}{state}: {shlex.join(['lrfdyn', *each.command(sweep.folder(each))])}")
        return 0
    with sole_user(out):
        rows = run_with_bars(sweep, shared.plain_console(stderr=args.json), args.restart, args.keep)
    if args.json:
        shared.print_json({"runs": rows, "groups": group_rows(rows)})
    else:
        shared.plain_console(100).print(sweep_table(rows))
    return 1 if sweep.failed else 0


def run_with_bars(sweep: Sweep, console: Console, restart: bool, keep: Path | None = None) -> list[dict[str, Any]]:
    """Makes the runs of a sweep with a bar for each, and returns the rows of its table."""
    try:
        with shared.bars(console) as shown:
            return sweep.run(Bars(sweep, shown), restart, keep)
    except KeyboardInterrupt:
        console.print(f"Stopped. The same command goes on from here; checkpoints are in {sweep.out}.")
        raise


class Bars(SweepReporter):
    """A bar of the epochs of all runs, with the time that is left, one for every run that is under way, and a line
    where a run ends."""

    def __init__(self, sweep: Sweep, shown: Progress) -> None:
        self.sweep, self.shown = sweep, shown
        self.tested: dict[str, str] = {}
        self.epochs = {run.name: run.config.schedule.total_epochs for run in sweep.runs}
        width, add = max(map(len, ("all runs", *self.epochs))), partial(shown.add_task, news="")
        self.all = add("all runs".ljust(width), total=sum(self.epochs.values()))
        hidden: dict[str, Any] = {"start": False, "visible": False}
        self.tasks = {name: add(name.ljust(width), total=total, **hidden) for name, total in self.epochs.items()}

    def begin(self, run: SweepRun) -> None:
        self.shown.start_task(self.tasks[run.name])
        self.shown.update(self.tasks[run.name], visible=True, news="starting")

    def stopping(self) -> None:
        self.shown.console.print("finishing the steps that are under way; press Ctrl-C again to stop now")

    def progress(self, run: SweepRun, record: Mapping[str, Any]) -> None:
        ended, done = record["kind"] == "epoch", float(record["epoch"])
        if ended:
            self.tested[run.name] = describe_results(dict(record), num_classes=0)
        elif "total_steps" in record:
            done = self.epochs[run.name] * record["step"] / record["total_steps"]
        loss = record["train_loss" if ended else "loss"]
        self._update(run, done, f"loss {shared.number(loss, '.3f')}  {self.tested.get(run.name, '')}")

    def _update(self, run: SweepRun, done: float, news: str) -> None:
        task = self.shown.tasks[self.tasks[run.name]]
        self.shown.update(self.all, advance=done - task.completed)
        self.shown.update(task.id, completed=done, news=news)

    def end(self, run: SweepRun, row: Mapping[str, Any]) -> None:
        task, text = self.shown.tasks[self.tasks[run.name]], f"failed, see {self.sweep.console(run)}"
        left = self.epochs[run.name] - task.completed
        if row["state"] != "failed":
            results = describe_results({row["measure"]: row["accuracy"]}, num_classes=0)
            text = f"{results}, {row['wall_s']:,.0f} s"
        if row["state"] == "failed" or not task.started:  # nothing to wait for
            self.shown.update(self.all, total=(self.shown.tasks[self.all].total or 0) - left)
        else:
            self._update(run, self.epochs[run.name], "")
        self.shown.update(task.id, visible=False)
        self.shown.console.print(f"{run.name}: {text}", soft_wrap=True)


def sweep_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The runs, and behind those of several seeds their mean and standard deviation."""
    columns = (">" + key.replace("_per_", "/").replace("_", " ") for key in NUMBERS)
    table = shared.make_table("run", "attention", "options", *columns)
    for group in group_rows(rows):
        for row in (row for row in rows if row["group"] == group["group"]):
            numbers = (shared.number(row[key], form) for key, form in NUMBERS.items())
            table.add_row(row["name"], row["attention"] or "", row["options"], *numbers)
        if group["accuracy_std"] is not None:
            mean = f"{group['accuracy_mean']:.2f} ± {group['accuracy_std']:.2f}"
            table.add_row(f"{group['group']}, mean of {group['runs']}", "", "", mean, style="bold")
    return table
