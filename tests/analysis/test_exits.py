"""Stopping when sure: counts against a loop, several processes, event frames, models that cannot, the command."""

from __future__ import annotations

import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from lrfdyn.analysis import choose_exit, exit_curve
from lrfdyn.analysis.measure.exits import THRESHOLDS, check_steps, measure_exits
from lrfdyn.cli import main
from lrfdyn.data import Batch
from lrfdyn.errors import LrfdynError
from lrfdyn.models import Spikformer
from lrfdyn.training.tasks import TestRun
from tests.models.host_checks import lively, small_model
from tests.training.runs import write_recipe

CPU = torch.device("cpu")


def test_curve_equals_a_loop_over_images():
    torch.manual_seed(0)
    logits, labels = 2 * torch.randn(5, 40, 3), torch.randint(3, (40,))
    for row in exit_curve(logits, labels, (0.0, 0.4, 0.6, 0.9, 1.0)):
        steps, right = [], 0
        for image, label in zip(logits.unbind(1), labels, strict=True):
            for step in range(1, 6):
                scores = image[:step].double().mean(0).softmax(0)
                if scores.max() > row["threshold"] or step == 5:
                    break
            steps.append(step)
            right += int(scores.argmax() == label)
        assert row["top1"] == pytest.approx(100 * right / 40)
        assert row["mean_steps"] == pytest.approx(sum(steps) / 40)
        assert row["exits"] == [steps.count(step) for step in range(1, 6)]
        assert sum(row["right"]) == right


def test_ends_of_the_curve():
    """Nothing passes 1, not even a probability of 1, and everything passes 0."""
    logits = torch.tensor([[[1e6, 0.0]], [[0.0, 3e6]]])
    first, *_, last = exit_curve(logits, torch.tensor([0]))
    assert (first["mean_steps"], first["top1"]) == (1, 100)
    assert (last["mean_steps"], last["top1"]) == (2, 0)


def test_choice_is_the_smallest_threshold_that_is_good_enough():
    curve = [{"threshold": t, "top1": a} for t, a in ((0.0, 70.0), (0.5, 89.8), (0.7, 89.0), (0.9, 91.0), (1.0, 90.0))]
    assert [choose_exit(curve, points)["threshold"] for points in (0.0, 0.2, 20.0)] == [0.9, 0.5, 0.0]
    with pytest.raises(LrfdynError, match="points: expected a number >= 0"):
        choose_exit(curve, -1.0)


@pytest.mark.parametrize("shape", [(2, 4), (2, 3, 4), (2, 0, 4)])
def test_curve_needs_logits_of_every_step(shape):
    with pytest.raises(LrfdynError, match=r"logits: expected \[T, n, classes\] and labels \[n\]"):
        exit_curve(torch.zeros(shape), torch.zeros(0 if 0 in shape else 4, dtype=torch.long))


class Films:
    """A source of test batches with 10 films; the last batch is filled up."""

    def __init__(self, frames: torch.Tensor, labels: torch.Tensor) -> None:
        self.frames, self.labels = frames, labels

    def test_batches(self, *, batch_size, rank, world_size, device):
        slices = torch.arange(10).split(batch_size)
        for indices in [*slices, *[torch.arange(0)] * (-len(slices) % world_size)][rank::world_size]:
            room = batch_size - len(indices)
            frames = torch.nn.functional.pad(self.frames[:, indices], (0,) * 7 + (room,))
            yield Batch(frames, torch.nn.functional.pad(self.labels[indices], (0, room)), None, len(indices))


def measured(model, source, processes):
    """What each of so many processes gives; the last one has met all others."""
    sums, found = [], []
    for rank in range(processes):
        accelerator = SimpleNamespace(
            process_index=rank,
            num_processes=processes,
            device=CPU,
            autocast=nullcontext,
            reduce=lambda counts, how: sums.append(counts) or sum(sums),
        )
        found = measure_exits(model, TestRun(source, 3, accelerator, torch.float64), THRESHOLDS)
    return found


def test_event_frames_and_several_processes():
    torch.manual_seed(0)
    source = Films(torch.randn(4, 10, 2, 32, 32, dtype=torch.float64), torch.randint(3, (10,)))
    model = lively(small_model("spikformer_dvs", num_classes=3).double(), source.frames)
    whole = measured(model, source, 1)
    assert whole["images"] == 10
    assert [sum(row["exits"]) for row in whole["curve"]] == [10] * len(THRESHOLDS)
    assert [row["mean_steps"] for row in whole["steps"]] == [1, 2, 3, 4]
    with torch.no_grad():
        right = model.eval()(source.frames[:3]).argmax(1) == source.labels
    assert whole["steps"][2]["top1"] == pytest.approx(100 * float(right.double().mean()))
    assert measured(model, source, 3) == whole


