"""Class names and scores of recordings of an event camera: step by step in PyTorch, at once in exported files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import lrfdyn
from lrfdyn.cli import main
from lrfdyn.data import Framing, Preprocessing, read_events
from lrfdyn.deploy import EarlyExit, TimeStream, export_model
from lrfdyn.deploy.export.formats import save_onnx
from lrfdyn.deploy.follow import Step, follow
from lrfdyn.deploy.predict import Predictor
from lrfdyn.errors import LrfdynError
from tests.data.recordings import aedat2, aedat3, atis, npz, recording
from tests.deploy.small import small

FRAMING = Framing(4, "number", (34, 34), 32)
OTHER = Framing(2, "time", (34, 34), 24)
NAMES = ("left", "right", "up", "down", "still")


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A model, six recordings in a folder and a folder in it, and a picture."""
    folder = tmp_path_factory.mktemp("recordings")
    model = small("spikformer_dvs", "lrf_dyn", in_channels=2, time_steps=4)
    model.framing, model.class_names = FRAMING, NAMES
    model.save_pretrained(folder / "run" / "model")
    (folder / "in" / "more").mkdir(parents=True)
    for i in range(6):
        path = folder / "in" / ("more" if i > 3 else "") / f"{i}.bin"
        path.write_bytes(atis(recording(i, 400 * (i + 1))))
    (folder / "in" / "notes.txt").write_text("of the day")
    Image.new("L", (20, 20)).save(folder / "photo.png")
    return folder


@pytest.fixture(scope="module")
def onnx_file(place) -> Path:
    """Of a network that takes frames of any size, which lies beside it."""
    model = small("sew_resnet", in_channels=2, time_steps=2)
    model.framing, model.class_names = OTHER, NAMES
    model.save_pretrained(place / "other")
    return export_model(model, place / "model.onnx", frames=True, random_images=1).path


def frames_of(paths: list[Path]) -> torch.Tensor:
    return torch.stack([FRAMING.frames(read_events(path)) for path in paths], 1)


@torch.no_grad()
def direct(place: Path, paths: list[Path], steps: int = 4) -> torch.Tensor:
    """Scores of the first `steps` frames at once, `[n, classes]`."""
    model = lrfdyn.from_pretrained(place / "run" / "model")
    return model(frames_of(paths)[:steps]).softmax(1)


def scores(entry: dict[str, Any]) -> list[float]:
    return [p["score"] for p in sorted(entry["predictions"], key=lambda p: p["class"])]


