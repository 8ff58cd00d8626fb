"""Recordings of event cameras: files of every usual format, and frames that count their events.

Numpy reads `.bin` (N-MNIST, N-Caltech101), `.aedat` (2.0 as in CIFAR10-DVS, 3.1 as in DVS128 Gesture) and `.npz`;
[faery](https://github.com/aestream/faery) reads `.aedat4`, `.dat`, `.raw`, `.es` and `.csv`.
"""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch.nn.functional as F
from torch import Tensor, from_numpy

from lrfdyn.checks import checked
from lrfdyn.errors import LrfdynError, explain, require, require_integer
from lrfdyn.files import plain_file

SIDE = 128  # pixels of a DVS128 camera
ATIS_OVERFLOW, ATIS_PERIOD = 240, 2**13  # a row that the camera does not have: so many microseconds have passed
POLARITY_PACKET = 1  # of AEDAT 3.1, which has other kinds too
LIKE_DVS128 = 0x7FFF  # the largest address; 0x8000 is the bit of a signal from outside
SAYS_NO_SIZE = 65535  # pixels, stands for the size that a file does not say
MOST_STEPS = MOST_PIXELS = 2**16
# A damaged file can end the process that faery reads it in, so that is one of its own.
FAERY = f"""
import sys, numpy, faery
path, out = sys.argv[1], sys.stdout.buffer
try:
    stream = faery.events_stream_from_file(path, dimensions_fallback=({SAYS_NO_SIZE}, {SAYS_NO_SIZE}))
    parts = [numpy.zeros(0, faery.EVENTS_DTYPE), *stream]
except Exception as error:
    sys.exit(str(error))
numpy.save(out, numpy.array(stream.dimensions()))
numpy.save(out, numpy.concatenate(parts))
"""


@checked
@dataclass(frozen=True, eq=False)
class Events:
    """The events of a recording: four integer arrays `[n]`. Events that are not in the order of their times are put
    into it."""

    t: np.ndarray  # microseconds
    x: np.ndarray  # columns from the left
    y: np.ndarray  # rows from the top
    p: np.ndarray  # polarities, 1: brighter, 0 (or -1): darker
    size: tuple[int, int] | None = None  # height and width of the sensor, where they are known

    def __post_init__(self) -> None:
        values = {name: getattr(self, name) for name in "txyp"}
        for name, array in values.items():
            fits = array.ndim == 1 and array.dtype.kind in "iub"
            require(fits, f"{name}: expected integers [n], got {array.dtype} {list(array.shape)}")
            count, expected = len(array), len(values["t"])
            require(count == expected, f"{name}: expected as many numbers as of t, {expected}, got {count}")
        values = {name: array.astype(np.int64) for name, array in values.items()}
        values["p"] = (values["p"] > 0).astype(np.int64)
        order = slice(None) if np.all(np.diff(values["t"]) >= 0) else np.argsort(values["t"], kind="stable")
        for name, array in values.items():
            object.__setattr__(self, name, array[order])
        least = min(int(self.x.min(initial=0)), int(self.y.min(initial=0)))
        require(least >= 0, f"x, y: expected places >= 0, got {least}")
        if self.size is not None:
            object.__setattr__(self, "size", (int(self.size[0]), int(self.size[1])))
            self.check_size(self.size)

    def __len__(self) -> int:
        return len(self.t)

    def between(self, start: int, stop: int) -> Events:
        """Those with `start <= t < stop`."""
        first, last = np.searchsorted(self.t, (start, stop)).tolist()
        return self.part(first, last)

    def part(self, first: int, last: int) -> Events:
        """Those from number `first` on and before number `last`."""
        return Events(self.t[first:last], self.x[first:last], self.y[first:last], self.p[first:last], self.size)

    def joined(self, other: Events) -> Events:
        """These and the others, in the order of their times."""
        t, x, y, p = (np.concatenate([getattr(self, name), getattr(other, name)]) for name in "txyp")
        return Events(t, x, y, p)

    def check_size(self, size: tuple[int, int]) -> None:
        """An error where the sensor is of another size, or events lie outside of this one."""
        height, width = int(self.y.max(initial=-1)) + 1, int(self.x.max(initial=-1)) + 1
        if self.size is not None and self.size != size:
            height, width = self.size
        elif height <= size[0] and width <= size[1]:
            return
        raise LrfdynError(f"size: expected a sensor of {size[0]} x {size[1]} pixels, got one of {height} x {width}")


