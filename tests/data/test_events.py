"""Data sets of recordings: splits, frames and the file that keeps them."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lrfdyn import LrfdynError
from lrfdyn.data import Augmentation, array_file, create_data, events
from lrfdyn.data.events import EventData
from lrfdyn.data.recordings import Events, Framing, integrate, read_events
from lrfdyn.files import in_turn
from tests.data.recordings import aedat2, aedat3, atis, npz, recording, write_nmnist


def create(name: str, root: Path, **options: Any) -> EventData:
    source = create_data(name, root, Augmentation(), **options)
    assert isinstance(source, EventData)
    return source


def write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("by", ["number", "time"])
def test_nmnist_frames(tmp_path: Path, by: Any) -> None:
    write_nmnist(tmp_path / "N-MNIST", 2, 1)
    data = create("nmnist", tmp_path, frames=3, split_by=by)
    assert (data.train_images, data.test_images, data.num_classes, data.image_size) == (20, 10, 10, 34)
    (batch,) = data.test_batches(batch_size=10)
    assert batch.labels.tolist() == list(range(10))
    for digit in range(10):
        whole = read_events(tmp_path / f"N-MNIST/Test/{digit}/00000.bin")
        frames = torch.from_numpy(integrate(whole, 3, by=by, size=(34, 34)))
        assert torch.equal(batch.images[:, digit], frames)
        assert torch.equal(data.framing.frames(whole), frames)
    (batch,) = data.train_batches(epoch=0, seed=0, batch_size=20)
    first = int(data.order(0, 0)[0])
    path = tmp_path / f"N-MNIST/Train/{first // 2}/{first % 2:05d}.bin"
    assert torch.equal(batch.images[:, 0], data.framing.frames(read_events(path)))


def test_cifar10dvs_takes_the_first_of_every_class(tmp_path: Path) -> None:
    """In the order of the names, in which 10 comes before 2."""
    for name in events.CIFAR10DVS.class_names:
        for i in range(11):
            write(tmp_path / name / f"cifar10_{name}_{i}.aedat", aedat2(recording(i, 30, (128, 128))))
    data = create("cifar10dvs", tmp_path, frames=2, image_size=64)
    assert (data.train_images, data.test_images) == (100, 10)
    assert [Path(data.recordings[i].path).stem for i in data.rows["test"]] == [
        f"cifar10_{name}_9" for name in data.class_names
    ]
    batch = data.pick_test_images(np.array([0, 3]))
    whole = torch.from_numpy(integrate(recording(9, 30, (128, 128)), 2, size=(128, 128)))
    scaled = F.interpolate(whole, (64, 64), mode="bilinear", antialias=True)
    assert batch.images.shape == (2, 2, 2, 64, 64)
    torch.testing.assert_close(batch.images[:, 0], scaled)


def test_gestures_are_cut_out_of_their_files(tmp_path: Path) -> None:
    folder = tmp_path / "DvsGesture"
    whole = {name: recording(i, 3000, (128, 128)) for i, name in enumerate(("user01_led", "user24_led"))}
    for (name, own), part in zip(whole.items(), ("train", "test"), strict=True):
        write(folder / f"{name}.aedat", aedat3(own))
        rows = "class,startTime_usec,endTime_usec\n11,1100,4000\n1,4000,6000\n"
        write(folder / f"{name}_labels.csv", rows.encode())
        write(folder / f"trials_to_{part}.txt", f"{name}.aedat\n".encode())
    data = create("dvs128_gesture", tmp_path, frames=4)
    assert (data.train_images, data.test_images) == (2, 2)
    (batch,) = data.test_batches(batch_size=2)
    assert batch.labels.tolist() == [10, 0]
    for i, (start, stop) in enumerate(((1100, 4000), (4000, 6000))):
        expected = integrate(whole["user24_led"].between(start, stop), 4, size=(128, 128))
        assert torch.equal(batch.images[:, i], torch.from_numpy(expected))
    write(folder / "user24_led_labels.csv", b"class,startTime_usec,endTime_usec\n1,1,2\n")
    with pytest.raises(LrfdynError, match=r"user24_led\.aedat from 1 to 2 µs: events: expected at least one event"):
        create("dvs128_gesture", tmp_path).counts()
    for text in (
        b"class,startTime_usec,endTime_usec\n12,1,2\n",
        b"class\n1\n",
        b"class,startTime_usec,endTime_usec\n,,",
    ):
        write(folder / "user24_led_labels.csv", text)
        with pytest.raises(LrfdynError, match=r"root: cannot read .*user24_led_labels\.csv"):
            create("dvs128_gesture", tmp_path)


def test_ncaltech101_becomes_square(tmp_path: Path) -> None:
    for name in ("BACKGROUND_Google", "ant"):
        for i in range(3):
            write(tmp_path / "Caltech101" / name / f"image_{i}.bin", atis(recording(i, 50, (180, 240))))
    data = create("ncaltech101", tmp_path, frames=2)
    assert data.class_names == ["BACKGROUND_Google", "ant"]
    assert (data.num_classes, data.train_images) == (2, 6)  # 90 % of three, rounded up
    batch = next(data.train_batches(epoch=0, seed=0, batch_size=3))
    assert batch.images.shape == (2, 3, 2, 128, 128)


def test_own_recordings_of_any_format(tmp_path: Path) -> None:
    own = recording(5, 100, (40, 40))
    for part in ("train", "test"):
        for name, data in {"a/1.npz": npz(own), "a/2.bin": atis(own), "b/3.aedat": aedat3(own)}.items():
            write(tmp_path / part / name, data)
    data = create("event_folder", tmp_path, sensor_size=[40, 40], frames=2)
    assert (data.class_names, data.train_images, data.image_size) == (["a", "b"], 3, 40)
    (batch,) = data.test_batches(batch_size=3)
    for i in range(3):
        assert torch.equal(batch.images[:, i], torch.from_numpy(integrate(own, 2, size=(40, 40))))
    with pytest.raises(LrfdynError, match=r"sensor_size: expected height and width, which .*1\.npz does not say"):
        create("event_folder", tmp_path)
    with pytest.raises(LrfdynError, match="image_size: expected one, for frames of 40 x 50 pixels become square"):
        create("event_folder", tmp_path, sensor_size=(40, 50))
    assert create("event_folder", tmp_path, sensor_size=(40, 50), image_size=20).framing.size == 20
    two = aedat2(recording(5, 100, (128, 128)))
    write(tmp_path / "train/a/0.aedat", two)
    assert create("event_folder", tmp_path).sensor == (128, 128)
    with pytest.raises(LrfdynError, match=r"0\.aedat: size: expected a sensor of 40 x 40 pixels, got one of 128 x 128"):
        create("event_folder", tmp_path, sensor_size=[40, 40]).counts()
    write(tmp_path / "train/c/0.aedat", two)
    with pytest.raises(LrfdynError, match="the class folder c is in only one of"):
        create("event_folder", tmp_path)


def test_frames_are_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_nmnist(tmp_path, 2, 1)
    made: list[str] = []
    monkeypatch.setattr(events, "read_events", lambda path: made.append(path) or read_events(path))

    def counts(**options: Any) -> tuple[int, np.ndarray]:
        made.clear()
        found = create("nmnist", tmp_path, **options).counts()
        return len(made), np.array(found)

    number, first = counts(frames=2)
    assert number == 30
    assert isinstance(create("nmnist", tmp_path, frames=2).counts(), np.memmap)
    assert counts(frames=2, workers=0)[0] == 0
    assert counts(frames=2, image_size=17)[0] == 0  # scaled from the same frames
    assert counts(frames=3)[0] == 30
    assert counts(frames=2, split_by="time")[0] == 30
    assert counts(frames=2)[0] == 0
    file = tmp_path / ".frames" / "NMNIST_2_number"
    whole = file.read_bytes()
    for damaged in (whole[:-1], whole + b"x", b"", b"x" * len(whole), whole.replace(b'"format": 1', b'"format": 0')):
        file.write_bytes(damaged)
        number, again = counts(frames=2)
        assert number == 30
        np.testing.assert_array_equal(again, first)
    path = tmp_path / "Test/3/00000.bin"
    path.write_bytes(path.read_bytes()[5:])
    number, again = counts(frames=2)
    assert number == 30
    assert (again != first).any()
    os.utime(path, ns=(0, 0))
    assert counts(frames=2)[0] == 30
    (tmp_path / "Train/3/00002.bin").write_bytes(path.read_bytes())
    assert counts(frames=2)[0] == 31
    elsewhere = tmp_path / "elsewhere"
    assert counts(frames=2, cache=str(elsewhere))[0] == 31
    assert (elsewhere / "NMNIST_2_number").is_file()


def test_processes_make_the_same_frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_nmnist(tmp_path, 1, 1)
    alone = np.array(create("nmnist", tmp_path, workers=0).counts())
    monkeypatch.setattr(events, "TOGETHER", 3)
    together = create("nmnist", tmp_path, workers=2, cache=str(tmp_path / "other")).counts()
    np.testing.assert_array_equal(together, alone)


def test_many_events_of_a_pixel(tmp_path: Path) -> None:
    write_nmnist(tmp_path, 1, 1)
    busy = Events(np.arange(700), np.full(700, 7), np.full(700, 8), np.ones(700, int))
    (tmp_path / "Test/9/00000.bin").write_bytes(atis(busy))
    data = create("nmnist", tmp_path, frames=2)
    assert data.counts().dtype == np.uint16
    assert data.pick_test_images(np.array([9])).images[:, 0, 1, 8, 7].tolist() == [350, 350]


def test_a_recording_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    write_nmnist(tmp_path, 1, 1)
    path = tmp_path / "Train/4/00000.bin"
    for data, words in (
        (b"", "it is empty"),
        (b"1234", "its last event is cut off"),
        (atis(recording(0, 50, (40, 40))), "expected a sensor of 34 x 34 pixels, got one of 40 x"),
    ):
        path.write_bytes(data)
        with pytest.raises(LrfdynError, match=words) as error:
            create("nmnist", tmp_path).counts()
        assert str(path) in str(error.value)
    assert not list((tmp_path / ".frames").iterdir())
    data = create("nmnist", tmp_path)
    path.unlink()
    with pytest.raises(LrfdynError, match=r"cannot read the recording .*4/00000\.bin \(No such file"):
        data.counts()


def test_wrong_folders_and_options(tmp_path: Path) -> None:
    write_nmnist(tmp_path, 1, 1)
    (tmp_path / "file").touch()
    with pytest.raises(LrfdynError, match=r"cache: cannot write in the folder .*; data\.options\.cache names another"):
        create("nmnist", tmp_path, cache=str(tmp_path / "file" / "inside")).counts()
    for options, words in (
        ({"frames": 0}, "frames: expected an integer >= 1"),
        ({"split_by": "size"}, "split_by: expected number or time"),
        ({"image_size": 0}, "image_size: expected an integer >= 1"),
        ({"workers": -1}, "workers: expected an integer >= 0"),
        ({"step": 1}, "option of nmnist: unknown name 'step'"),
    ):
        with pytest.raises(LrfdynError, match=words):
            create("nmnist", tmp_path, **options)
    with pytest.raises(LrfdynError, match=r"augmentation\.erase: is not for images of nmnist"):
        create_data("nmnist", tmp_path, Augmentation(erase=0.5))
    with pytest.raises(LrfdynError, match="crop: expected pad or none for recordings"):
        create_data("nmnist", tmp_path, Augmentation(crop="resized"))
    (tmp_path / "Train/10").mkdir()
    with pytest.raises(LrfdynError, match=r"the class folder .*10 has no recordings"):
        create("nmnist", tmp_path)
    write(tmp_path / "Train/10/1.bin", atis(recording()))
    with pytest.raises(LrfdynError, match=r"expected the class folders 0, .*, 9 in .*Train, differs \['10'\]"):
        create("nmnist", tmp_path)


def test_processes_take_turns(tmp_path: Path) -> None:
    order: list[int] = []

    def second() -> None:
        with in_turn(tmp_path):
            order.append(2)

    with in_turn(tmp_path):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(0.12)
        order.append(1)
    thread.join()
    assert order == [1, 2]


def test_another_process_made_the_frames_meanwhile(tmp_path: Path) -> None:
    path, facts = tmp_path / "frames", {"shape": [2, 1, 2, 3, 3]}
    counts = np.arange(36).reshape(2, 1, 2, 3, 3)
    expected = np.array(array_file.cached_array(path, facts, lambda: [counts], "frames"))
    np.testing.assert_array_equal(expected, counts)
    aside = path.rename(tmp_path / "aside")
    with in_turn(tmp_path):
        result: list[np.ndarray] = []
        other = threading.Thread(target=lambda: result.append(array_file.cached_array(path, facts, pytest.fail, "")))
        other.start()
        other.join(0.12)
        aside.rename(path)
    other.join()
    np.testing.assert_array_equal(result[0], counts)


def test_framing_as_json() -> None:
    framing = Framing(4, "time", (18, 24), 12)
    values = {**framing.as_dict(), "sensor": [18, 24]}
    assert Framing.from_dict(values, "here") == framing
    for wrong in ({"steps": 0}, {"by": "size"}, {"sensor": [1]}, {"sensor": [0, 4]}, {"size": "12"}, {"other": 1}):
        with pytest.raises(LrfdynError, match="here: framing: "):
            Framing.from_dict({**values, **wrong}, "here")
    with pytest.raises(LrfdynError, match="here: framing: "):
        Framing.from_dict([1], "here")