class Foreseeing(Spikformer):
    """Its features of a step are the mean over all steps."""

    def forward_stages(self, x, only_last=False):
        return [y.mean(0, keepdim=True).expand_as(y) for y in super().forward_stages(x, only_last)]


def test_models_that_cannot_stop_are_refused():
    torch.manual_seed(0)
    images = torch.randn(2, 3, 16, 16)
    model = lively(small_model("spikformer_cifar"), images)
    with torch.no_grad():
        check_steps(model, images)
        check_steps(model, images.expand(3, -1, -1, -1, -1))
        with pytest.raises(LrfdynError, match="exit: in Foreseeing a time step depends on later ones"):
            check_steps(lively(Foreseeing(**model.config), images), images)
        model.time_steps = 1
        with pytest.raises(LrfdynError, match="exit: Spikformer has one time step here"):
            check_steps(model, images)
        legacy = small_model("qkformer_cifar", legacy_neuron_axis=True).eval()
        with pytest.raises(LrfdynError, match="exit: with legacy_neuron_axis=True"):
            check_steps(legacy, torch.rand(1, 3, 32, 32))
        model.head_input = lambda x: x.mean((3, 4))
        with pytest.raises(LrfdynError, match="exit: head_input of Spikformer has no each_step"):
            check_steps(model, images)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a recipe that holds out no images, and a run of it that did."""
    folder = tmp_path_factory.mktemp("exits")
    schedule = {"epochs": 1, "warmup_epochs": 0, "mix_epochs": 0}
    recipe = write_recipe(folder / "tiny.yaml", model={"time_steps": 2}, schedule=schedule)
    assert main(["train", str(recipe), "--out", str(folder / "held"), "--data.held_out", "100"]) == 0
    return folder


def evaluated(capsys, *arguments):
    capsys.readouterr()
    assert main(["evaluate", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_threshold_is_chosen_on_held_out_images(runs, capsys):
    held = runs / "held"
    found = json.loads(evaluated(capsys, held, "--exit", "auto", "--exit-loss", "1.5", "--json"))
    plain = json.loads(evaluated(capsys, held, "--data.held_out", "null", "--json"))
    assert (found["images"], found["chosen_on"]["images"], found["chosen_on"]["held_out"]) == (360, 100, 100)
    assert "held_out" not in found
    assert found["all_steps_top1"] == plain["top1"]
    curve = found["chosen_on"]["curve"]
    assert (
        found["exit"]
        == choose_exit(curve, 1.5)["threshold"]
        == min(row["threshold"] for row in curve if row["top1"] >= curve[-1]["top1"] - 1.5)
    )
    (row,) = (row for row in found["curve"] if row["threshold"] == found["exit"])
    assert (found["top1"], found["mean_steps"]) == (row["top1"], row["mean_steps"])
    assert "points on 100 held-out training images" in evaluated(capsys, held, "--exit", "auto")
    own = json.loads(evaluated(capsys, held, "--exit", "0.33", "--json"))
    assert (own["images"], own["held_out"], own["exit"]) == (100, 100, 0.33)
    assert own["curve"][-1] == curve[-1]


def test_table_marks_the_threshold_and_the_figure_is_drawn(runs, capsys):
    pytest.importorskip("matplotlib")
    for ending, start in ((".svg", b"<?xml"), (".png", b"\x89PNG")):
        out = evaluated(capsys, runs / "held", "--exit", "0.9", "--plot", runs / f"exits{ending}")
        assert (runs / f"exits{ending}").read_bytes().startswith(start)
    (marked,) = (line for line in out.splitlines() if line.startswith(">"))
    assert marked.split()[1] == "0.9"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "tiny.yaml --weights held --exit auto",
            "exit: auto needs a run that held out images; train with",
        ),
        ("held --exit auto --data.held_out 100", "data.held_out: --exit auto needs images that the run itself has"),
        ("held --exit 1.5", "exit: expected a number from 0 to 1 or auto, got '1.5'"),
        ("held --exit nan", "exit: expected a number from 0 to 1 or auto, got 'nan'"),
        ("held --exit sure", "exit: expected a number from 0 to 1 or auto, got 'sure'"),
        ("held --exit 0.9 --exit-loss 1", "exit-loss: only with --exit auto"),
        ("held --exit auto --exit-loss -1", "exit-loss: expected a number >= 0, got -1.0"),
        ("held --plot a.svg", "plot: only with --exit"),
        ("held --exit 0.9 --plot a.unknown", "plot: expected a name that ends in one of"),
        ("held --exit 0.9 --model.time_steps 1", "exit: Spikformer has one time step here"),
        ("ade20k_sdt_v3 --weights held --exit 0.9", "exit: is for classification, and the task of ade20k is segment"),
    ],
)
def test_what_is_refused(runs, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(runs)
    assert main(["evaluate", *arguments.split()]) == 2
    assert message in capsys.readouterr().err
