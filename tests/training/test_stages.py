"""Stages of a run: first epochs with fewer time steps, another tau, batch or image size."""

from __future__ import annotations

import dataclasses
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from lrfdyn.errors import LrfdynError
from lrfdyn.files import read_json, read_json_lines
from lrfdyn.io.weights import read_checkpoint
from lrfdyn.nn.neurons import LIF
from lrfdyn.training.config import ModelConfig
from lrfdyn.training.estimate import estimate
from lrfdyn.training.logs import Reporter
from lrfdyn.training.optim import MovingAverage
from lrfdyn.training.stages import plan_stages, stage_at
from lrfdyn.training.step import TrainStep
from lrfdyn.training.sweep import plan_runs
from lrfdyn.training.trainer import Trainer
from tests.training.runs import Killer, assert_same_end, in_child, tiny, train

FIRST = {"epochs": 2, "time_steps": 1, "tau": 1.5, "batch_size": 512, "image_size": 6, "mix_probability": 0.5}
STAGED: dict[str, Any] = {
    "model": {"time_steps": 2, "options": {"depth": 1}},
    "optimizer": {"name": "muon", "momentum": 0.95, "muon_rate": 0.01},
    "schedule": {"epochs": 3, "warmup_epochs": 0, "mix_epochs": None, "stages": [FIRST],
                 "rates": [[0, 0.1], [1, 1], [3, 0]]},
    "run": {"batch_size": 256, "checkpoint_steps": 3},
}  # fmt: skip
BORDER, STEPS = 4, 9  # two epochs of 2 steps, and one of 5
PLAIN: dict[str, Any] = {"optimizer": {"ema_decay": None}, "run": {"batch_size": 512}}


