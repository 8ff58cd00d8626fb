"""One loop for one process or many, from any step of any epoch. Whatever a step depends on is a function of
configuration and step (data order, augmentation, rate) or is in the checkpoint (weights, optimiser, moving average,
scaler, random generators), so a run that was killed and resumed computes what it would have computed."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lrfdyn.checks import checked
from lrfdyn.data import Batch
from lrfdyn.data.augment import laid_out
from lrfdyn.errors import LrfdynError, require
from lrfdyn.io.hub import model_config
from lrfdyn.io.weights import not_finite, read_checkpoint
from lrfdyn.models import SpikingModel
from lrfdyn.sources import find_source
from lrfdyn.training import checkpoint
from lrfdyn.training.config import TrainConfig, differences
from lrfdyn.training.logs import Reporter, RunLog
from lrfdyn.training.optim import MovingAverage, build_optimizer, rate_at, set_rate, without_warning
from lrfdyn.training.processes import Stop, Stopped, build_accelerator, gather, seed_generators, synchronize_norms
from lrfdyn.training.stages import Stage, Switch, plan_stages, stage_at
from lrfdyn.training.step import TrainStep, capture_obstacle
from lrfdyn.training.tasks import TestRun, build_data, build_distill, build_loss, data_model, held_out, task_of

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Warnings of torch: gradients of 1x1 kernels are said to be channels-last, which is the same memory; and the successor
# of an argument is too new to rely on.
OTHER_LAYOUT, BROADCAST = ".*[Gg]rad strides do not match", ".*broadcast_buffers.*"
COUNTERS = ("timed_images", "train_seconds", "wall_seconds")  # of a trainer, that a checkpoint keeps


class Trainer:
    """One run of a configuration in the folder `out`: model, optimiser, data and where it is. `train` runs it to its
    end or until `stop` asks, `resume` puts it where a checkpoint was written, `save` writes one. Every process has its
    own."""

    @checked
    def __init__(
        self, config: TrainConfig, out: Path, reporter: Reporter | None = None, stop: Stop | None = None
    ) -> None:
        run = config.run
        self.config, self.out, self.reporter, self.stop = config, out, reporter or Reporter(), stop or Stop()
        self.accelerator = build_accelerator(run)
        self.device, self.rank = self.accelerator.device, self.accelerator.process_index
        self.processes: int = self.accelerator.num_processes
        self.is_main = self.rank == 0
        self.source, self.task = build_data(config), task_of(config.data.name)
        self.tested: dict[str, Any] = {}  # what the last test found
        self.stages = plan_stages(config, self.source.train_images, self.processes)
        self.total_steps = self.stages[-1].end
        # The same weights in every process; behind them every process draws its own numbers.
        torch.manual_seed(run.seed)
        model = data_model(config, self.source)
        self.model_config = model_config(model)
        if config.model.weights is not None:
            find_source(config.model.weights, "model.weights").fill(model)
        self.task.prepare(model, config, self.source)
        model.step_logits = config.loss.tet is not None
        model.to(self.device)
        if self.device.type == "cuda":
            torch.backends.cudnn.benchmark = True  # shapes change with a stage only
        if self.accelerator.distributed_type != "FSDP":  # sharding takes plain layouts only
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.dtype = torch.float64 if run.precision == "fp64" else torch.float32
        model.to(self.dtype)
        self.parameters = sum(p.numel() for p in model.parameters())
        if run.sync_batchnorm and self.processes > 1:
            synchronize_norms(model, self.device)
        self._prepare(model)
        self.switch = Switch(self.model, config)
        self._enter(self.stages[0])
        decay = config.optimizer.ema_decay
        self.average = None if decay is None else MovingAverage(self.model, decay)
        self.distill = build_distill(config.distill, self.source, self.device)
        seed_generators(run.seed, self.rank)
        # Where the run is: `done` steps in all, and of this epoch the sum of the losses.
        self.done = 0
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        self.epoch = 1  # that it is in, as logs count
        self.timed_images, self.train_seconds, self.wall_seconds = 0, 0.0, 0.0
        self.last_checkpoint: Path | None = None
        self.saved = 0  # the step of it
        self.log: RunLog | None = None
        self.threads: int | None = None  # those that a run which goes on began with: sums keep their order

    def _prepare(self, model: SpikingModel) -> None:
        """The step: of the plain model where it can be captured, and of what Accelerate makes of it elsewhere."""
        config, run, rate = self.config.optimizer, self.config.run, self.config.base_rate
        amp = DTYPES.get(run.precision)
        scaler = torch.amp.GradScaler(self.device.type) if amp == torch.float16 else None
        how: dict[str, Any] = {"amp": amp, "scaler": scaler}
        self.model: nn.Module = model
        self.optimizer: Any = build_optimizer(model, config, rate, capturable=True)
        wanted = run.cuda_graph != "off"
        self.graph_obstacle = capture_obstacle(
            self.device, self.optimizer, amp, scaler is not None, wanted=wanted, parts=run.accumulate
        )
        if self.graph_obstacle:
            how = {"accelerator": self.accelerator}
            with without_warning(BROADCAST):
                self.model, self.optimizer = self.accelerator.prepare(model, build_optimizer(model, config, rate))
        self.raw_optimizer: torch.optim.Optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        self._how = {"clip_norm": config.clip_norm, **how}

    def _enter(self, stage: Stage) -> None:
        """The model and its step are from here on those of a stage. Weights, moments and the scaler go on."""
        self.stage, self.time_steps = stage, self.switch.enter(stage.settings)
        loss = build_loss(self.task, self.config.loss.tet)
        self.train_step = TrainStep(self.model, self.optimizer, loss, **self._how)
        self.warm = False  # whether this process has made a step of it

    @property
    def speed(self) -> float:
        """Training images per second, without the first step of a stage or after a start: it compiles and captures."""
        return round(self.timed_images / max(self.train_seconds, 1e-9), 1)

    def train(self) -> list[dict[str, Any]]:
        """Runs to the end and returns the record of every epoch."""
        started = time.perf_counter() - self.wall_seconds
        with self.writing():
            self.log = RunLog(self.out, self.done) if self.is_main else None
        self.reporter.start(self)
        try:
            with without_warning(OTHER_LAYOUT):
                while self.done < self.total_steps:
                    stage = stage_at(self.stages, self.done)
                    if stage is not self.stage:
                        self._enter(stage)
                    epoch, _ = stage.place(self.done)
                    self._train_epoch(epoch, started)
                    self._end_epoch(epoch, started)
                    if self.done < self.total_steps:
                        self._stop_if_wanted()
        finally:
            if self.log is not None:
                self.log.close()
        return self.log.epochs if self.log is not None else []

    def _train_epoch(self, epoch: int, started: float) -> None:
        stage, run, steps = self.stage, self.stage.config.run, self.stage.steps
        _, start = stage.place(self.done)
        batches = self._batches(epoch, start)
        self.model.train()
        self.epoch = epoch + 1
        clock = time.perf_counter()
        for index in range(start, steps):
            self.rate = rate_at(self.config.schedule, stage.config.base_rate, epoch + index / steps)
            set_rate(self.raw_optimizer, self.rate)
            loss = self._step([next(batches) for _ in range(run.accumulate)])
            self.loss_sum += loss
            self.done += 1
            if self.average is not None:
                self.average.update(self.done - stage.first_step)
            last = index + 1 == steps
            # Only here does the host wait for the device, so that the time below is that of the work.
            value = self._mean(loss) if self.done % run.log_steps == 0 or last else None
            now = time.perf_counter()
            if self.warm:
                self.train_seconds += now - clock
                self.timed_images += run.batch_size
            self.warm, clock = True, now
            self.wall_seconds = now - started
            if value is not None:
                if not math.isfinite(value):
                    raise self._divergence(f"loss: it is {value} at step {self.done} (epoch {epoch + 1})")
                record = {"epoch": epoch + 1, "loss": value, "learning_rate": self.rate, "images_per_s": self.speed}
                self._write_log("step", {**record, "total_steps": self.total_steps})
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
        mixing, augment = self.config.schedule.mix_epochs, self.stage.config.augmentation
        mixed = mixing is None or epoch < mixing
        self.source.augment = augment if mixed else dataclasses.replace(augment, mix_probability=0.0)
        how: dict[str, Any] = {"epoch": epoch, "seed": self.config.run.seed, "batch_size": self.stage.micro_batch}
        how |= {"rank": self.rank, "world_size": self.processes, "device": self.device}
        return self.source.train_batches(**how, start_step=start * self.config.run.accumulate)

    def _step(self, batches: list[Batch]) -> Tensor:
        parts, size = [], self.stage.settings.image_size
        for batch in batches:
            images, targets = batch.images, self.task.targets(batch, self.dtype)
            if size is not None:
                scaled = F.interpolate(images.flatten(0, -4), (size, size), mode="bilinear", antialias=True)
                images = laid_out(scaled.unflatten(0, images.shape[:-3]))
            if self.distill is not None:
                with self.accelerator.autocast():  # the teacher in the precision of the run
                    targets = self.distill(images, targets)
            parts.append((images.to(self.dtype), targets))
        return self.train_step(*parts)

    def _mean(self, loss: Tensor) -> float:
        """Over all processes."""
        return float(self.accelerator.reduce(loss.double().clone(), "mean"))

    def _write_log(self, kind: str, record: dict[str, Any]) -> None:
        if self.log is not None:
            with self.writing():
                self.log.write(kind, self.done, **record)

    def _end_epoch(self, epoch: int, started: float) -> None:
        run, number, ended = self.config.run, epoch + 1, epoch + 1 == self.config.schedule.total_epochs
        train_loss = self._mean(self.loss_sum) / self.stage.steps
        record: dict[str, Any] = {"epoch": number, "train_loss": train_loss, "learning_rate": self.rate}
        if len(self.stages) > 1:  # the test is of the model as it is now
            record |= {"time_steps": self.time_steps}
        if number % run.test_epochs == 0 or ended:
            test = TestRun(self.source, run.test_batch_size, self.accelerator, self.dtype)
            with nullcontext() if self.average is None else self.average.swapped():
                self.tested = self.task.test(self.model, test)
            record |= {key: self.tested[key] for key in self.task.results}
            record |= held_out(self.config)
        self.loss_sum.zero_()
        self.wall_seconds = time.perf_counter() - started
        times = {"train_s": self.train_seconds, "wall_s": self.wall_seconds}
        record |= {"images_per_s": self.speed, **{key: round(value, 3) for key, value in times.items()}}
        self._write_log("epoch", record)
        if number % run.checkpoint_epochs == 0 or ended:
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
        for name in not_finite(tensors):
            raise self._divergence(f"weights: {name} is not finite after step {self.done}")
        scaler = self.train_step.scaler
        meta = {
            "step": self.done,
            "config": self.config.as_dict(),
            "fingerprint": self.config.fingerprint(),
            "model_config": self.model_config,
            "processes": self.processes,
            "threads": torch.get_num_threads(),
            **checkpoint.data_identity(self.source),
            "random": generators,
            "scaler": None if scaler is None else scaler.state_dict(),
            "loss_sum": loss_sum,
            **{name: getattr(self, name) for name in COUNTERS},
        }
        with self.writing():
            if self.log is not None:
                self.log.sync()
            self.last_checkpoint = checkpoint.write_checkpoint(self.out / "checkpoints", self.done, tensors, meta)

    def resume(self, path: Path) -> None:
        """Goes on from a checkpoint, verified; every process reads it."""
        tensors, meta = read_checkpoint(path)
        what, hint = "; ".join(differences(self.config.as_dict(), meta["config"])), "--restart to discard it"
        require(not what, f"resume: {path} was made with other settings ({what}); take another --out, or {hint}")
        checkpoint.check_same_data(path, meta, self.source)
        checkpoint.restore_training(tensors, self.model, self.raw_optimizer, self.average)
        self.loss_sum.fill_(meta["loss_sum"])
        meta.setdefault("timed_images", meta.get("timed_steps", 0) * self.config.run.batch_size)  # of version 0.2
        for name in COUNTERS:
            setattr(self, name, meta[name])
        if self.train_step.scaler is not None and meta["scaler"] is not None:
            self.train_step.scaler.load_state_dict(meta["scaler"])
        self.threads = meta.get("threads")
        self.last_checkpoint, self.saved, self.done = path, meta["step"], meta["step"]
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
        last = self.last_checkpoint
        hint = f"the last good checkpoint is {last} (--resume auto goes on from it)"
        return "there is no checkpoint yet" if last is None else hint

    def _divergence(self, what: str) -> LrfdynError:
        hint = "a lower optimizer.learning_rate or optimizer.clip_norm may help, in a run of its own (--out)"
        return LrfdynError(f"{what}; {self._last_words()}; {hint}")

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A full or broken disk ends the run with one line; the checkpoints before are whole."""
        try:
            yield
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise LrfdynError(f"out: cannot write in {self.out} ({reason}); {self._last_words()}") from None
