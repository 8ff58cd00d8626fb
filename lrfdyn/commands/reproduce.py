"""Train a small Spikformer with every attention and write a report that compares them.

Trains on scikit-learn's digits with the recipe `digits`, measures accuracy, memory, firing, energy, speed and locality,
and writes results.json, the runs, report.html, tables and figures. What was interrupted goes on where it was.
"""

from __future__ import annotations

import argparse
import os
from contextlib import ExitStack
from pathlib import Path

import torch

from lrfdyn.analysis.analyze import sources_for
from lrfdyn.analysis.measure.observe import load_images
from lrfdyn.analysis.report.look import NEEDED
from lrfdyn.analysis.report.write import FORMATS, check_formats, has_matplotlib
from lrfdyn.attention import ATTENTIONS, attention_options
from lrfdyn.commands.analyze import analyze_with_bar, models_table, write_and_print
from lrfdyn.commands.shared import add_keys, comma_list, command_line, given_keys, integer_list, plain_console
from lrfdyn.commands.sweep import run_with_bars, sweep_table
from lrfdyn.errors import require
from lrfdyn.files import sole_user
from lrfdyn.sources import PAPER_ORDER
from lrfdyn.training.sweep import Sweep, SweepRun, plan_runs

NOTES = (
    "Digits are 8x8 images: the table shows that every attention trains and what it costs, not which one wins on "
    "natural images. Differences of less than a percent are within the spread of the seeds.",
    "Accuracy is that of the last epoch, never the best one.",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "lrfdyn reproduce [--option ...] [--section.key VALUE ...]"
    add = parser.add_argument
    add("--out", type=Path, default=Path("demo"), help="folder for runs, results and report")
    kinds = ",".join(PAPER_ORDER)
    add("--attentions", type=comma_list, default=kinds, metavar="A,B", help=f"of {', '.join(ATTENTIONS)}")
    add("--seeds", type=integer_list, default="0,1", metavar="N,M", help="one run each")
    add("--epochs", type=int, metavar="N", help="the whole schedule in N epochs; default that of the recipe")
    add("--together", type=int, default=os.cpu_count() or 1, metavar="N", help="runs at a time")
    figures = ",".join(FORMATS) if has_matplotlib() else "none"
    add("--figures", type=comma_list, default=figures, metavar="A,B", help="formats, or none")
    add("--restart", action="store_true", help="discard what the folder holds of an earlier run")
    add_keys(parser)


def run(args: argparse.Namespace) -> int:
    formats = check_formats(args.figures)
    console, number = plain_console(100), len(args.attentions) * len(args.seeds)
    console.print(f"{number} runs on scikit-learn's digits, {args.together} at a time; {args.out}/report.html is next")
    sweep = Sweep(plan(args), args.out, together=args.together, threads=1, command=command_line())
    with ExitStack() as stack:
        stack.enter_context(sole_user(args.out))  # not for the trainings alone: the report is of their files
        rows = run_with_bars(sweep, console, args.restart)
        console.print(sweep_table(rows))
        if sweep.failed:
            return 1
        stack.enter_context(sole_user(*map(sweep.folder, sweep.runs)))
        # As the trainings: such small layers gain little from a second thread, and on a busy machine threads that wait
        # for each other take ten times as long.
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        images = load_images("digits", None, count=360, batch_size=64, device=torch.device("cpu"))  # all test images
        sources = [source for each in sweep.runs for source in sources_for(str(sweep.folder(each)), images)]
        results = analyze_with_bar(sources, images, console, maps=["2"], title="Spikformer on digits", notes=NOTES)
        lines = [] if has_matplotlib() else [f"figures: {NEEDED}"]
        write_and_print(results, args.out, formats, console, models_table(results), lines)
    return 0


def plan(args: argparse.Namespace) -> list[SweepRun]:
    """The recipe of the digits with every attention and seed; an error for what cannot be trained."""
    from lrfdyn.training.estimate import estimate  # its imports take a second

    for name, values in (("attentions", args.attentions), ("seeds", args.seeds)):
        require(len(values) > 0, f"{name}: expected at least one")
        require(len({*values}) == len(values), f"{name}: expected different ones, got {values}")
    for kind in args.attentions:
        attention_options(kind)
    entries = [{"recipe": "digits", "attention": kind} for kind in args.attentions]
    sweep = {"seeds": args.seeds, "epochs": args.epochs, "runs": entries}
    runs = plan_runs(sweep, given_keys(args), "reproduce")
    estimate(runs[0].config, memory=False)
    return runs
