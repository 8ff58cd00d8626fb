"""The training engine: one loop for one process or many, from any step of any epoch.

Whatever a step depends on is a function of the configuration and the step (data order, augmentation, learning rate) or
is in the checkpoint (weights, optimiser, moving average, scaler, random generators). So a run that was killed and
resumed computes what it would have computed.
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lrfdyn.data import Batch
from lrfdyn.errors import LrfdynError, require
from lrfdyn.io.hub import model_config
from lrfdyn.io.weights import read_checkpoint
from lrfdyn.models import SpikingModel
from lrfdyn.sources import find_source
from lrfdyn.training import checkpoint
from lrfdyn.training.build import build_data, check_same_data, data_identity, data_model
from lrfdyn.training.config import TrainConfig, differences
from lrfdyn.training.distill import build_distill
from lrfdyn.training.logs import RunLog
from lrfdyn.training.optim import MovingAverage, build_optimizer, rate_at, set_rate
from lrfdyn.training.processes import build_accelerator, gather, quiet_layouts, seed_generators
from lrfdyn.training.reporter import Reporter
from lrfdyn.training.step import TrainStep, capture_obstacle, in_process_group
from lrfdyn.training.stopping import Stop, Stopped
from lrfdyn.training.sync_norm import synchronize_norms
from lrfdyn.training.tasks import TestRun, task_of

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Trainer:
    """One run of a configuration in the folder `out`: model, optimiser, data and where it is. `train` runs it to its
    end, `resume` puts it where a checkpoint was written, `save` writes one. Every process has its own."""

    """A run under way: model, data, optimiser and step of a configuration. `train()` runs it to its end or until `stop`
    asks; `save()` and `resume()` write and read checkpoints in `out`."""

    def __init__(
        self, config: TrainConfig, out: Path, reporter: Reporter | None = None, stop: Stop | None = None
    ) -> None:
        run = config.run
        self.config, self.out, self.reporter, self.stop = config, out, reporter or Reporter(), stop or Stop()
        self.accelerator = build_accelerator(run)
        self.device, self.rank = self.accelerator.device, self.accelerator.process_index
        self.processes: int = self.accelerator.num_processes
        self.source, self.task = build_data(config), task_of(config.data.name)
        self.tested: dict[str, Any] = {}  # what the last test found
        self.micro_batch = config.micro_batch(self.processes)
        self.steps = self.source.steps_per_epoch(self.micro_batch, self.processes) // run.accumulate
        self.total_steps = self.steps * config.schedule.total_epochs
        require(
            self.steps >= 1,
            f"run.batch_size: expected at most the {self.source.train_images} training images, got {run.batch_size}",
        )
        # The same weights in every process; behind them every process draws its own numbers.
        torch.manual_seed(run.seed)
        model = data_model(config, self.source)
        self.task.check(model, self.source)
        self.model_config = model_config(model)
        if config.model.weights is not None:
            find_source(config.model.weights, "model.weights").fill(model)
        self.task.load_start(model, config)
        model.to(self.device)
        if self.device.type == "cuda":
            torch.backends.cudnn.benchmark = True  # shapes never change
            if not in_process_group():  # sharding takes plain layouts only
                model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.dtype = torch.float64 if run.precision == "fp64" else torch.float32
        model.to(self.dtype)
        self.parameters = sum(p.numel() for p in model.parameters())
        if run.sync_batchnorm and self.processes > 1:
            synchronize_norms(model, self.device)
        self._prepare(model)
        decay = config.optimizer.ema_decay
        self.average = None if decay is None else MovingAverage(self.model, decay)
        self.distill = build_distill(config.distill, self.source, self.device)
        seed_generators(run.seed, self.rank)
        # Where the run is: `done` steps in all, and of this epoch the sum of the losses.
        self.done = 0
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        self.timed_steps, self.train_seconds, self.wall_seconds = 0, 0.0, 0.0
        self.warm = False  # whether this process has made a step
        self.last_checkpoint: Path | None = None
        self.saved = 0  # the step of it
        self.log: RunLog | None = None

    def _prepare(self, model: SpikingModel) -> None:
        """The step: of the plain model where it can be captured, and of what Accelerate makes of it elsewhere."""
        config, run = self.config.optimizer, self.config.run
        amp = DTYPES.get(run.precision)
        scaler = torch.amp.GradScaler(self.device.type) if amp == torch.float16 else None
        optimizer = build_optimizer(model, config, self.config.base_rate, capturable=True)
        self.graph_obstacle = capture_obstacle(
            self.device, optimizer, amp, scaler is not None, wanted=run.cuda_graph != "off", parts=run.accumulate
        )
        self.model: nn.Module = model
        self.optimizer: Any = optimizer
        how: dict[str, Any] = {"amp": amp, "scaler": scaler}
        if self.graph_obstacle:
            optimizer = build_optimizer(model, config, self.config.base_rate)
            how = {"accelerator": self.accelerator}
            with warnings.catch_warnings():
                # The successor of what it warns of is too new to rely on.
                warnings.filterwarnings("ignore", message=".*broadcast_buffers.*")
                self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.train_step = TrainStep(self.model, self.optimizer, self.task.loss, clip_norm=config.clip_norm, **how)

    @property
    def raw_optimizer(self) -> torch.optim.Optimizer:
        """The optimiser itself, where Accelerate has wrapped it."""
        return getattr(self.optimizer, "optimizer", self.optimizer)

    @property
    def speed(self) -> float:
        """Training images per second so far; the first step after a start, which compiles and captures, is left
        out."""
        return round(self.timed_steps * self.config.run.batch_size / max(self.train_seconds, 1e-9), 1)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def train(self) -> list[dict[str, Any]]:
        """Runs to the end and returns the record of every epoch."""
        started = time.perf_counter() - self.wall_seconds
        with self.writing():
            if self.is_main:
                self.log = RunLog(self.out, self.done)
        self.reporter.start(self)
        try:
            with quiet_layouts():
                for epoch in range(self.done // self.steps, self.config.schedule.total_epochs):
                    self._train_epoch(epoch, started)
                    self._end_epoch(epoch, started)
                    if self.done < self.total_steps:
                        self._stop_if_wanted()
        finally:
            if self.log is not None:
                self.log.close()
        return self.log.epochs if self.log is not None else []

    def _train_epoch(self, epoch: int, started: float) -> None:
        run, accumulate = self.config.run, self.config.run.accumulate
        batches = self._batches(epoch, self.done % self.steps)
        self.model.train()
        clock = time.perf_counter()
        for index in range(self.done % self.steps, self.steps):
            self.rate = rate_at(self.config.schedule, self.config.base_rate, epoch + index / self.steps)
            set_rate(self.raw_optimizer, self.rate)
            loss = self._step([next(batches) for _ in range(accumulate)])
            self.loss_sum += loss
            self.done += 1
            if self.average is not None:
                self.average.update(self.done)
            last = index + 1 == self.steps
            # Only here does the host wait for the device, so that the time below is that of the work.
            value = self._mean(loss) if self.done % run.log_steps == 0 or last else None
            now = time.perf_counter()
            if self.warm:
                self.train_seconds += now - clock
                self.timed_steps += 1
            self.warm, clock = True, now
            self.wall_seconds = now - started
            if value is not None:
                self._log_step(epoch, value)
            if self.done % run.checkpoint_steps == 0 and not last:
                self.save()
                clock = time.perf_counter()
            self.reporter.step(self)
            # Not behind the last step: a checkpoint there would take the test and the epoch's record for done.
            if not last and (value is not None or self.processes == 1):
                self._stop_if_wanted()

    def _stop_if_wanted(self) -> None:
        """All processes must agree, so with several this is called where they wait for each other anyway."""
        reason = max(gather(self.stop.reason, self.processes))
        if reason:
            if self.saved != self.done:
                self.save()
            raise Stopped(self.done, self.total_steps, reason)

    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        mixing = self.config.schedule.mix_epochs
        augment = self.config.augmentation
        if mixing is not None and epoch >= mixing:
            augment = dataclasses.replace(augment, mix_probability=0.0)
        self.source.augment = augment
        return self.source.train_batches(
            epoch=epoch,
            seed=self.config.run.seed,
            batch_size=self.micro_batch,
            rank=self.rank,
            world_size=self.processes,
            device=self.device,
            start_step=start * self.config.run.accumulate,
        )

    def _step(self, batches: list[Batch]) -> Tensor:
        return self.train_step(*[(batch.images.to(self.dtype), self._targets(batch)) for batch in batches])

    def _targets(self, batch: Batch) -> Tensor:
        targets = self.task.targets(batch, self.dtype)
        if self.distill is None:
            return targets
        with self.accelerator.autocast():  # the teacher in the precision of the run
            return self.distill(batch.images, targets)

    def _mean(self, loss: Tensor) -> float:
        """Over all processes."""
        return float(self.accelerator.reduce(loss.double().clone(), "mean"))

    def _log_step(self, epoch: int, value: float) -> None:
        if not math.isfinite(value):
            raise LrfdynError(
                f"loss: it is {value} at step {self.done} (epoch {epoch + 1}); {self._last_words()}; "
                "a lower optimizer.learning_rate or optimizer.clip_norm may help, in a run of its own (--out)"
            )
        if self.log is not None:
            record = {"epoch": epoch + 1, "loss": value, "learning_rate": self.rate, "images_per_s": self.speed}
            with self.writing():
                self.log.write("step", self.done, **record)

    def _end_epoch(self, epoch: int, started: float) -> None:
        run, schedule = self.config.run, self.config.schedule
        record: dict[str, Any] = {
            "epoch": epoch + 1,
            "train_loss": self._mean(self.loss_sum) / self.steps,
            "learning_rate": self.rate,
        }
        if (epoch + 1) % run.test_epochs == 0 or epoch + 1 == schedule.total_epochs:
            with nullcontext() if self.average is None else self.average.swapped():
                self.tested = self.task.test(
                    self.model, TestRun(self.source, run.test_batch_size, self.accelerator, self.dtype)
                )
            record |= {key: self.tested[key] for key in self.task.results}
        self.loss_sum.zero_()
        self.wall_seconds = time.perf_counter() - started
        record["images_per_s"] = self.speed
        record["wall_s"] = round(self.wall_seconds, 3)
        if self.log is not None:
            with self.writing():
                self.log.write("epoch", self.done, **record)
        if (epoch + 1) % run.checkpoint_epochs == 0 or epoch + 1 == schedule.total_epochs:
            self.save()
        self.reporter.epoch(record)

    def save(self) -> None:
        """Writes a checkpoint; every process takes part."""
        self.saved = self.done
        tensors = checkpoint.training_tensors(self.model, self.raw_optimizer, self.average)
        loss_sum = self._mean(self.loss_sum)
        generators = gather(checkpoint.random_state(), self.processes)
        if not self.is_main:
            return
        # A loss that was a number does not prove that the step it led to was one.
        for name in checkpoint.not_finite(tensors):
            raise LrfdynError(
                f"weights: {name} is not finite after step {self.done}; {self._last_words()}; "
                "a lower optimizer.learning_rate or optimizer.clip_norm may help, in a run of its own (--out)"
            )
        meta = {
            "step": self.done,
            "config": self.config.as_dict(),
            "fingerprint": self.config.fingerprint(),
            "model_config": self.model_config,
            "processes": self.processes,
            **data_identity(self.source),
            "random": generators,
            "scaler": None if self.train_step.scaler is None else self.train_step.scaler.state_dict(),
            "loss_sum": loss_sum,
            "timed_steps": self.timed_steps,
            "train_seconds": self.train_seconds,
            "wall_seconds": self.wall_seconds,
        }
        with self.writing():
            if self.log is not None:
                self.log.sync()
            self.last_checkpoint = checkpoint.write_checkpoint(self.out / "checkpoints", self.done, tensors, meta)

    def resume(self, path: Path) -> None:
        """Goes on from a checkpoint, verified; every process reads it."""
        tensors, meta = read_checkpoint(path)
        what = "; ".join(differences(self.config.as_dict(), meta["config"]))
        if what:
            raise LrfdynError(
                f"resume: {path} was made with other settings ({what}); take another --out, or --restart to discard it"
            )
        check_same_data(path, meta, self.source)
        checkpoint.restore_training(tensors, self.model, self.raw_optimizer, self.average)
        self.done = meta["step"]
        self.loss_sum.fill_(meta["loss_sum"])
        self.timed_steps, self.train_seconds = meta["timed_steps"], meta["train_seconds"]
        self.wall_seconds = meta["wall_seconds"]
        if self.train_step.scaler is not None and meta["scaler"] is not None:
            self.train_step.scaler.load_state_dict(meta["scaler"])
        self.last_checkpoint, self.saved = path, self.done
        if meta["processes"] == self.processes:
            checkpoint.set_random_state(meta["random"][self.rank])
        else:
            # Data and weights continue; what every process drew for itself cannot.
            seed_generators(self.config.run.seed + self.done, self.rank)
            self.say(f"resuming on {self.processes} processes what {meta['processes']} began")

    def say(self, message: str) -> None:
        if self.is_main:
            self.reporter.say(message)

    def _last_words(self) -> str:
        if self.last_checkpoint is None:
            return "there is no checkpoint yet"
        return f"the last good checkpoint is {self.last_checkpoint} (--resume auto goes on from it)"

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A full or broken disk ends the run with one line; the checkpoints before are whole."""
        try:
            yield
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise LrfdynError(f"out: cannot write in {self.out} ({reason}); {self._last_words()}") from None