class Watch(Reporter):
    """What the model is at every step, what it gets, and where its tensors are."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, float, float]] = []
        self.shapes: list[tuple[int, ...]] = []
        self.counts: list[int] = []
        self.train_steps: list[TrainStep] = []
        self.places: list[list[int]] = []

    def step(self, trainer: Any) -> None:
        (tau,) = {round(1 / neuron.dynamics.gain, 6) for neuron in trainer.model.modules() if isinstance(neuron, LIF)}
        self.seen.append((trainer.model.time_steps, tau, trainer.source.augment.mix_probability))
        self.train_steps.append(trainer.train_step)
        held = [*trainer.model.parameters(), *trainer.model.buffers(), *trainer.average.values]
        held += [value for entries in trainer.raw_optimizer.state.values() for value in entries.values()]
        self.places.append([tensor.data_ptr() for tensor in held])


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Path, Watch]:
    watch, out, step, update = Watch(), tmp_path_factory.mktemp("whole"), TrainStep.__call__, MovingAverage.update

    def noted(self: TrainStep, *parts: Any) -> torch.Tensor:
        watch.shapes.append(tuple(parts[0][0].shape))
        return step(self, *parts)

    def counted(self: MovingAverage, count: int) -> None:
        watch.counts.append(count)
        update(self, count)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainStep, "__call__", noted)
        patch.setattr(MovingAverage, "update", counted)
        train(tiny(**STAGED), out, reporter=watch)
    return out, watch


def test_a_run_ends_with_the_model_s_own(whole):
    out, watch = whole
    behind = STEPS - BORDER
    assert watch.seen == [(1, 1.5, 0.5)] * BORDER + [(2, 2.0, 1.0)] * behind
    assert watch.shapes == [(512, 1, 6, 6)] * BORDER + [(256, 1, 8, 8)] * behind
    assert read_json(out / "summary.json", "out")["time_steps"] == 2
    assert read_checkpoint(out / "checkpoints" / f"step-{STEPS:09d}.safetensors")[1]["timed_images"] == (
        (BORDER - 1) * 512 + (behind - 1) * 256
    ), "the first step of each stage compiles"


def test_a_stage_has_a_step_of_its_own_around_the_same_tensors(whole):
    """A GPU captures it anew: with weights, moments and statistics in their places."""
    _, watch = whole
    first, *_, last = watch.train_steps
    assert watch.train_steps == [first] * BORDER + [last] * (STEPS - BORDER)
    assert first is not last
    assert all(place == watch.places[0] for place in watch.places)


def test_the_average_begins_anew_with_a_stage(whole):
    """Statistics of norms are others with other time steps: an average over both is that of no network."""
    _, watch = whole
    assert watch.counts == [*range(1, BORDER + 1), *range(1, STEPS - BORDER + 1)]


def test_the_log_says_the_time_steps_of_a_test(whole):
    log = read_json_lines(whole[0] / "log.jsonl")
    epochs, steps = ([record for record in log if record["kind"] == kind] for kind in ("epoch", "step"))
    tested = [(record["step"], record["time_steps"], "top1" in record) for record in epochs]
    assert tested == [(2, 1, True), (BORDER, 1, True), (STEPS, 2, True)]
    assert [record["epoch"] for record in steps] == [1] * 2 + [2] * 2 + [3] * 5
    rates = [record["learning_rate"] / 0.005 for record in steps]
    assert rates == pytest.approx([0.1, 0.55, 1.0, 0.75, *(0.5 * (1 - i / 5) for i in range(5))])
    assert 0 < epochs[-1]["train_s"] <= epochs[-1]["wall_s"]


@pytest.mark.parametrize(("step", "last"), [(BORDER, 3), (BORDER + 1, BORDER), (8, 6)])
def test_a_run_that_is_killed_goes_on_in_its_stage(step, last, whole, tmp_path):
    """From the middle of an epoch of either, and from the border."""
    assert in_child(lambda: train(tiny(**STAGED), tmp_path, reporter=Killer(step))) == signal.SIGKILL
    watch = Watch()
    train(tiny(**STAGED), tmp_path, resume="auto", reporter=watch)
    assert watch.seen == whole[1].seen[last:]
    assert_same_end(tmp_path, whole[0], STEPS)


def test_a_stage_that_changes_nothing_changes_nothing(tmp_path):
    """Bit for bit. (A moving average would begin anew.)"""
    for name, stages in (("plain", None), ("staged", [{"epochs": 1, "time_steps": 1}])):
        train(tiny(**PLAIN, schedule={"stages": stages}), tmp_path / name)
    ours, theirs = (
        read_checkpoint(tmp_path / name / "checkpoints" / "step-000000004.safetensors")[0]
        for name in ("staged", "plain")
    )
    assert ours.keys() == theirs.keys()
    assert all(value.equal(theirs[name]) for name, value in ours.items())
    records = [read_json_lines(tmp_path / name / "log.jsonl")[-1] for name in ("plain", "staged")]
    assert ["time_steps" in record for record in records] == [False, True]
    assert records[0]["top1"] == records[1]["top1"]


def test_a_checkpoint_of_version_0_2_goes_on(tmp_path):
    """It counted steps, and not images."""
    trainer = Trainer(tiny(**PLAIN), tmp_path)
    trainer.done, trainer.timed_images, trainer.train_seconds = 2, 1024, 1.0
    trainer.save()
    path = tmp_path / "checkpoints" / "step-000000002.safetensors"
    tensors, meta = read_checkpoint(path)
    del meta["timed_images"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lrfdyn.training.trainer.read_checkpoint", lambda _: (tensors, {**meta, "timed_steps": 2}))
        trainer.resume(path)
    assert trainer.speed == 1024


def test_where_a_step_is():
    stages = plan_stages(tiny(**STAGED), 1437, 1)
    described = [(stage.first_epoch, stage.first_step, stage.end, stage.steps) for stage in stages]
    assert described == [(0, 0, BORDER, 2), (2, BORDER, STEPS, 5)]
    places = [stage_at(stages, step).place(step) for step in (0, 1, 2, 3, 4, 8)]
    assert places == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 4)]
    facts = estimate(tiny(**STAGED), memory=False)
    assert (facts["steps"], facts["epochs"], facts["steps_per_epoch"]) == (STEPS, 3, 5)


@pytest.mark.parametrize(
    ("model", "stage", "message"),
    [
        ("", {"batch_size": 33}, r"schedule.stages: run.batch_size: mixup and cutmix pair .* multiple of 2, got 33"),
        ("", {"batch_size": 2000}, r"schedule.stages: run.batch_size: expected at most the 1437 training images"),
        ("", {"image_size": 1}, r"schedule.stages: image_size: spikformer_4_384 needs \d+ pixels a side, got 1"),
        ("ms_resnet34", {"tau": 1.5}, r"schedule.stages: tau: ms_resnet34 has no LIF neurons, got 1.5"),
    ],
    ids=["odd", "large", "small", "tau"],
)
def test_stages_that_cannot_be(model, stage, message):
    config = tiny(schedule={"stages": [{"epochs": 1, **stage}]})
    config = dataclasses.replace(config, model=ModelConfig(model)) if model else config
    with pytest.raises(LrfdynError, match=message):
        estimate(config, memory=False)


def test_stages_of_a_sweep_and_of_a_command_line():
    (run,) = plan_runs([{"recipe": "digits", "name": "fast", "schedule.stages": [{"epochs": 4, "time_steps": 1}]}])
    assert run.config.schedule.stages[0].time_steps == 1
    assert '[{"epochs": 4, "time_steps": 1}]' in run.command(Path("out"))
    (short,) = plan_runs([{"recipe": "digits", "name": "fast", "epochs": 4, "schedule.stages": "[{epochs: 4}]"}])
    assert short.config.schedule.stages[0].epochs == 3  # of 4, as 4 of 5
