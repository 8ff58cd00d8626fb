"""Stopping when sure: an image leaves after the first time step at which the model's confidence passes a threshold.

The confidence of k steps is the largest probability, by softmax, of the mean of their logits, which is what the model
gives for k steps. The accuracy over the mean number of steps is measured for many thresholds in one pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lrfdyn.checks import checked
from lrfdyn.data import data_class
from lrfdyn.errors import require
from lrfdyn.models import SpikingModel
from lrfdyn.training.config import TrainConfig
from lrfdyn.training.run import prepare_test
from lrfdyn.training.tasks import TestRun

# No confidence passes 1: those images have all steps.
THRESHOLDS = (*(k / 20 for k in range(20)), 0.99, 0.999, 1.0)
Rows = list[dict[str, Any]]


def count_exits(logits: Tensor, labels: Tensor, thresholds: Sequence[float]) -> Tensor:
    """Of images with logits `[T, n, classes]` of every step, how many leave at each step, and how many of those are
    classified right: `[2, thresholds + T, T]`. The last T rows let all images leave at one step."""
    steps = len(logits)
    numbers = torch.arange(steps, device=logits.device)
    so_far = logits.double().cumsum(0) / (numbers + 1)[:, None, None]
    confidence, chosen = so_far.softmax(-1).max(-1)
    sure = confidence > torch.tensor(thresholds, dtype=torch.float64, device=logits.device)[:, None, None]
    sure[:, -1] = True
    leaves = torch.cat((sure.int().argmax(1), numbers[:, None].expand(steps, len(labels))))
    at_step = F.one_hot(leaves, steps)
    right = (chosen == labels).T
    return torch.stack((at_step.sum(1), (at_step * right).sum(1)))


def exit_rows(counts: Tensor, thresholds: Sequence[float]) -> tuple[Rows, Rows]:
    """The rows of a curve over the thresholds, and those of all images leaving at one step, from `count_exits`."""
    rows: Rows = []
    for left, right in counts.transpose(0, 1).tolist():
        images = sum(left)
        mean = sum(step * count for step, count in enumerate(left, 1)) / images
        rows.append({"top1": 100 * sum(right) / images, "mean_steps": mean, "exits": left, "right": right})
    curve = [{"threshold": threshold, **row} for threshold, row in zip(thresholds, rows, strict=False)]
    return curve, rows[len(thresholds) :]


@checked
def exit_curve(logits: Tensor, labels: Tensor, thresholds: Sequence[float] = THRESHOLDS) -> Rows:
    """Accuracy against mean steps, from the logits `[T, n, classes]` that `model.forward_steps(images)` gives of every
    step and the labels `[n]`.

    Returns for every threshold a dictionary with `threshold`, `top1` in percent, `mean_steps`, and for every step how
    many images leave behind it (`exits`) and how many of those are classified `right`.

        curve = exit_curve(model.eval().forward_steps(images), labels, thresholds=(0.5, 0.9))
    """
    fits = logits.dim() == 3 and labels.dim() == 1 and len(labels) == logits.shape[1] > 0
    shapes = f"{list(logits.shape)} and {list(labels.shape)}"
    require(fits, f"logits: expected [T, n, classes] and labels [n], got {shapes}")
    return exit_rows(count_exits(logits, labels, thresholds), thresholds)[0]


@checked
def choose_exit(curve: Rows, points: float) -> dict[str, Any]:
    """The row of an `exit_curve` with the smallest threshold whose accuracy is at most so many percentage `points`
    below that of its last row. The images of the curve should be ones that the model was not trained on, since it is
    surer of those, and others than those that its accuracy is reported on."""
    require(points >= 0, f"points: expected a number >= 0, got {points}")
    enough = curve[-1]["top1"] - points
    return next(row for row in curve if row["top1"] >= enough - 1e-9)


def check_steps(model: SpikingModel, images: Tensor) -> None:
    """An error where the first steps of a model are not what it gives for fewer steps."""
    name = type(model).__name__
    known = "each_step" in signature(model.head_input).parameters
    require(known, f"exit: head_input of {name} has no each_step: no logits of every time step")
    alone = not model.config.get("legacy_neuron_axis")
    require(alone, "exit: with legacy_neuron_axis=True an image needs those before it in the batch, and none can leave")
    frames = model.to_time_major(images[..., :1, :, :, :]).clone()
    require(len(frames) > 1, f"exit: {name} has one time step here, and can stop no earlier")
    before = model.forward_steps(frames)
    frames[-1] = 1 - frames[-1]
    same = torch.equal(model.forward_steps(frames)[:-1], before[:-1])
    require(same, f"exit: in {name} a time step depends on later ones, so that none can be left out")


@torch.no_grad()
def measure_exits(model: SpikingModel, run: TestRun, thresholds: Sequence[float]) -> dict[str, Any]:
    """What `exit_curve` gives (`curve`), over all test images and processes, and the same where all images leave at one
    step (`steps`)."""
    model.eval()
    total: Any = None
    for batch in run.batches():
        images = batch.images.to(run.dtype)
        with run.accelerator.autocast():
            if total is None:
                check_steps(model, images)
            logits = model.forward_steps(images)[:, : batch.count]
        finite = bool(logits.isfinite().all())
        require(finite, "weights: of no use: the logits of some test images are not finite")
        counts = count_exits(logits, batch.labels[: batch.count], thresholds)
        total = counts if total is None else total + counts
    counts = run.accelerator.reduce(total, "sum").cpu()
    count = int(counts[0, 0].sum())
    require(count > 0, "data: expected at least one test image that can be read")
    curve, steps = exit_rows(counts, thresholds)
    return {"images": count, "curve": curve, "steps": steps}


def evaluate_exits(
    config: TrainConfig,
    weights: Mapping[str, Tensor],
    name: Path,
    progress: Callable[[int, int], None],
    threshold: float | None,
    points: float,
) -> dict[str, Any]:
    """A test of weights that stops at a threshold, with the curve over others; the first arguments are those of
    `prepare_test`. Without a `threshold`, `choose_exit` takes one on the training images that the run has held out, and
    the test is on the test images."""
    data = config.data
    task = data_class(data.name).task
    require(task == "classification", f"exit: is for classification, and the task of {data.name} is {task}")
    thresholds, chosen, before = list(THRESHOLDS), {}, 0
    if threshold is None:
        require(data.held_out is not None, "exit: auto needs a run that held out images; train with --data.held_out N")
        model, run, _ = prepare_test(config, weights, name, progress)
        held = measure_exits(model, run, thresholds)
        threshold, before = choose_exit(held["curve"], points)["threshold"], held["images"]
        chosen = {"chosen_on": {"held_out": data.held_out, "points": points, **held}}
        config = dataclasses.replace(config, data=dataclasses.replace(data, held_out=None))
    elif threshold not in thresholds:
        thresholds = sorted([*thresholds, threshold])
    model, run, facts = prepare_test(config, weights, name, lambda n, total: progress(n, before + total))
    measured = measure_exits(model, run, thresholds)
    row = measured["curve"][thresholds.index(threshold)]
    shown = {"exit": threshold, "top1": row["top1"], "mean_steps": row["mean_steps"]}
    return {**facts, **shown, "all_steps_top1": measured["curve"][-1]["top1"], **measured, **chosen}
