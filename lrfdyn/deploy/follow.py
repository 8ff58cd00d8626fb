"""Recordings of an event camera, followed frame by frame."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from lrfdyn.deploy.early_exit import confidence
from lrfdyn.deploy.time_stream import TimeStream


@dataclass(frozen=True, eq=False)
class Step:
    """What a model makes of a recording up to the end of one of its frames."""

    number: int  # of the frame, from 1 on
    time_ms: float  # when the frame ends, since the first event
    frame: Tensor  # `[2, size, size]`
    logits: Tensor  # `[classes]`, of all frames until then


def follow(stream: TimeStream, frames: Tensor, ends: np.ndarray, threshold: float | None = None) -> Iterator[Step]:
    """The steps of a recording from its first frame on, as they come: `frames` are `[T, 2, size, size]`, and `ends`
    when each of them ends, in microseconds. The last step is that at which the confidence passes `threshold`."""
    stream.reset()
    for number, (frame, end) in enumerate(zip(frames, ends.tolist(), strict=True), 1):
        logits = stream.step(frame[None])[0]
        yield Step(number, end / 1000, frame, logits)
        if threshold is not None and confidence(logits) > threshold:
            break
