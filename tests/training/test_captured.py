"""The trainer with the step that a GPU captures, here without a graph: results, resumption, checkpoints and times."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from lrfdyn.files import read_json_lines
from lrfdyn.io.weights import list_checkpoints
from lrfdyn.training import checkpoint
from lrfdyn.training.config import OptimizerConfig
from lrfdyn.training.logs import Reporter
from lrfdyn.training.optim import MovingAverage, build_optimizer
from lrfdyn.training.recipes import merge
from lrfdyn.training.trainer import Trainer
from tests.training.runs import final_state, tiny, train

OPTIMIZERS = {name: {"name": name} for name in ("adamw", "lamb", "muon", "sgd")} | {
    "sgd-plain": {"name": "sgd", "momentum": 0.0}
}


@pytest.fixture
def capturing(monkeypatch):
    monkeypatch.setattr("lrfdyn.training.trainer.capture_obstacle", lambda *_, **__: "")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_same_training_and_exact_resumption(name, tmp_path, monkeypatch):
    # Without the random numbers of stochastic depth and in float64, so that only the algebra can differ.
    run = {"precision": "fp64", "batch_size": 256, "checkpoint_steps": 3}
    config = tiny(optimizer=OPTIMIZERS[name], run=run, model={"drop_path": 0.0})
    train(config, tmp_path / "plain")
    monkeypatch.setattr("lrfdyn.training.trainer.capture_obstacle", lambda *_, **__: "")
    train(config, tmp_path / "whole")
    tensors, _, log = final_state(tmp_path / "whole")
    plain, _, plain_log = final_state(tmp_path / "plain")
    assert tensors.keys() == plain.keys()
    # Spikes turn rounding into jumps, so only the first losses must agree to many digits.
    for ours, theirs in zip(log[:5], plain_log[:5], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
        assert ours["learning_rate"] == theirs["learning_rate"]
    # From the middle of an epoch, as after an interruption.
    middle = tmp_path / "middle"
    with pytest.raises(InterruptedError):
        train(config, middle, reporter=Stop(8))
    train(config, middle, resume="auto")
    resumed, meta, resumed_log = final_state(middle)
    assert meta["step"] == 10  # 2 epochs of 1,437 images in batches of 256
    assert all(value.equal(tensors[key]) for key, value in resumed.items())
    assert resumed_log == log


def held(model: Any, optimizer: Any, average: Any) -> list[torch.Tensor]:
    """All tensors that a captured step, and the moving average behind it, read and write."""
    moments = [value for entries in optimizer.state.values() for value in entries.values() if value is not None]
    rates = [group["lr"] for group in optimizer.param_groups]
    return [*model.parameters(), *model.buffers(), *average.values, *moments, *rates]


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_values_come_back_into_the_tensors_that_are_there(name, steps):
    """Whether or not some steps, or a capture, came before. Fused optimisers also walk weights, gradients and moments
    side by side in memory, so that all have one layout."""

    def build():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4)).to(
            memory_format=torch.channels_last
        )
        config = OptimizerConfig(**OPTIMIZERS[name], learning_rate=0.1)
        return model, build_optimizer(model, config, 0.1, capturable=True), MovingAverage(model, 0.9)

    def step(model, optimizer, average, seed):
        optimizer.zero_grad()
        images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
        model(images.to(memory_format=torch.channels_last)).square().mean().backward()
        optimizer.step()
        average.update(100)

    ours, theirs = build(), build()
    for seed in range(3):
        step(*ours, seed)
    for seed in range(10, 10 + steps):
        step(*theirs, seed)
    before = [tensor.data_ptr() for tensor in held(*theirs)] if steps else []
    rates = [group["lr"] for group in theirs[1].param_groups]
    tensors = {k: v.contiguous() for k, v in checkpoint.training_tensors(*ours).items()}
    checkpoint.restore_training(tensors, *theirs)
    assert not steps or [tensor.data_ptr() for tensor in held(*theirs)] == before
    assert all(group["lr"] is rate for group, rate in zip(theirs[1].param_groups, rates, strict=True))
    for seed in range(3, 6):
        step(*ours, seed)
        step(*theirs, seed)
    for a, b in zip(held(*ours), held(*theirs), strict=True):
        assert a.stride() == b.stride()
        assert torch.equal(a, b)


class Stop(Reporter):
    def __init__(self, step: int) -> None:
        self.at = step

    def step(self, trainer):
        if trainer.done == self.at:
            raise InterruptedError


class OnDevice(Reporter):
    """Rates and counts that a graph would read once only, were they on the host."""

    def step(self, trainer):
        optimizer = trainer.raw_optimizer
        numbers = [group["lr"] for group in optimizer.param_groups]
        numbers += [entries["step"] for entries in optimizer.state.values() if "step" in entries]
        assert all(number.device.type == "cuda" for number in numbers)


def test_rate_of_the_optimiser_follows_the_schedule(capturing, tmp_path):
    rates: list[list[float]] = []

    class Watch(Reporter):
        def step(self, trainer):
            rates.append([float(group["lr"]) for group in trainer.raw_optimizer.param_groups])
            assert all(isinstance(group["lr"], torch.Tensor) for group in trainer.raw_optimizer.param_groups)

    train(tiny(), tmp_path, reporter=Watch())
    logged = [r["learning_rate"] for r in read_json_lines(tmp_path / "log.jsonl") if r["kind"] == "step"]
    assert len(set(logged)) > 15
    assert rates == [[pytest.approx(rate)] * 2 for rate in logged]


def test_checkpoints_at_intervals(tmp_path):
    config = tiny(schedule={"epochs": 5}, run={"checkpoint_epochs": 2, "checkpoint_steps": 1000})
    written: list[int] = []

    class Watch(Reporter):
        def epoch(self, record):
            written.append(len(list_checkpoints(tmp_path / "checkpoints")))

    train(config, tmp_path, reporter=Watch())
    assert written == [0, 1, 1, 2, 2]
    names = [int(p.stem.removeprefix("step-")) for p in list_checkpoints(tmp_path / "checkpoints")]
    assert names == [5 * 11, 4 * 11]


def test_speed_is_that_of_the_steps_behind_the_first(tmp_path, monkeypatch):
    """The first step compiles, and what the device still has to do when an epoch ends belongs to the epoch."""
    first, slow_end, clock = 1.0, 0.4, [0.0]  # only these two move the clock, so a busy machine does not count
    step, mean = Trainer._step, Trainer._mean

    def slow_first(self, batches):
        clock[0] += first if self.done == 0 else 0
        return step(self, batches)

    def waits(self, loss):  # the host hears of the loss when the queue is empty
        clock[0] += slow_end if loss is not self.loss_sum else 0
        return mean(self, loss)

    monkeypatch.setattr(Trainer, "_step", slow_first)
    monkeypatch.setattr(Trainer, "_mean", waits)
    monkeypatch.setattr("lrfdyn.training.trainer.time", SimpleNamespace(perf_counter=lambda: clock[0]))
    summary = train(tiny(schedule={"epochs": 1}, run={"log_steps": 100}), tmp_path)
    assert 10 * 128 / summary["images_per_s"] == pytest.approx(slow_end)


@pytest.mark.gpu(needed=True)
class TestOnGPU:
    CONFIG: ClassVar[dict[str, Any]] = {"run": {"device": "cuda", "precision": "bf16", "log_steps": 5}}

    def test_the_host_waits_for_logs_only(self, tmp_path, monkeypatch):
        mode = torch.cuda.set_sync_debug_mode
        mean, end = Trainer._mean, Trainer._end_epoch

        def waiting(function):
            def call(*arguments):
                before = torch.cuda.get_sync_debug_mode()
                mode("default")
                try:
                    return function(*arguments)
                finally:
                    mode(before)

            return call

        class Strict(Reporter):
            def start(self, trainer):
                self.trainer = trainer

            def step(self, trainer):  # the first step captures, and may wait
                mode("error")

        strict = Strict()
        monkeypatch.setattr(Trainer, "_mean", waiting(mean))
        monkeypatch.setattr(Trainer, "_end_epoch", waiting(end))
        try:
            train(tiny(**merge(self.CONFIG, {"run": {"checkpoint_steps": 1000}})), tmp_path, reporter=strict)
        finally:
            mode("default")
        assert strict.trainer.train_step.captured

    def test_a_stage_is_captured_anew(self, tmp_path):
        """With other shapes: around the weights and moments of the stage before."""
        stages = {"stages": [{"epochs": 1, "time_steps": 2, "tau": 1.5, "batch_size": 256}], "warmup_epochs": 0}
        changes = {"schedule": stages, "optimizer": {"name": "muon"}, "run": {"precision": "fp32", "log_steps": 1}}
        config = merge(self.CONFIG, changes)
        captured: list[tuple[int, bool]] = []

        class Watch(Reporter):
            def step(self, trainer):
                captured.append((trainer.model.time_steps, trainer.train_step.captured))

        train(tiny(**config), tmp_path / "graph", reporter=Watch())
        assert captured == [(2, True)] * 5 + [(1, True)] * 11
        train(tiny(**merge(config, {"run": {"cuda_graph": "off"}})), tmp_path / "eager")
        graph, eager = final_state(tmp_path / "graph")[2], final_state(tmp_path / "eager")[2]
        for ours, theirs in zip(graph[:3], eager[:3], strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-2)

    @pytest.mark.parametrize("name", ["adamw", "lamb", "muon", "sgd"])
    def test_captured_equals_eager_and_goes_on_where_it_stopped(self, name, tmp_path):
        config = merge(self.CONFIG, {"optimizer": {"name": name}, "run": {"precision": "fp32", "log_steps": 1}})
        train(tiny(**config), tmp_path / "graph")
        train(tiny(**merge(config, {"run": {"cuda_graph": "off"}})), tmp_path / "eager")
        graph, eager = final_state(tmp_path / "graph")[2], final_state(tmp_path / "eager")[2]
        for ours, theirs in zip(graph[:4], eager[:4], strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-3)
        with pytest.raises(InterruptedError):
            train(tiny(**config), tmp_path / "stopped", reporter=Stop(14))
        train(tiny(**config), tmp_path / "stopped", resume="auto", reporter=OnDevice())
        for ours, theirs in zip(final_state(tmp_path / "stopped")[2], graph, strict=True):
            key = "loss" if "loss" in ours else "train_loss"
            assert ours[key] == pytest.approx(theirs[key], rel=2e-2)