@checked
def integrate(
    events: Events, steps: int, *, by: Literal["number", "time"] = "number", size: tuple[int, int] | None = None
) -> np.ndarray:
    """Frames `[steps, 2, H, W]` (float32): how many events every pixel has, those of polarity 0 in the first channel.

    Every frame takes the same number of events or, with `by="time"`, the same time; the last also takes what is left.
    These are the frames of SpikingJelly, on which the event-camera models of all hosts are trained. `size` is (H, W),
    and may be left out where the recording says it.

    ```python
    frames = integrate(read_events("recording.bin"), 16, size=(34, 34))  # [16, 2, 34, 34]
    ```
    """
    require_integer("steps", steps, 1, most=MOST_STEPS)
    require(len(events) > 0, "events: expected at least one event, got none")
    size = size or events.size
    if size is None:
        raise LrfdynError("size: expected the height and width of the sensor, which this recording does not say")
    events.check_size((size[0], size[1]))
    starts, _ = cut(events, steps, by)
    return counted(events, np.diff(starts, append=len(events)), size)


def cut(events: Events, steps: int, by: str) -> tuple[np.ndarray, np.ndarray]:
    """The first event of every frame, and the time at which the frame ends: that of its last event, or where the next
    one begins in time."""
    inner = np.arange(1, steps)
    if by == "number":
        starts = inner * (len(events) // steps)
        ends = events.t[np.maximum(starts - 1, 0)]
    else:
        ends = events.t[0] + inner * ((events.t[-1] - events.t[0]) // steps)
        starts = np.searchsorted(events.t, ends)
    return np.append(0, starts), np.append(ends, events.t[-1])


def counted(events: Events, lengths: Sequence[int] | np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Frames `[T, 2, H, W]` (float32), of which the first takes the first `lengths[0]` events, and so on."""
    steps, (height, width) = len(lengths), size
    frame = np.repeat(np.arange(steps), lengths)
    place = ((frame * 2 + events.p) * height + events.y) * width + events.x
    counts = np.bincount(place, minlength=steps * 2 * height * width)
    return counts.astype(np.float32).reshape(steps, 2, height, width)


@checked
@dataclass(frozen=True)
class Framing:
    """How a model's frames are made of a recording: so many `steps`, `by` number or time, of a `sensor` of (height,
    width), and at last `size` pixels a side."""

    steps: int
    by: Literal["number", "time"]
    sensor: tuple[int, int]
    size: int

    def __post_init__(self) -> None:
        for name, value, most in (("steps", self.steps, MOST_STEPS), ("size", self.size, MOST_PIXELS)):
            require_integer(name, value, 1, most)
        object.__setattr__(self, "sensor", tuple(self.sensor))
        fits = all(1 <= side <= MOST_PIXELS for side in self.sensor)
        require(fits, f"sensor: expected sides of 1 to {MOST_PIXELS} pixels, got {self.sensor}")

    @classmethod
    def from_dict(cls, values: Any, where: str) -> Framing:
        """From JSON; a wrong value is an error that names `where` it is."""
        try:
            return cls(**values)
        except (TypeError, ValueError) as error:
            raise LrfdynError(f"{where}: framing: {error}") from None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def counts(self, events: Events) -> np.ndarray:
        """Frames `[T, 2, H, W]` of the sensor's size, float32."""
        return integrate(events, self.steps, by=self.by, size=self.sensor)

    def scaled(self, counts: Tensor) -> Tensor:
        """Frames `[..., 2, H, W]` of the sensor's size as the model takes them, `[..., 2, size, size]`, float32."""
        counts, square = counts.float(), (self.size, self.size)
        if self.sensor == square:
            return counts
        images = F.interpolate(counts.flatten(0, -4), square, mode="bilinear", antialias=True)
        return images.unflatten(0, counts.shape[:-3])

    def frames(self, events: Events) -> Tensor:
        """Frames `[T, 2, size, size]` of a recording, as the model takes them."""
        return self.scaled(from_numpy(self.counts(events)))

    def ends(self, events: Events) -> np.ndarray:
        """The time at which each of these frames ends, `[T]`: microseconds since the first event."""
        return cut(events, self.steps, self.by)[1] - events.t[0]


@checked
def read_events(path: Path | str) -> Events:
    """The events of a recording, in the format that the ending of its name says; an error names the file.

    ```python
    events = read_events("N-MNIST/Test/7/00001.bin")
    ```
    """
    path = Path(path)
    known = path.suffix.lower() in READERS
    require(known, f"data: unknown ending of the recording {path}; known: {', '.join(READERS)}")
    try:
        return decoded(path)
    except Exception as error:  # damaged files make decoders fail in any way
        raise LrfdynError(f"data: cannot read the recording {path} ({explain(error)})") from None


def decoded(path: Path) -> Events:
    """As `read_events`, of a known ending. Whatever is wrong raises, and does not name the file."""
    ending = path.suffix.lower()
    able = READERS[ending] is not _faery or find_spec("faery") is not None
    require(able, f"{ending} needs faery; pip install 'lrfdyn[events]'")
    require(plain_file(path).stat().st_size > 0, "it is empty")
    events = READERS[ending](path)
    require(len(events) > 0, "it has no events")
    return events


def _words(data: bytes, dtype: str, what: str = "its last event") -> np.ndarray:
    kind = np.dtype(dtype)
    require(len(data) % kind.itemsize == 0, f"{what} is cut off")
    return np.frombuffer(data, kind)


def _body(data: bytes, mark: bytes) -> bytes:
    """What is behind the lines at the start that begin with `mark`."""
    start = 0
    while data.startswith(mark, start):
        start = data.find(b"\n", start) + 1 or len(data)
    return data[start:]


def _atis(path: Path) -> Events:
    """Five bytes an event: x, y, one bit of polarity, 23 bits of time."""
    data = _words(path.read_bytes(), "(5,)u1").astype(np.int64)
    x, y, high = data[:, 0], data[:, 1], data[:, 2]
    overflow = y == ATIS_OVERFLOW
    t = ((high & 127) << 16 | data[:, 3] << 8 | data[:, 4]) + np.cumsum(overflow) * ATIS_PERIOD
    return Events(*(field[~overflow] for field in (t, x, y, high >> 7)))


def _aedat(path: Path) -> Events:
    data = path.read_bytes()
    for version, read in (b"2.0", _aedat2), (b"3.1", _aedat3):
        if data.startswith(b"#!AER-DAT" + version):
            return read(data)
    raise LrfdynError("it does not begin as AEDAT 2.0 or 3.1")


def _aedat2(data: bytes) -> Events:
    """Address and time, 32 bits each, of a DVS128; rows and columns as SpikingJelly has them of CIFAR10-DVS."""
    address, t = _words(_body(data, b"#"), "(2,)>u4").astype(np.int64).T
    address, t = address[address != LIKE_DVS128 + 1], t[address != LIKE_DVS128 + 1]
    known = int(address.max(initial=0)) <= LIKE_DVS128
    require(known, "its addresses are not those of a DVS128, the one camera whose AEDAT 2.0 is known")
    x, y = SIDE - 1 - (address >> 8), SIDE - 1 - (address >> 1 & 127)
    return Events(t, x, y, 1 - (address & 1), (SIDE, SIDE))


def _aedat3(data: bytes) -> Events:
    """Packets with a head of 28 bytes; of those of polarity events, address and time of 32 bits each."""
    mark = b"#!END-HEADER\r\n"
    at, parts = data.find(mark) + len(mark), list[np.ndarray]()
    require(at >= len(mark), "its header does not end")
    while at < len(data):
        kind = int(_words(data[at : at + 2], "<u2", "its last packet").sum())
        numbers = _words(data[at + 4 : at + 28], "<u4", "its last packet")
        require(len(numbers) == 6, "its last packet is cut off")
        size, _, overflow, capacity, count, valid = numbers.tolist()
        body = data[at + 28 : at + 28 + size * capacity]
        require(len(body) == size * capacity and count <= capacity, "its last packet is cut off")
        if kind == POLARITY_PACKET:
            require(size == 8, f"a polarity event has 8 bytes, here {size}")
            events = _words(body[: 8 * count], "(2,)<u4").astype(np.int64)
            if valid < count:  # the others were filtered out
                events = events[events[:, 0] & 1 == 1]
            parts.append(events + np.array([0, overflow << 31]))
        at += 28 + size * capacity
    address, t = np.concatenate([np.zeros((0, 2), np.int64), *parts]).T
    return Events(t, address >> 17, address >> 2 & 0x7FFF, address >> 1 & 1)


def _npz(path: Path) -> Events:
    with np.load(path, allow_pickle=False) as file:
        for name in "txyp":
            require(name in file, f"it has no array {name!r}")
        return Events(*(file[name] for name in "txyp"))


def _faery(path: Path) -> Events:
    data = path.read_bytes() if path.suffix.lower() == ".dat" else b""
    _words(_body(data, b"%")[2:], "u8")  # faery takes a file that ends within an event
    command = [sys.executable, "-P", "-c", FAERY, str(path.absolute())]
    done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, check=False)
    words = done.stderr.decode(errors="replace").strip() if done.returncode == 1 else "it is damaged"
    require(done.returncode == 0, words)
    output = io.BytesIO(done.stdout)
    width, height = np.load(output).tolist()
    t, x, y, p = map(np.load(output).__getitem__, "txyp")
    return Events(t, x, y, p, None if SAYS_NO_SIZE in (width, height) else (height, width))


FROM_FAERY = (".aedat4", ".dat", ".raw", ".es", ".csv")
READERS: dict[str, Callable[[Path], Events]] = {
    ".bin": _atis, ".aedat": _aedat, ".npz": _npz, **dict.fromkeys(FROM_FAERY, _faery)
}  # fmt: skip
