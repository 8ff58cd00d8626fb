"""Frames of a camera that is running: made as its events come, for a model that follows it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from torch import Tensor, from_numpy

from lrfdyn.checks import checked
from lrfdyn.data.recordings import MOST_STEPS, Events, Framing, counted
from lrfdyn.errors import require, require_integer

LONGEST = 10**12  # microseconds or events of a frame


class FrameStream:
    """Frames of events as they come, for a `TimeStream`: each lasts the same time or takes the same number of events.

    - `framing`: How frames are made: that of a trained model, `model.framing`.
    - `every`: Microseconds that a frame lasts, or events that it takes where `framing.by` is "number".

    The frames of a recording that comes in parts are those of `framing.frames`, but for the last one, which there takes
    what is left. Example:

        frames, stream = FrameStream(model.framing, every=50_000), TimeStream(model)
        for events in packets:                  # `Events` of a camera, as they come
            for frame in frames.push(events):   # [1, 2, size, size], none or some
                logits = stream.step(frame)
    """

    @checked
    def __init__(self, framing: Framing, every: int) -> None:
        require_integer("every", every, 1, LONGEST)
        self.framing, self.every = framing, every
        self.reset()

    def reset(self) -> None:
        """Forgets the frame that has begun; the next one begins with the next event."""
        none = np.zeros(0, np.int64)
        self._held = Events(none, none, none, none)  # of the frame that has begun
        self._start: int | None = None  # when that was

    @checked
    def push(self, events: Events) -> Iterator[Tensor]:
        """The frames `[1, 2, size, size]` that are complete with these events, in order. A frame of equal time is so
        when an event behind it comes. An error leaves the stream as it was."""
        events.check_size(self.framing.sensor)
        held = self._held.joined(events)
        if self.framing.by == "number":
            start, ends = None, np.arange(self.every, len(held) + 1, self.every)
        else:
            start, ends = self._windows(held.t)
        last = int(ends[-1]) if len(ends) else 0
        self._held, self._start = held.part(last, len(held)), start
        edges = [0, *ends.tolist()]
        return (self._frame(held.part(first, stop)) for first, stop in pairwise(edges))

    def _windows(self, t: np.ndarray) -> tuple[int | None, np.ndarray]:
        """When the frame begins that is not complete, and how many of the events at `t` lie before the end of each that
        is."""
        if not len(t):
            return self._start, t
        start = int(t[0]) if self._start is None else self._start
        require(t[0] >= start, f"events: expected times from {start} on, where the frame began, got {t[0]}")
        count = (int(t[-1]) - start) // self.every
        far = f"events: expected the next within {MOST_STEPS} frames, got one {count} frames later; or reset() first"
        require(count <= MOST_STEPS, far)
        return start + count * self.every, np.searchsorted(t, start + self.every * np.arange(1, count + 1))

    def _frame(self, events: Events) -> Tensor:
        return self.framing.scaled(from_numpy(counted(events, [len(events)], self.framing.sensor)))
