"""Frames of events that come in packets are those of the whole recording."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lrfdyn.data import Events, FrameStream, Framing
from lrfdyn.errors import LrfdynError
from tests.data.recordings import recording


def packets(events: Events, count: int) -> list[Events]:
    """So many parts of a recording, of random lengths, empty ones among them."""
    cuts = np.sort(np.random.default_rng(count).integers(0, len(events) + 1, count - 1)).tolist()
    return [events.part(first, last) for first, last in zip([0, *cuts], [*cuts, len(events)], strict=True)]


@pytest.mark.parametrize("by", ["number", "time"])
@pytest.mark.parametrize("size", [34, 17])
def test_packets_make_the_frames_of_the_recording(by: Any, size: int) -> None:
    events, framing = recording(3, 501), Framing(7, by, (34, 34), size)
    every = 501 // 7 if by == "number" else int(events.t[-1] - events.t[0]) // 7
    whole = framing.frames(events)
    for count in (1, 2, 40, 501):
        stream = FrameStream(framing, every)
        made = [frame for packet in packets(events, count) for frame in stream.push(packet)]
        assert {tuple(frame.shape) for frame in made} == {(1, 2, size, size)}
        assert len(made) == 7  # the last may lack what is left behind it
        assert torch.equal(torch.cat(made)[:6], whole[:6])


def test_ends_of_frames() -> None:
    five = Events(np.array([10, 12, 20, 29, 50]), *[np.zeros(5, int)] * 3)
    assert Framing(2, "number", (1, 1), 1).ends(five).tolist() == [2, 40]
    assert Framing(4, "time", (1, 1), 1).ends(five).tolist() == [10, 20, 30, 40]
    assert Framing(3, "number", (1, 1), 1).ends(five.part(0, 2)).tolist() == [0, 0, 2]  # all events are in the last


def at(*times: int, size: tuple[int, int] | None = None) -> Events:
    return Events(np.array(times, int), *[np.zeros(len(times), int)] * 3, size)


def test_windows_begin_with_the_first_event_and_are_complete_with_one_behind_them() -> None:
    stream = FrameStream(Framing(2, "time", (1, 1), 1), 10)
    assert [int(frame.sum()) for frame in stream.push(at(100, 105, 109))] == []
    assert [int(frame.sum()) for frame in stream.push(at(103, 110))] == [4]  # late, but its frame is not complete
    assert [int(frame.sum()) for frame in stream.push(at(145))] == [1, 0, 0]  # nothing happened
    assert list(stream.push(at())) == []
    with pytest.raises(LrfdynError, match="events: expected times from 140 on, where the frame began, got 139"):
        stream.push(at(139))
    with pytest.raises(LrfdynError, match="the next within 65536 frames, got one 99999986 frames later"):
        stream.push(at(10**9))
    with pytest.raises(LrfdynError, match="size: expected a sensor of 1 x 1 pixels, got one of 2 x 1"):
        stream.push(at(146, size=(2, 1)))
    assert [int(frame.sum()) for frame in stream.push(at(150))] == [1]  # as if those had not come
    stream.reset()
    assert list(stream.push(at(10**9))) == []
    assert [int(frame.sum()) for frame in stream.push(at(10**9 + 10))] == [1]


def test_what_is_no_length() -> None:
    framing = Framing(2, "time", (1, 1), 1)
    for every in (0, -1, 10**13):
        with pytest.raises(LrfdynError, match="every: expected"):
            FrameStream(framing, every)
