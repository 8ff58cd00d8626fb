"""One recording through a model, frame by frame: what it says after every step, and how much its layers fire."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lrfdyn.analysis.measure.observe import hooked
from lrfdyn.analysis.measure.spikes import FiringRates
from lrfdyn.checks import checked
from lrfdyn.deploy import TimeStream
from lrfdyn.errors import require
from lrfdyn.models import SpikingModel


@checked
def follow_recording(model: SpikingModel, frames: Tensor) -> dict[str, Any]:
    """What a classifier does step by step with the frames `[T, C, H, W]` of one recording, as plain numbers: `logits`
    after every step, those of all frames until then, `[T][classes]`; `step_logits`, of every frame by itself; `firing`,
    the share of neurons that fire in every step by layer, in the order of the network; and `state_bytes`, what is
    carried from step to step (see `TimeStream`).

        frames = model.framing.frames(read_events("recording.bin"))
        rates = follow_recording(model, frames)["firing"]["stem.stages.0.neuron"]  # of every step
    """
    shape = list(frames.shape)
    require(len(shape) == 4 and shape[0] > 0, f"frames: expected those of one recording, [T, C, H, W], got {shape}")
    with hooked(model, ()):  # in evaluation mode, as all measurements
        stream = TimeStream(model)
    logits: list[list[float]] = []
    alone: list[list[float]] = []
    firing: dict[str, list[float]] = {}
    for frame in frames.unsqueeze(1):
        rates = FiringRates()
        with hooked(stream.network, rates.watch(stream.network)):
            logits += stream.step(frame).tolist()
        assert stream.step_logits is not None
        alone += stream.step_logits.tolist()
        for layer, rate in rates.record()["by_layer"].items():
            firing.setdefault(layer, []).append(rate)
    return {"logits": logits, "step_logits": alone, "firing": firing, "state_bytes": stream.nbytes}
