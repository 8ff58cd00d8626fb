"""The stages of a run: epochs that are trained alike. The first ones may show an image fewer times, with another tau,
batch or image size; the last one is what the recipe says of the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import nn

from lrfdyn.data import data_class
from lrfdyn.errors import LrfdynError, require
from lrfdyn.models import SpikingModel
from lrfdyn.nn.neurons import LIF, Neuron
from lrfdyn.training.config import StageConfig, TrainConfig


@dataclasses.dataclass(frozen=True)
class Stage:
    """`epochs` from `first_epoch` on, of `steps` each; `first_step` are all steps before. `config` has the settings
    that hold here, `micro_batch` the images that a process takes through the model at once."""

    config: TrainConfig
    settings: StageConfig
    first_epoch: int
    first_step: int
    steps: int
    micro_batch: int

    @property
    def end(self) -> int:
        """The step that the next stage begins at."""
        return self.first_step + self.settings.epochs * self.steps

    def place(self, step: int) -> tuple[int, int]:
        """The epoch that comes after `step` steps of the run, and the steps of it that are done."""
        epochs, index = divmod(step - self.first_step, self.steps)
        return self.first_epoch + epochs, index


def plan_stages(config: TrainConfig, images: int, processes: int) -> list[Stage]:
    """The stages of a run on so many training images, every batch size checked."""
    stages: list[Stage] = []
    for settings, here in config.in_stages():
        try:
            micro_batch = here.micro_batch(processes)
            steps, most = images // (micro_batch * processes) // here.run.accumulate, f"the {images} training images"
            require(steps >= 1, f"run.batch_size: expected at most {most}, got {here.run.batch_size}")
        except LrfdynError as error:
            raise LrfdynError(f"{'schedule.stages: ' if settings.batch_size else ''}{error}") from None
        epoch, step = (stages[-1].first_epoch + stages[-1].settings.epochs, stages[-1].end) if stages else (0, 0)
        stages.append(Stage(here, settings, epoch, step, steps, micro_batch))
    return stages


def stage_at(stages: Sequence[Stage], step: int) -> Stage:
    """The stage that goes on, or begins, after `step` steps."""
    return next(stage for stage in reversed(stages) if stage.first_step <= step)


class Switch:
    """Makes a model that of a stage and back: its time steps and the tau of its LIF neurons. Neither has weights."""

    def __init__(self, model: nn.Module, config: TrainConfig) -> None:
        self.hosts = [(m, m.time_steps) for m in model.modules() if isinstance(m, SpikingModel)]
        self.neurons = [(m, m.dynamics) for m in model.modules() if isinstance(m, LIF)]
        name, spikes = config.model.name, any(isinstance(m, Neuron) for m in model.modules())
        data, least = data_class(config.data.name), self.hosts[0][0].smallest_image
        plain, shown = data.task == "classification", not data.framed
        for stage in config.schedule.stages or ():
            for key, possible, why in (
                ("time_steps", spikes, f"{name} has no spikes"),
                ("time_steps", shown, f"is for images, and {config.data.name} has frames"),
                ("tau", bool(self.neurons), f"{name} has no LIF neurons"),
                ("image_size", plain, f"is for classification, and {config.data.name} is not"),
                ("image_size", (stage.image_size or least) >= least, f"{name} needs {least} pixels a side"),
            ):
                given = getattr(stage, key)
                require(possible or given is None, f"schedule.stages: {key}: {why}, got {given}")

    def enter(self, stage: StageConfig) -> int:
        """Returns the time steps."""
        for host, steps in self.hosts:
            host.time_steps = steps if stage.time_steps is None else stage.time_steps
        for neuron, own in self.neurons:
            tau = stage.tau
            neuron.dynamics = own if tau is None else dataclasses.replace(own, leak=1 - 1 / tau, gain=1 / tau)
        return self.hosts[0][0].time_steps
