"""The parts of results.md on time: how long runs trained, and when they passed the accuracy of the paper."""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter
from statistics import mean
from typing import Any

from docs.parts import read, table
from docs.parts.results import Run, finished, read_runs, several
from lrfdyn.paper import TABLE3

GOAL = TABLE3["LRF-Dyn"][-1]  # percent, of the paper's LRF-Dyn with three kernels


def time_to_accuracy(records: list[dict[str, Any]] | None = None) -> str:
    """Of each recipe, over its seeds: the accuracy after the last epoch, and how long it trained."""
    records = read("cifar100/time_to_accuracy.json") if records is None else records
    body = []
    same = itemgetter("recipe", "epochs", "device")
    for (recipe, epochs, device), lines in groupby(sorted(records, key=same), same):
        runs = list(lines)
        seeds, top1 = ", ".join(str(line["seed"]) for line in runs), several([line["top1"] for line in runs])
        seconds = mean(line["seconds"] for line in runs)
        teacher = mean(line.get("teacher_seconds", 0) for line in runs)
        body.append([f"`{recipe}`", seeds, top1, f"{seconds:,.1f}", f"{teacher:,.1f}", str(epochs), device])
    header = ["recipe", "seeds", "top-1 %", "training s", "of them the teacher's", "epochs", "device"]
    return table(header, body) if body else "Not measured yet."


def seconds_until(run: Run, record: dict[str, Any]) -> tuple[float, bool]:
    """Seconds of training at the end of an epoch, and whether they were measured. Older logs have the mean speed."""
    if "train_s" in record:
        return record["train_s"], True
    return record["step"] * run.recipe["run"]["batch_size"] / record["images_per_s"], False


def first_passed(runs: list[Run] | None = None) -> str:
    """Of each run that passed the paper's accuracy: the first test that did, and the seconds of training before it."""
    ended = finished(read_runs() if runs is None else runs)
    lines, missed = [], []
    for run, summary in ended:
        record = next((record for record in run.epochs if record.get("top1", 0) >= GOAL), None)
        if record is None:
            missed.append(max(run.tests.values()))
            continue
        seconds, measured = seconds_until(run, record)
        teacher = (summary.get("teacher") or {}).get("train_s", 0)
        shared = f"shared: {summary['beside']}" if summary.get("beside") else "alone"
        when, spent = f"{record['epoch']} of {run.length}", f"{'' if measured else 'about '}{seconds + teacher:,.0f}"
        cells = [when, f"{record['top1']:.2f}", spent, f"{teacher:,.0f}", f"{summary['top1']:.2f}", shared]
        lines.append((seconds + teacher, [f"[{run.name}](../results/cifar100/{run.name}/log.jsonl)", *cells]))
    header = ["run", "first at epoch", "top-1 % there", "training s", "of them the teacher's", "last epoch %", "GPU"]
    shown = table(header, [cells for _, cells in sorted(lines)]) if lines else "No run has passed it yet."
    others, whose = ("run", "its") if len(missed) == 1 else (f"{len(missed)} runs", "their")
    line = f"The other {others} never did; the highest of {whose} tests is {max(missed, default=0):.2f} %."
    return f"{shown}\n\n{line}" if missed else shown


PARTS = {"cifar100_time": time_to_accuracy, "cifar100_first_passed": first_passed}
