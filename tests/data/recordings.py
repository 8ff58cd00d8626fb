"""Recordings that tests write, in every format."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np

from lrfdyn.data.recordings import SIDE, Events


def recording(seed: int = 0, count: int = 500, size: tuple[int, int] = (34, 34)) -> Events:
    """Random events, of which some have the same time."""
    random = np.random.default_rng(seed)
    t = np.sort(random.integers(1000, 1000 + 3 * count, count))
    x, y = random.integers(0, size[1], count), random.integers(0, size[0], count)
    return Events(t, x, y, random.integers(0, 2, count))


def atis(events: Events) -> bytes:
    high = events.p << 7 | events.t >> 16
    fields = (events.x, events.y, high, events.t >> 8 & 255, events.t & 255)
    return np.stack(fields, 1).astype(np.uint8).tobytes()


def aedat2(events: Events) -> bytes:
    """As the camera of CIFAR10-DVS writes them."""
    address = (SIDE - 1 - events.x) << 8 | (SIDE - 1 - events.y) << 1 | 1 - events.p
    return b"#!AER-DAT2.0\r\n# some words\r\n" + np.stack((address, events.t), 1).astype(">u4").tobytes()


def aedat3(events: Events, packet: int = 200, marks: np.ndarray | None = None) -> bytes:
    """Packets of polarity events with one of another kind before each; `marks` says which events are valid."""
    valid = np.ones(len(events), np.int64) if marks is None else marks
    data = b"#!AER-DAT3.1\r\n#Format: RAW\r\n#!END-HEADER\r\n"
    for first in range(0, len(events), packet):
        part = slice(first, first + packet)
        address = events.x[part] << 17 | events.y[part] << 2 | events.p[part] << 1 | valid[part]
        body = np.stack((address, events.t[part] & (1 << 31) - 1), 1).astype("<u4").tobytes()
        overflow, count = int(events.t[first]) >> 31, len(address)
        data += aedat3_head(0, 12, 0, 1, 1, 1) + bytes(12)
        data += aedat3_head(1, 8, overflow, count, count, int(valid[part].sum())) + body
    return data


def aedat3_head(kind: int, size: int, overflow: int, capacity: int, count: int, valid: int) -> bytes:
    return np.array([kind, 1], "<u2").tobytes() + np.array([size, 4, overflow, capacity, count, valid], "<u4").tobytes()


def write_nmnist(root: Path, train: int = 4, test: int = 2) -> Path:
    """The official folders, with so many recordings of every digit."""
    for part, count in (("Train", train), ("Test", test)):
        for digit in range(10):
            folder = root / part / str(digit)
            folder.mkdir(parents=True)
            for i in range(count):
                (folder / f"{i:05d}.bin").write_bytes(atis(recording(100 * digit + i + 50 * (part == "Test"), 200)))
    return root


def npz(events: Events) -> bytes:
    file = io.BytesIO()
    np.savez(file, t=events.t, x=events.x, y=events.y, p=events.p)
    return file.getvalue()


def by_faery(path: Path, events: Events, size: tuple[int, int]) -> None:
    import faery

    array = np.zeros(len(events), faery.EVENTS_DTYPE)
    for name in "txyp":
        array[name] = getattr(events, name)
    faery.events_stream_from_array(array, (size[1], size[0])).to_file(path)


OWN: dict[str, Callable[[Events], bytes]] = {"a.bin": atis, "two.aedat": aedat2, "three.aedat": aedat3, "a.npz": npz}
FAERY = ("a.aedat4", "a.dat", "a.raw", "a.es", "a.csv")
