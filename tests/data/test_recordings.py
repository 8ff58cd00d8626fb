"""Recordings of event cameras that the tests write, in every format; frames as SpikingJelly has them."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lrfdyn import LrfdynError
from lrfdyn.data import recordings
from lrfdyn.data.recordings import SIDE, Events, integrate, read_events
from tests.data.recordings import FAERY, OWN, aedat2, aedat3, aedat3_head, atis, by_faery, npz, recording


@pytest.fixture(scope="module")
def spikingjelly() -> Iterator[Any]:
    """Two modules of its data sets. Importing all of them wants torchvision, of which these functions use nothing."""
    package = pytest.importorskip("spikingjelly", exc_type=ImportError)
    names = ("DatasetFolder", "check_integrity", "download_url", "extract_archive", "transforms")
    stand_ins = ["spikingjelly.datasets"]
    if importlib.util.find_spec("torchvision") is None:
        stand_ins += ["torchvision", "torchvision.datasets", "torchvision.datasets.utils"]
    with pytest.MonkeyPatch.context() as patch:
        for name in stand_ins:
            stand_in = types.ModuleType(name)
            vars(stand_in).update(dict.fromkeys(names, object), __path__=[f"{package.__path__[0]}/datasets"])
            patch.setitem(sys.modules, name, stand_in)
        modules = {name: importlib.import_module(f"spikingjelly.datasets.{name}") for name in ("utils", "cifar10_dvs")}
        yield types.SimpleNamespace(**modules)
        for name in [name for name in sys.modules if name.startswith("spikingjelly.datasets.")]:
            patch.delitem(sys.modules, name)


def assert_same(first: Any, second: Any) -> None:
    for name in "txyp":
        a, b = (getattr(e, name) if isinstance(e, Events) else e[name] for e in (first, second))
        np.testing.assert_array_equal(a, b, name)


@pytest.mark.parametrize("name", OWN)
def test_own_readers(tmp_path: Path, name: str) -> None:
    events, path = recording(), tmp_path / name
    path.write_bytes(OWN[name](events))
    read = read_events(path)
    assert_same(read, events)
    assert read.size == ((SIDE, SIDE) if name == "two.aedat" else None)


@pytest.mark.parametrize("name", FAERY)
def test_faery_reads(tmp_path: Path, name: str) -> None:
    pytest.importorskip("faery")
    events, path = recording(), tmp_path / name
    by_faery(path, events, (34, 40))
    read = read_events(path)
    shift = int(events.t[0]) if name == "a.es" else 0  # this format does not keep when a recording began
    assert_same(read, Events(events.t - shift, events.x, events.y, events.p))
    assert read.size == (None if name == "a.csv" else (34, 40))


def test_readers_against_spikingjelly(tmp_path: Path, spikingjelly: Any) -> None:
    events = recording(1, 700, (128, 128))
    paths = {name: tmp_path / name for name in OWN}
    for name, path in paths.items():
        path.write_bytes(OWN[name](events))
    assert_same(read_events(paths["a.bin"]), spikingjelly.utils.load_ATIS_bin(paths["a.bin"]))
    assert_same(read_events(paths["three.aedat"]), spikingjelly.utils.load_aedat_v3(paths["three.aedat"]))
    assert_same(read_events(paths["two.aedat"]), spikingjelly.cifar10_dvs._load_origin_data(paths["two.aedat"]))


@pytest.mark.parametrize("by", ["number", "time"])
@pytest.mark.parametrize("steps", [1, 7, 16])
def test_integrate_equals_spikingjelly(spikingjelly: Any, by: Any, steps: int) -> None:
    for count in (16, 500, 1003):
        events = recording(count, count, (20, 34))
        if by == "time" and count == 16:
            continue  # windows without an event are an error there
        fields = {name: getattr(events, name) for name in "txyp"}
        expected = spikingjelly.utils.integrate_events_by_fixed_frames_number(fields, by, steps, 20, 34)
        frames = integrate(events, steps, by=by, size=(20, 34))
        assert frames.dtype == np.float32
        np.testing.assert_array_equal(frames, expected)


def test_few_events_and_empty_windows() -> None:
    three = Events(np.array([0, 1, 100]), np.array([0, 1, 2]), np.zeros(3, int), np.array([0, 1, 1]))
    assert integrate(three, 4, size=(1, 3)).sum((1, 2, 3)).tolist() == [0, 0, 0, 3]
    assert integrate(three, 4, by="time", size=(1, 3)).sum((1, 2, 3)).tolist() == [2, 0, 0, 1]
    one = three.between(1, 100)
    assert len(one) == 1
    assert integrate(one, 2, by="time", size=(1, 3)).sum((1, 2, 3)).tolist() == [0, 1]
    with pytest.raises(LrfdynError, match="expected at least one event"):
        integrate(three.between(2, 100), 2, size=(1, 3))


def test_order_polarity_and_marks(tmp_path: Path) -> None:
    mixed = Events(np.array([5, 1, 5, 3]), np.arange(4), np.arange(4), np.array([-1, 1, 1, -1]))
    assert (mixed.t.tolist(), mixed.x.tolist(), mixed.p.tolist()) == ([1, 3, 5, 5], [1, 3, 0, 2], [1, 0, 0, 1])
    events = recording(count=300)
    overflow = Events(events.t[:1], np.zeros(1, int), np.full(1, 240), np.zeros(1, int))
    path = tmp_path / "overflow.bin"
    path.write_bytes(atis(events.between(0, 1500)) + atis(overflow) + atis(events.between(1500, 9999)))
    late = events.t + recordings.ATIS_PERIOD * (events.t >= 1500)
    assert_same(read_events(path), Events(late, events.x, events.y, events.p))
    marks, path = np.arange(300) % 3 // 2, tmp_path / "marks.aedat"
    late = Events(events.t + 2**31, events.x, events.y, events.p)
    path.write_bytes(aedat3(late, marks=marks))
    kept = marks == 1
    assert_same(read_events(path), Events(late.t[kept], events.x[kept], events.y[kept], events.p[kept]))
    signal = np.array([0x8000, 5], ">u4").tobytes()
    path.write_bytes(aedat2(events) + signal)
    assert_same(read_events(path), events)


def damaged() -> dict[str, tuple[str, bytes, str]]:
    events = recording()
    two, three, packed = aedat2(events), aedat3(events), npz(events)
    davis = b"#!AER-DAT2.0\r\n" + np.array([1 << 22, 5], ">u4").tobytes()
    start = three[: three.index(b"END-HEADER") + 12]
    return {
        "bin cut": ("a.bin", atis(events)[:-2], "its last event is cut off"),
        "bin empty": ("a.bin", b"", "it is empty"),
        "aedat2 cut": ("a.aedat", two[:-3], "its last event is cut off"),
        "aedat2 header": ("a.aedat", two[:20], "it has no events"),
        "aedat2 davis": ("a.aedat", davis, "not those of a DVS128"),
        "aedat empty": ("a.aedat", b"", "it is empty"),
        "aedat4 as aedat": ("a.aedat", b"#!AER-DAT4.0\r\n" + bytes(40), "does not begin as AEDAT"),
        "aedat3 cut": ("a.aedat", three[:-3], "its last packet is cut off"),
        "aedat3 head cut": ("a.aedat", start + three[len(start) : len(start) + 11], "its last packet is cut off"),
        "aedat3 header": ("a.aedat", three[:20], "its header does not end"),
        "aedat3 size": ("a.aedat", start + aedat3_head(1, 4, 0, 1, 1, 1) + bytes(4), "8 bytes, here 4"),
        "npz cut": ("a.npz", packed[: len(packed) // 2], "zip"),
        "npz empty": ("a.npz", b"", "it is empty"),
        "npz text": ("a.npz", b"some words", "pickle"),
    }  # fmt: skip


@pytest.mark.parametrize("case", damaged())
def test_damaged_files(tmp_path: Path, case: str) -> None:
    name, data, words = damaged()[case]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(LrfdynError, match=words) as error:
        read_events(tmp_path / name)
    assert f"cannot read the recording {tmp_path / name} (" in str(error.value)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"t": [1], "x": [1], "y": [1]}, "it has no array 'p'"),
        ({"t": [1, 2], "x": [1], "y": [1], "p": [1]}, "x: expected as many numbers as of t, 2, got 1"),
        ({"t": [0.5], "x": [1], "y": [1], "p": [1]}, "t: expected integers"),
        ({"t": [[1]], "x": [1], "y": [1], "p": [1]}, "t: expected integers"),
        ({"t": [1], "x": [-1], "y": [1], "p": [1]}, "expected places >= 0, got -1"),
        ({"t": [], "x": [], "y": [], "p": []}, "t: expected integers"),
        ({"t": np.array([{}]), "x": [1], "y": [1], "p": [1]}, "allow_pickle"),
    ],
)
def test_wrong_arrays(tmp_path: Path, arrays: dict[str, Any], words: str) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(LrfdynError, match=words) as error:
        read_events(tmp_path / "a.npz")
    assert str(tmp_path / "a.npz") in str(error.value)


def test_damaged_files_of_faery(tmp_path: Path) -> None:
    pytest.importorskip("faery")
    for name, damage in (
        ("a.aedat4", lambda data: data[:30] + b"\xff" * 60 + data[90:]),  # ends the process that reads it
        ("a.dat", lambda data: data[:-3]),
        ("a.es", lambda data: data[:10]),
        ("a.raw", lambda data: b""),
    ):
        by_faery(tmp_path / name, recording(), (34, 34))
        (tmp_path / name).write_bytes(damage((tmp_path / name).read_bytes()))
        with pytest.raises(LrfdynError) as error:
            read_events(tmp_path / name)
        assert f"cannot read the recording {tmp_path / name} (" in str(error.value)
        assert "\n" not in str(error.value)


def test_unknown_missing_and_without_faery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LrfdynError, match=r"unknown ending of the recording a\.mp4; known: \.bin, "):
        read_events("a.mp4")
    with pytest.raises(LrfdynError, match=r"cannot read the recording .*none\.bin \(No such file"):
        read_events(tmp_path / "none.bin")
    (tmp_path / "folder.bin").mkdir()
    with pytest.raises(LrfdynError, match="it is no file"):
        read_events(tmp_path / "folder.bin")
    monkeypatch.setattr(recordings, "find_spec", lambda name: None)
    with pytest.raises(LrfdynError, match=r"\.aedat4 needs faery; pip install 'lrfdyn\[events\]'"):
        read_events(tmp_path / "a.aedat4")


def test_sizes() -> None:
    events = recording(size=(34, 34))
    said = Events(events.t, events.x, events.y, events.p, (34, 34))
    assert integrate(said, 2).shape == (2, 2, 34, 34)
    with pytest.raises(LrfdynError, match="expected a sensor of 20 x 34 pixels, got one of 34 x 34"):
        integrate(events, 2, size=(20, 34))
    with pytest.raises(LrfdynError, match="expected a sensor of 128 x 128 pixels, got one of 34 x 34"):
        integrate(said, 2, size=(128, 128))
    with pytest.raises(LrfdynError, match="size: expected the height and width"):
        integrate(events, 2)
    with pytest.raises(LrfdynError, match="expected a sensor of 20 x 20 pixels"):
        Events(events.t, events.x, events.y, events.p, (20, 20))
    with pytest.raises(LrfdynError, match="steps: expected an integer >= 1, got 0"):
        integrate(said, 0)
