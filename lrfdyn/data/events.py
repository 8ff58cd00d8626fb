"""Data sets of event-camera recordings. Their frames are made once, and read from a file that is mapped into memory."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lrfdyn.data.array_file import cache_folder, cached_array, fingerprint
from lrfdyn.data.augment import Augmentation
from lrfdyn.data.base import NumberedData, place, register_data
from lrfdyn.data.decode import FolderImages
from lrfdyn.data.event_augment import UNUSED, augment_frames
from lrfdyn.data.hashed_random import Keys
from lrfdyn.data.loading import load_parts, to_device
from lrfdyn.data.recordings import READERS, Events, Framing, read_events
from lrfdyn.errors import LrfdynError, explain, require, require_integer

TOGETHER = 32  # recordings that a process integrates at a time
TRAIN_SHARE = 0.9  # of every class, where a data set has no split of its own


class Recording(NamedTuple):
    """A file, or the part of it from `start` on and before `stop`, in microseconds."""

    path: str
    label: int
    start: int = 0
    stop: int | None = None

    @property
    def name(self) -> str:
        return self.path if self.stop is None else f"{self.path} from {self.start} to {self.stop} µs"


class EventData(NumberedData):
    """Recordings of an event camera: a batch has frames `[T, B, 2, H, W]` that count events, `frames` for a recording,
    with the same number of events or (`split_by="time"`) of the same length. They are made at the first use, by
    `workers` processes (None: one a core), and kept in the folder `cache`, by default `.frames` in that of the data;
    other settings and changed recordings make them anew. `image_size` scales frames of another size, without
    normalising anything."""

    in_channels = 2
    mean, deviation = (0.0, 0.0), (1.0, 1.0)
    unused_settings = UNUSED
    framed = True
    sensor: tuple[int, int]  # height and width
    framing: Framing

    def __init__(
        self,
        root: Path,
        train: Sequence[Recording],
        test: Sequence[Recording],
        augment: Augmentation,
        *,
        frames: int = 16,
        split_by: Literal["number", "time"] = "number",
        image_size: int | None = None,
        cache: str | None = None,
        workers: int | None = None,
    ) -> None:
        super().__init__(root, augment)
        require(augment.crop != "resized", "crop: expected pad or none for recordings, got resized")
        require_integer("frames", frames, 1)
        require(split_by in ("number", "time"), f"split_by: expected number or time, got {split_by!r}")
        require_integer("workers", 0 if workers is None else workers, 0)
        self.image_size = self.image_size if image_size is None else image_size
        require_integer("image_size", self.image_size, 1, most=2**14)
        self.root, self.recordings, self._workers = root, [*train, *test], workers
        self.framing = Framing(frames, split_by, self.sensor, self.image_size)
        self.cache = cache_folder(cache, root / ".frames")
        self.number([recording.label for recording in self.recordings], len(train))
        self._counts: np.ndarray | None = None

    def load(self, split: str, steps: Sequence[Keys], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        for keys in steps:
            rows = self.rows[split][keys.samples]
            counts = self.counts()[rows]
            counts = counts if counts.dtype == np.uint8 else counts.astype(np.float32)  # torch has no other
            frames = self.framing.scaled(to_device(counts, device).transpose(0, 1))
            yield frames, to_device(self.labels[rows], device)

    def augmented(self, levels: Tensor, keys: Keys) -> Tensor:
        return augment_frames(levels, self.augment, keys)

    def normalised(self, levels: Tensor) -> Tensor:
        return levels

    def counts(self) -> np.ndarray:
        """The frames of all recordings, `[n, T, 2, H, W]`, those of training first, mapped from the cache."""
        if self._counts is None:
            name = f"{type(self).__name__}_{self.framing.steps}_{self.framing.by}"
            what = f"frames of {len(self.recordings)} recordings"
            self._counts = cached_array(self.cache / name, self._facts(), self._make, what)
        return self._counts

    def _facts(self) -> dict[str, Any]:
        """What decides the frames: the settings, and the name, size and time of every recording."""
        files = ((path, start, stop) for path, _, start, stop in self.recordings)
        recordings = fingerprint(self.root, files, "recording")
        shape = [len(self.recordings), self.framing.steps, 2, *self.sensor]
        return {"shape": shape, "by": self.framing.by, "recordings": recordings}

    def _make(self) -> Iterator[np.ndarray]:
        """The frames of all recordings in parts, in order."""
        return load_parts(self._integrate, len(self.recordings), TOGETHER, self._workers)

    def _integrate(self, indices: np.ndarray) -> np.ndarray:
        frames, path, whole = [], "", None
        for recording in (self.recordings[i] for i in indices):
            if recording.path != path:  # the parts of a file come together
                path, whole = recording.path, read_events(recording.path)
            assert whole is not None
            events = whole if recording.stop is None else whole.between(recording.start, recording.stop)
            frames.append(self._frames_of(recording, events))
        counts = np.stack(frames)
        return counts.astype(np.min_scalar_type(int(counts.max())))

    def _frames_of(self, recording: Recording, events: Events) -> np.ndarray:
        try:
            return self.framing.counts(events)
        except LrfdynError as error:
            raise LrfdynError(f"data: the recording {recording.name}: {error}") from None


def in_folders(
    folder: Path, endings: tuple[str, ...], classes: Sequence[str] | None = None
) -> tuple[list[str], list[Recording]]:
    """The sorted names of the class folders, which must be `classes`, and the recordings in them in sorted order."""
    found = FolderImages(folder, endings, "recordings")
    wrong = [] if classes is None else sorted(set(found.classes) ^ set(classes))
    require(not wrong, f"root: expected the class folders {', '.join(classes or ())} in {folder}, differs {wrong}")
    return found.classes, [Recording(found.name(i), int(label)) for i, label in enumerate(found.labels)]


def first_of_classes(recordings: Sequence[Recording], classes: int) -> tuple[list[Recording], list[Recording]]:
    """The first 90 % of every class, rounded up, and the rest."""
    train, test = list[Recording](), list[Recording]()
    for label in range(classes):
        own = [recording for recording in recordings if recording.label == label]
        end = math.ceil(len(own) * TRAIN_SHARE)
        train, test = train + own[:end], test + own[end:]
    return train, test


@register_data("nmnist")
class NMNIST(EventData):
    """Handwritten digits on a screen, seen by a camera that moves (Orchard et al., 2015): `Train/DIGIT/*.bin` and
    `Test/DIGIT/*.bin`, in `root` or in `N-MNIST` there. `options` are those of `EventData`."""

    num_classes, image_size, train_images, test_images = 10, 34, 60_000, 10_000
    sensor = (34, 34)
    class_names = tuple("0123456789")

    def __init__(self, root: Path, augment: Augmentation, **options: Any) -> None:
        folder = place(root, ("N-MNIST", "extract"), "Train")
        train, test = (in_folders(folder / part, (".bin",), self.class_names)[1] for part in ("Train", "Test"))
        super().__init__(root, train, test, augment, **options)


@register_data("cifar10dvs")
class CIFAR10DVS(EventData):
    """Images of CIFAR-10 that move on a screen, seen by a DVS128 (Li et al., 2017): `CLASS/*.aedat` in `root`. In
    sorted order the first 90 % of every class are for training, as in the official code of all hosts. `options` are
    those of `EventData`."""

    num_classes, image_size, train_images, test_images = 10, 128, 9_000, 1_000
    sensor = (128, 128)
    class_names = (
        "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
    )  # fmt: skip

    def __init__(self, root: Path, augment: Augmentation, **options: Any) -> None:
        folder = place(root, ("CIFAR10DVS", "extract"), self.class_names[0])
        classes, recordings = in_folders(folder, (".aedat",), self.class_names)
        super().__init__(root, *first_of_classes(recordings, len(classes)), augment, **options)


@register_data("dvs128_gesture")
class DVS128Gesture(EventData):
    """Eleven hand and arm gestures (Amir et al., 2017): `*.aedat`, of which `*_labels.csv` says where each gesture
    begins and ends, `trials_to_train.txt` and `trials_to_test.txt`, in `root` or in `DvsGesture` there. `options` are
    those of `EventData`."""

    num_classes, image_size, train_images, test_images = 11, 128, 1_176, 288
    sensor = (128, 128)
    class_names = (
        "hand_clapping", "right_hand_wave", "left_hand_wave", "right_arm_clockwise", "right_arm_counter_clockwise",
        "left_arm_clockwise", "left_arm_counter_clockwise", "arm_roll", "air_drums", "air_guitar", "other_gestures",
    )  # fmt: skip

    def __init__(self, root: Path, augment: Augmentation, **options: Any) -> None:
        folder = place(root, ("DvsGesture", "extract/DvsGesture"), "trials_to_train.txt")
        train, test = (self._gestures(folder / f"trials_to_{part}.txt") for part in ("train", "test"))
        super().__init__(root, train, test, augment, **options)

    def _gestures(self, trials: Path) -> list[Recording]:
        """The gestures in the recordings that a file lists."""
        found, path = list[Recording](), trials
        try:
            for name in trials.read_text(encoding="utf-8").split():
                path = trials.parent / f"{Path(name).stem}_labels.csv"
                with path.open(newline="", encoding="utf-8") as file:
                    for row in csv.DictReader(file):
                        label, start, stop = (int(row[key]) for key in ("class", "startTime_usec", "endTime_usec"))
                        require(1 <= label <= self.num_classes, f"class: expected 1 to 11, got {label}")
                        found.append(Recording(str(trials.parent / name), label - 1, start, stop))
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise LrfdynError(f"root: cannot read {path} ({explain(error)})") from None
        require(bool(found), f"root: {trials} lists no gestures")
        return found


@register_data("ncaltech101")
class NCaltech101(EventData):
    """Images of Caltech-101 on a screen, seen by a camera that moves (Orchard et al., 2015): `CLASS/*.bin`, in `root`
    or in `Caltech101` there. All folders are classes, that of the background too. There is no official split: in sorted
    order the first 90 % of every class are for training. Frames are 180 x 240 pixels, scaled to a square of 128.
    `options` are those of `EventData`."""

    num_classes, image_size = 101, 128
    sensor = (180, 240)

    def __init__(self, root: Path, augment: Augmentation, **options: Any) -> None:
        inside = next((n for n in ("Caltech101", "extract/Caltech101") if (root / n).is_dir()), "")
        self.class_names, recordings = in_folders(root / inside, (".bin",))
        self.num_classes = len(self.class_names)
        super().__init__(root, *first_of_classes(recordings, self.num_classes), augment, **options)


@register_data("event_folder")
class EventFolder(EventData):
    """Recordings of one's own: `train/CLASS/*` and `test/CLASS/*` in any format of `read_events`. `sensor_size` is the
    (height, width) of the camera, which may be left out where the first recording says it; one that is not square needs
    `image_size`. The other `options` are those of `EventData`."""

    def __init__(
        self, root: Path, augment: Augmentation, *, sensor_size: Sequence[int] | None = None, **options: Any
    ) -> None:
        (classes, train), (others, test) = (in_folders(root / part, tuple(READERS)) for part in ("train", "test"))
        for name in sorted(set(classes) ^ set(others)):
            raise LrfdynError(f"root: the class folder {name} is in only one of {root}/{{train,test}}")
        size = read_events(train[0].path).size if sensor_size is None else (*sensor_size,)
        if size is None or len(size) != 2:
            raise LrfdynError(f"sensor_size: expected height and width, which {train[0].path} does not say, got {size}")
        square = size[0] == size[1] or options.get("image_size") is not None
        require(square, f"image_size: expected one, for frames of {size[0]} x {size[1]} pixels become square")
        self.sensor, self.image_size = size, size[0]
        self.class_names, self.num_classes = classes, len(classes)
        super().__init__(root, train, test, augment, **options)