def predict(capsys, *arguments) -> list[dict[str, Any]]:
    assert main(["predict", *map(str, arguments), "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["unreadable"] == 0
    assert "images" not in found
    return found["recordings"]


def test_every_step_is_that_of_the_parallel_pass(place, capsys):
    paths = sorted((place / "in").rglob("*.bin"))
    records = predict(capsys, place / "in", "--model", place / "run")
    assert [record["recording"] for record in records] == list(map(str, paths))
    for number in range(1, 5):
        for record, row in zip(records, direct(place, paths, number), strict=True):
            step = record["steps"][number - 1]
            assert step["step"] == number
            assert scores(step) == pytest.approx(row.tolist(), abs=1e-5)
            assert step["predictions"][0]["name"] == NAMES[row.argmax()]
    for record, path in zip(records, paths, strict=True):
        assert record["predictions"] == record["steps"][-1]["predictions"]
        t = read_events(path).t
        ends = [*t[len(t) // 4 * np.arange(1, 4) - 1], t[-1]]
        assert [step["time_ms"] for step in record["steps"]] == ((np.array(ends) - t[0]) / 1000).tolist()
    assert np.std([scores(record) for record in records], 0).max() > 1e-3  # recordings matter


def test_the_last_step_has_the_bits_of_the_parallel_pass(place):
    model = lrfdyn.from_pretrained(place / "run" / "model").double()
    stream = TimeStream(model)
    for path in sorted((place / "in").rglob("*.bin")):
        events = read_events(path)
        frames = FRAMING.frames(events).double()
        steps = list(follow(stream, frames, FRAMING.ends(events)))
        with torch.no_grad():
            assert torch.equal(steps[-1].logits, model(frames[:, None])[0])
        assert torch.equal(torch.stack([step.frame for step in steps]), frames)


def test_what_is_printed(place, capsys):
    one, folder = str(place / "in" / "1.bin"), str(place / "in")
    model = ["--model", str(place / "run"), "--top", "3"]
    (record,) = predict(capsys, one, *model)
    best = [[f"{p['name']} {p['score']:.1%}" for p in entry["predictions"]] for entry in (*record["steps"], record)]
    times = [f"{step['time_ms']:7.1f} ms" for step in record["steps"]]
    steps = [f"step {i} of 4, {times[i - 1]}: {', '.join(best[i - 1][:2])}" for i in range(1, 5)]
    assert main(["predict", one, *model]) == 0
    assert capsys.readouterr().out.splitlines() == [*steps, f"{one}: {', '.join(best[-1])}"]
    for option, lines in (([], 6), (["--steps"], 30)):  # several: a line each, unless steps are asked for
        assert main(["predict", folder, *model, *option]) == 0
        printed = capsys.readouterr().out.splitlines()
        assert len(printed) == lines
        assert all(text in printed for text in ([f"{one}: {', '.join(best[-1])}"] + steps * (lines == 30)))


def test_steps_are_told_as_they_come(place):
    predictor, seen = Predictor.open(str(place / "run")), []
    stream: TimeStream = predictor.run.stream  # type: ignore[attr-defined]

    def watch(step: Step) -> None:
        assert stream.steps == step.number  # the next frame has not been seen
        assert step.frame.shape == (2, 32, 32)
        seen.append(step.number)

    list(predictor.predict([place / "in" / "0.bin"], watch=watch))
    assert seen == [1, 2, 3, 4]


def test_a_camera_that_is_running(place, capsys):
    """The code of the page, with a recording in packets for a camera: the steps are those of the recording, twice."""
    page = (Path(__file__).parents[1] / "docs" / "events.md").read_text("utf-8")
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "FrameStream" in block]
    path, events = place / "in" / "1.bin", recording(1, 800)  # 200 for each of four frames
    packets = [events.part(first, first + 30) for first in range(0, 800, 30)] * 2
    exec(code.replace("runs/digits/model", str(place / "run" / "model")).replace("=700", "=200"), {"camera": packets})
    printed = capsys.readouterr().out.splitlines()
    (record,) = predict(capsys, path, "--model", place / "run")
    best = [step["predictions"][0] for step in record["steps"]]
    assert printed == [f"{i % 4 + 1} {best[i % 4]['name']} {best[i % 4]['score']:.1%}" for i in range(8)]


def test_stops_when_sure(place, capsys):
    paths, model = sorted((place / "in").rglob("*.bin")), lrfdyn.from_pretrained(place / "run" / "model")
    sure = direct(place, paths, 1).amax(1).median().item()
    early = EarlyExit(model, sure)(frames_of(paths))[1].tolist()
    assert len(set(early)) > 1
    for threshold, expected in ((0, [1] * 6), (sure, early), (1, [4] * 6)):
        records = predict(capsys, place / "in", "--model", place / "run", "--exit", threshold)
        assert [len(record["steps"]) for record in records] == expected
    assert main(["predict", str(paths[0]), "--model", str(place / "run"), "--exit", "0"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 2
    assert printed[1].endswith("(time step 1)")


def test_all_formats(place, tmp_path, capsys):
    events = recording(1, 800)
    for name, data in (("a.bin", atis(events)), ("b.NPZ", npz(events)), ("c.aedat", aedat3(events))):
        (tmp_path / name).write_bytes(data)
    records = predict(capsys, f"{tmp_path}/*", place / "in" / "1.bin", "--model", place / "run")
    assert [Path(record["recording"]).name for record in records] == ["a.bin", "b.NPZ", "c.aedat", "1.bin"]
    assert len({json.dumps(record["steps"]) for record in records}) == 1


def test_bad_recordings_do_not_stop_the_others(place, onnx_file, tmp_path, capsys):
    good = place / "in" / "0.bin"
    bad = {
        "cut.bin": (good.read_bytes()[:-2], "(its last event is cut off)"),
        "empty.bin": (b"", "(it is empty)"),
        "other.aedat": (aedat2(recording()), "(size: expected a sensor of 34 x 34 pixels, got one of 128 x 128)"),
        "words.npz": (b"some words", "pickle"),
        "missing.bin": (None, "(No such file or directory)"),
        "photo.png": (b"", "(expected a recording of an event camera, which ends in .bin, .aedat, .npz, "),
    }
    for name, (data, _) in bad.items():
        if data is not None:
            (tmp_path / name).write_bytes(data)
    given = [good, *(tmp_path / name for name in bad), good]
    for model in (place / "run", onnx_file):
        out = tmp_path / "out.json"
        assert main(["predict", *map(str, given), "--model", str(model), "--json", str(out)]) == 1
        printed = capsys.readouterr()
        assert printed.out.count(f"{good}: ") == 2
        *lines, last = printed.err.splitlines()
        assert len(lines) == len(bad)
        for line, (name, (_, words)) in zip(lines, bad.items(), strict=True):
            assert f"cannot read {tmp_path / name} (" in line
            assert words in line
        assert "6 of 8 recordings could not be read" in last
        result = json.loads(out.read_text())
        assert ["error" in record for record in result["recordings"]] == [False, *[True] * 6, False]


def test_a_model_of_pictures_takes_no_recordings(place, tmp_path, capsys):
    model = small("spikformer", "ssa", in_channels=1)
    model.preprocessing = Preprocessing(16, (0.3,), (0.4,))
    model.save_pretrained(tmp_path)
    given = [str(place / "photo.png"), str(place / "in" / "0.bin")]
    assert main(["predict", *given, "--model", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert printed.out.startswith(f"{given[0]}: class ")
    words = "expected a picture; the model takes no recordings of an event camera"
    assert f"lrfdyn predict: cannot read {given[1]} ({words})\n" in printed.err
    assert main(["predict", given[0], "--model", str(tmp_path), "--steps"]) == 2
    assert f"steps: only for recordings in torch; {tmp_path} takes images" in capsys.readouterr().err


def test_exported_file(place, onnx_file, capsys):
    paths = sorted((place / "in").rglob("*.bin"))
    whole = predict(capsys, place / "in", "--model", place / "other")
    records = predict(capsys, place / "in", "--model", onnx_file, "--batch", 4)
    for record, other in zip(records, whole, strict=True):
        assert set(record) == {"recording", "predictions"}  # the time steps are inside the file
        assert scores(record) == pytest.approx(scores(other), abs=1e-4)
    predictor = Predictor.open(str(onnx_file))
    assert predictor.framing == OTHER
    assert predictor.facts["preprocessing"] is None
    for option, words in (
        (["--exit", "0.9"], "exit: only in torch, got onnx, which computes all time steps"),
        (["--steps"], "gives the logits of all steps"),
    ):
        assert main(["predict", str(paths[0]), "--model", str(onnx_file), *option]) == 2
        assert words in capsys.readouterr().err


def test_graph_of_one_time_step(place, tmp_path, capsys):
    """A NIR file is shown one frame after the other, and needs no option for it."""
    pytest.importorskip("nir")
    assert main(["export", str(place / "run"), "--out", str(tmp_path / "model.nir"), "--check", "2"]) == 0
    assert "preprocessed" not in capsys.readouterr().out
    paths = sorted((place / "in").rglob("*.bin"))
    records = predict(capsys, place / "in", "--model", tmp_path / "model.nir")
    for record, row in zip(records, direct(place, paths), strict=True):
        assert scores(record) == pytest.approx(row.tolist(), abs=1e-4)
    model = lrfdyn.from_pretrained(place / "run" / "model", time_steps=3)
    with pytest.raises(LrfdynError, match="model: steps of its framing: expected its time_steps, 3, got 4"):
        export_model(model, tmp_path / "model.nir")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"framing": None}, "takes films of 2 frames, and does not say how they are made"),
        ({"frames": 3}, "the description of .* has 3 frames, but framing of 2 steps"),
        ({"framing": {"steps": 2}}, "framing: .*missing"),
        ({"framing": {**OTHER.as_dict(), "size": 16}}, "cannot be run"),
        ({"frames": None, "integer": True, "scale": 1}, "has None frames"),
    ],
)
def test_descriptions_that_are_wrong(change, message, place, onnx_file, tmp_path):
    import onnx

    file = onnx.load(onnx_file)
    (entry,) = [entry for entry in file.metadata_props if entry.key == "lrfdyn"]
    file.metadata_props.remove(entry)
    save_onnx(file, tmp_path / "model.onnx", json.loads(entry.value) | change)
    with pytest.raises(LrfdynError, match=f"model: .*{message}"):
        list(Predictor.open(str(tmp_path / "model.onnx")).predict([place / "in" / "0.bin"]))


def test_a_network_that_sees_all_frames_at_once(place, tmp_path, capsys):
    """It has no steps to show, and still says what is in a recording."""
    options = {"dim": 16, "heads": 2, "depth": 1, "mlp_ratio": 1, "in_channels": 2, "image_size": 32, "num_classes": 5}
    model = lrfdyn.create_model("vit_4_384", **options).eval()
    model.framing = FRAMING
    model.save_pretrained(tmp_path)
    path = place / "in" / "0.bin"
    (record,) = predict(capsys, path, "--model", tmp_path)
    with torch.no_grad():
        assert scores(record) == pytest.approx(model(frames_of([path]))[0].softmax(0).tolist(), abs=1e-5)
    assert "steps" not in record
    for option, words in (
        (["--steps"], "gives the logits of all steps"),
        (["--exit", "1"], "a network without spikes has no membranes"),
    ):
        assert main(["predict", str(path), "--model", str(tmp_path), *option]) == 2
        assert words in capsys.readouterr().err


def test_bad_input(place, tmp_path, capsys):
    (tmp_path / "none").mkdir()
    path, model = str(place / "in" / "0.bin"), ["--model", str(place / "run")]
    for given, words in (
        ([str(tmp_path / "none"), *model], "none holds no recordings (.bin, .aedat, .npz, "),
        ([f"{tmp_path}/*.bin", *model], "recordings: nothing matches"),
        ([path, *model, "--exit", "90"], "exit: expected a number from 0 to 1, got 90.0"),
        ([path, *model, "--top", "0"], "top: expected an integer >= 1"),
        ([path, *model, "--task", "segmentation", "--out", "x", "--steps"], "steps: only with --task classification"),
    ):
        assert main(["predict", *given]) == 2
        assert words in capsys.readouterr().err


def test_logits_that_are_not_finite_are_said(place, tmp_path, capsys):
    model = lrfdyn.from_pretrained(place / "run" / "model")
    model.head.weight.data.fill_(3e38)
    model.head.bias.data.fill_(3e38)
    model.save_pretrained(tmp_path)
    path = place / "in" / "0.bin"
    assert main(["predict", str(path), "--model", str(tmp_path)]) == 2
    assert f"model: its logits of {path} are not finite" in capsys.readouterr().err


def test_integers_take_no_recordings(place, tmp_path, capsys):
    assert main(["export", str(place / "run"), "--out", str(tmp_path / "model.c")]) == 2
    assert "model: it was trained on recordings" in capsys.readouterr().err
