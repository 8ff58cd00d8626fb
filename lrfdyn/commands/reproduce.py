"""Train a small Spikformer with every attention and write a report that compares them.

Trains on scikit-learn's digits, measures accuracy, memory, firing, energy, speed and locality, and writes results.json,
the weights, report.html, tables and figures. A run that was interrupted goes on where it was.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from lrfdyn.analysis.report.style import NEEDED
from lrfdyn.analysis.report.write import FORMATS, check_formats, has_matplotlib, write_all
from lrfdyn.attention import ATTENTIONS, attention_label
from lrfdyn.errors import LrfdynError, require
from lrfdyn.reproduce import Settings, claim_folder, reproduce
from lrfdyn.training.engine import Recipe

SETTINGS = Settings()


def comma_list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def integer_list(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in comma_list(text))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    recipe = SETTINGS.recipe
    add = parser.add_argument
    add("--out", type=Path, default=Path("demo"), help="folder for results, weights and report")
    add(
        "--attentions",
        type=comma_list,
        default=",".join(SETTINGS.attentions),
        metavar="A,B",
        help=f"of {', '.join(ATTENTIONS)}",
    )
    add("--seeds", type=integer_list, default=",".join(map(str, SETTINGS.seeds)), metavar="N,M", help="one run each")
    add("--epochs", type=int, default=recipe.epochs, help="passes over the training images")
    add("--batch-size", type=int, default=recipe.batch_size, help="images per step")
    add("--learning-rate", type=float, default=recipe.learning_rate, help="highest rate of the schedule")
    add("--dim", type=int, default=SETTINGS.dim, help="width of the model")
    add("--depth", type=int, default=SETTINGS.depth, help="number of blocks")
    add("--heads", type=int, default=SETTINGS.heads, help="attention heads")
    add("--time-steps", type=int, default=SETTINGS.time_steps, help="time steps T")
    add("--workers", type=int, default=os.cpu_count() or 1, help="trainings side by side")
    figures = ",".join(FORMATS) if has_matplotlib() else "none"
    add("--figures", type=comma_list, default=figures, metavar="A,B", help="formats, or none")
    add("--restart", action="store_true", help="discard what the folder holds of an earlier run")


def run(arguments: argparse.Namespace) -> None:
    settings = Settings(
        attentions=arguments.attentions,
        seeds=arguments.seeds,
        dim=arguments.dim,
        depth=arguments.depth,
        heads=arguments.heads,
        time_steps=arguments.time_steps,
        recipe=Recipe(epochs=arguments.epochs, batch_size=arguments.batch_size, learning_rate=arguments.learning_rate),
    )
    formats = check_formats(arguments.figures)
    require(arguments.workers >= 1, f"workers: expected an integer >= 1, got {arguments.workers}")
    claim_folder(arguments.out, settings, arguments.restart)
    console = Console()
    columns = (
        TextColumn("{task.description:<22}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[news]:<28}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    try:
        with Progress(*columns, console=console) as progress:
            tasks: dict[Any, Any] = {
                (kind, seed): progress.add_task(
                    f"{attention_label(kind)}, seed {seed}", total=arguments.epochs, news=""
                )
                for kind in settings.attentions
                for seed in settings.seeds
            }
            measuring = progress.add_task("measuring", total=len(settings.attentions), news="")

            def on_epoch(kind: str, seed: int, record: dict[str, Any]) -> None:
                news = f"loss {record['train_loss']:.3f}  test {record['test_accuracy']:.1%}"
                progress.update(tasks[kind, seed], completed=record["epoch"], news=news)

            def on_measure(kind: str) -> None:
                progress.update(measuring, advance=1, news=attention_label(kind))

            results = reproduce(
                arguments.out,
                settings,
                workers=arguments.workers,
                command=shlex.join(["lrfdyn", *sys.argv[1:]]),
                on_epoch=on_epoch,
                on_measure=on_measure,
            )
    except KeyboardInterrupt:
        console.print(f"Stopped. The same command goes on from here; finished epochs are in {arguments.out}.")
        raise
    except OSError as error:
        raise LrfdynError(f"out: cannot write in {arguments.out} ({error.strerror})") from None
    written = write_all(results, arguments.out, formats)
    console.print(results_table(results), state_table(results))
    if not has_matplotlib():
        console.print(f"figures: {NEEDED}", highlight=False, markup=False)
    console.print(f"Report: {arguments.out / 'report.html'}   {written}", highlight=False, soft_wrap=True)


def results_table(results: dict[str, Any]) -> Table:
    table = Table(
        title=f"{results['title']}, {len(results['runs'])} runs", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0)
    )
    table.add_column("attention", no_wrap=True)
    for name in ("accuracy", "parameters", "state KiB", "peak KiB", "firing", "µJ", "images/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in results["attentions"].values():
        table.add_row(
            row["label"],
            f"{row['accuracy_mean']:.1%} ± {row['accuracy_spread']:.1%}",
            f"{row['parameters']:,}",
            f"{row['state_bytes'] / 1024:,.1f}",
            f"{row['peak_inference_bytes'] / 1024:,.0f}",
            f"{row['firing_rate']:.1%}",
            f"{row['energy']['energy_pj'] / 1e6:.2f}",
            f"{row['images_per_second']:,.0f}",
        )
    return table


def state_table(results: dict[str, Any]) -> Table:
    title = "state = what one attention layer must hold, derived"
    table = Table("attention", "term", "formula", title=title, box=box.SIMPLE_HEAD)
    table.add_column("KiB", justify="right")
    for row in results["attentions"].values():
        for i, term in enumerate(row["state_terms"]):
            label = row["label"] if i == 0 else ""
            table.add_row(label, term["name"], term["formula"], f"{term['bytes'] / 1024:,.1f}")
    return table
