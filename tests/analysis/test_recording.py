"""What a model does with one recording step by step, and the page that holds it."""

from __future__ import annotations

import json
import re
import zlib
from base64 import b64decode
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lrfdyn.analysis import attention_maps, firing_rates, follow_recording, measure_model, write_recording_page
from lrfdyn.analysis.report import recording as report
from lrfdyn.analysis.report.recording import packed, recording_results
from lrfdyn.cli import main
from lrfdyn.data.recordings import Events, Framing, integrate
from lrfdyn.deploy import EarlyExit, TimeStream
from lrfdyn.errors import LrfdynError
from lrfdyn.models.base import SpikingModel
from tests.analysis.made_up import HOSTILE, Page
from tests.data.recordings import atis, recording
from tests.deploy.small import small

NAMES = ("left", "right", "up", "down", "still")
HOSTS = [("spikformer_dvs", None), ("spikformer_dvs", "lrf_dyn"), ("qkformer_dvs", "lrf_dyn"), ("sdt_v1_dvs", None)]


def trained(host: str = "spikformer_dvs", kind: str | None = "lrf_dyn", by: Any = "number") -> SpikingModel:
    """A model that takes three frames of a camera of 34 x 34 pixels, scaled to its own size."""
    model = small(host, kind, in_channels=2, time_steps=3)
    model.framing, model.class_names = Framing(3, by, (34, 34), model.input_size[1]), NAMES
    return model


def unpack(values: dict[str, str]) -> np.ndarray:
    return np.frombuffer(zlib.decompress(b64decode(values["data"])), values["type"])


@pytest.mark.parametrize(("host", "kind"), HOSTS)
@torch.no_grad()
def test_numbers_are_those_of_the_parallel_pass(host, kind):
    model = trained(host, kind).double()
    assert model.framing is not None
    frames = model.framing.frames(recording(1, 4000)).double()
    found, film = follow_recording(model.train(), frames), frames.unsqueeze(1)
    assert model.training, "a measurement leaves the model as it was"
    model.eval()
    alone = torch.tensor(found["step_logits"], dtype=torch.float64)
    torch.testing.assert_close(alone, model.forward_steps(film)[:, 0], rtol=0, atol=1e-12)
    for steps in (1, 2, 3):
        assert found["logits"][steps - 1] == model(film[:steps])[0].tolist()
        counted = firing_rates(model, film[:steps])["by_layer"]  # of all these frames together
        assert list(found["firing"]) == list(counted)
        means = {layer: sum(rates[:steps]) / steps for layer, rates in found["firing"].items()}
        assert means == pytest.approx(counted, abs=1e-12)
    assert any(len({*rates}) == 3 for rates in found["firing"].values()), "the steps must differ"
    terms = TimeStream(model).state_terms()
    assert found["state_bytes"] == sum(term.bytes for term in terms) > 0
    assert [term.name for term in terms[:-1]] == list(found["firing"])  # the order of the network


@pytest.mark.parametrize(("host", "kind"), HOSTS)
def test_every_measurement_takes_recordings(host, kind):
    """Frames `[T, B, 2, H, W]` of two recordings, in batches of one, give what both give together."""
    model = small(host, kind, in_channels=2, time_steps=3)
    side = model.input_size[1]
    events = [recording(seed, 3000, (side, side)) for seed in (1, 2)]
    frames = torch.stack([torch.from_numpy(integrate(one, 3, size=(side, side))) for one in events], 1)
    both, first, second = (measure_model(model, [part]) for part in (frames, *frames.split(1, 1)))
    for name in ("accumulates", "multiply_accumulates", "energy_pj"):
        assert both["energy"][name] == pytest.approx((first["energy"][name] + second["energy"][name]) / 2)
    rates = {name: (rate + second["firing_by_layer"][name]) / 2 for name, rate in first["firing_by_layer"].items()}
    assert both["firing_by_layer"] == pytest.approx(rates)
    stem = both["energy"]["layers"][0]
    assert stem["accumulates"] > 0 == stem["multiply_accumulates"], "counts of events are added, and not multiplied"
    assert any("n events are n spikes" in line for line in both["energy"]["assumptions"])
    assert not any("image" in line for line in both["energy"]["assumptions"])
    fields = [np.array(record["receptive_field"]["map"]) for record in (both, first)]
    assert [field.shape for field in fields] == [(side, side)] * 2
    assert both["peak_inference_bytes"] == first["peak_inference_bytes"] > 0  # of one recording
    assert both["state_bytes"] > 0
    assert sum(both["locality"]["share"]) == pytest.approx(1)
    maps = attention_maps(model, frames, [(0, 0)])["maps"]
    assert len(maps) == 2
    for i, (found,) in enumerate(maps):
        (alone,) = attention_maps(model, frames[:, i : i + 1], [(0, 0)])["maps"][0]
        assert alone == found
        assert found["average"] is None or np.sum(found["average"]) == pytest.approx(1, abs=1e-3)


def test_takes_frames_of_one_recording():
    with pytest.raises(LrfdynError, match=r"frames: expected those of one recording, \[T, C, H, W\], got \[3, 1, 2"):
        follow_recording(trained(), torch.zeros(3, 1, 2, 32, 32))


@pytest.mark.parametrize("by", ["number", "time"])
def test_page_holds_the_recording(by, tmp_path):
    events, model, path = recording(2, 700), trained(by=by), tmp_path / "page.html"
    predicted = write_recording_page(path, model, events, name="a.bin", command="lrfdyn predict a.bin")
    data = Page(path.read_text(encoding="utf-8")).data()
    held = {name: unpack(values) for name, values in data["recording"]["events"].items()}
    assert np.array_equal(np.cumsum(held["t"]) + events.t[0], events.t)
    assert all(np.array_equal(held[name], getattr(events, name)) for name in "xyp")
    assert model.framing is not None
    assert data["recording"]["ends"] == model.framing.ends(events).tolist()
    frames = model.framing.frames(events)
    shown = unpack(data["frames"]).reshape(frames.shape) * data["frames"]["scale"]
    np.testing.assert_allclose(shown, frames, atol=float(frames.max()) / 500)
    logits = torch.tensor(follow_recording(model, frames)["logits"], dtype=torch.float64)
    assert data["scores"] == [[round(x, 6) for x in row] for row in logits.softmax(-1).tolist()]
    best = int(logits[-1].argmax())
    assert predicted == {"class": best, "name": NAMES[best], "score": float(logits[-1].softmax(-1).max()), "steps": 3}
    facts = dict(data["facts"])
    assert facts["Prediction"] == f"{NAMES[best]}, {predicted['score']:.1%}"
    assert facts["Carried from frame to frame"] == f"{state(model):,} bytes"
    assert facts["Frames"] == f"3 of {'233 events' if by == 'number' else '0.698 ms'} each, scaled to 32 x 32"
    assert facts["Attention"] == "LRF-Dyn"
    assert not re.search(r"(src|href)=\"(?!data:|#)", path.read_text(encoding="utf-8"))


def state(model: SpikingModel) -> int:
    return sum(term.bytes for term in TimeStream(model).state_terms())


def test_counts_stay_counts_where_frames_are_not_scaled():
    model = small("spikformer_dvs", image_size=34, in_channels=2, time_steps=3)
    model.framing = Framing(3, "number", (34, 34), 34)
    events = recording(3, 900)
    frames = recording_results(model, events, "a", None)["frames"]
    assert frames["scale"] == 1
    assert np.array_equal(unpack(frames).reshape(3, 2, 34, 34), model.framing.counts(events))


def test_stops_where_early_exit_stops():
    model, events = trained(), recording(4, 900)
    assert model.framing is not None
    frames = model.framing.frames(events).unsqueeze(1)
    scores = torch.tensor(recording_results(model, events, "a", None)["scores"]).amax(1)
    for threshold in (0.0, float(scores[:2].mean()), float(scores.max()) - 1e-4, 1.0):
        logits, steps = EarlyExit(model, threshold)(frames)
        found = recording_results(model, events, "a", threshold)
        assert found["exit"] == {"threshold": threshold, "step": int(steps) - 1, "sure": threshold < 1}
        assert (found["predicted"]["class"], found["predicted"]["steps"]) == (int(logits.argmax()), int(steps))
        words = f"after frame {int(steps)} of 3" if threshold < 1 else "never above 1"
        assert dict(found["facts"])["Stops"].startswith(words)


def test_a_long_recording_is_thinned(monkeypatch):
    monkeypatch.setattr(report, "MOST_EVENTS", 100)
    events = recording(5, 450)
    held = recording_results(trained(), events, "a", None)["recording"]
    assert (held["count"], held["shown"]) == (450, 90)  # every fifth
    assert np.array_equal(np.cumsum(unpack(held["events"]["t"])), events.t[::5] - events.t[0])


def test_a_page_stays_small(monkeypatch):
    """A recording of a DVS128 in 16 frames, of random places, which cannot be packed well."""
    model, events, rows = trained(), recording(6, 300_000, (128, 128)), [[0.0] * 5] * 16
    model.framing = Framing(16, "number", (128, 128), 128)
    measured = {"logits": rows, "step_logits": rows, "firing": {"a": [0.1] * 16}, "state_bytes": 8}
    monkeypatch.setattr(report, "follow_recording", lambda *_: measured)
    assert len(json.dumps(recording_results(model, events, "a", None))) < 2.5e6


def test_numbers_are_packed_in_the_bytes_they_need():
    for most, kind in ((255, "uint8"), (256, "uint16"), (65536, "uint32"), (2**32, "float64")):
        values = np.array([0, most])
        assert packed(values)["type"] == kind
        assert np.array_equal(unpack(packed(values)), values)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    trained().save_pretrained(folder / "run" / "model")
    for i in range(2):
        (folder / f"{i}.bin").write_bytes(atis(recording(i, 600)))
    return folder


def test_command_writes_the_page_of_what_it_says(place, tmp_path, capsys):
    path = tmp_path / "new" / "page.html"
    command = ["predict", str(place / "1.bin"), "--model", str(place / "run"), "--page", str(path)]
    assert main([*command, "--exit", "1", "--json", "-"]) == 0
    (record,) = json.loads(capsys.readouterr().out)["recordings"]
    assert record["page"] == str(path)
    data = Page(path.read_text(encoding="utf-8")).data()
    assert data["predicted"] == {**record["predictions"][0], "steps": 3}
    assert [max(row) for row in data["scores"]] == pytest.approx(
        [step["predictions"][0]["score"] for step in record["steps"]], abs=1e-6
    )
    assert data["title"] == "Recording 1.bin"
    assert main(command) == 0
    assert capsys.readouterr().out.endswith(f"page: {path}\n")


def test_bad_input_of_the_command_is_one_line(place, tmp_path, capsys):
    small("spikformer").save_pretrained(tmp_path / "images")
    (tmp_path / "broken.bin").write_bytes(b"123")
    both, model = [str(place / f"{i}.bin") for i in range(2)], ["--model", str(place / "run")]
    page = ["--page", str(tmp_path / "page.html")]
    segment = ["--task", "segmentation", "--out", str(tmp_path)]
    for arguments, message in [
        ([*both, *model, *page], "page: expected one recording, got 2"),
        ([both[0], "--model", str(tmp_path / "images"), *page], "page: only for recordings in torch; .* takes images"),
        ([both[0], *model, "--page", str(tmp_path)], "page: expected a file, got the folder"),
        ([both[0], *model, *page, *segment], "page: only with --task classification"),
    ]:
        assert main(["predict", *arguments]) == 2
        assert re.fullmatch(f"lrfdyn predict: error: {message}.*\n", capsys.readouterr().err)
    assert main(["predict", str(tmp_path / "broken.bin"), *model, *page]) == 1
    assert not (tmp_path / "page.html").exists()


def test_errors_of_the_function(tmp_path):
    images = small("spikformer", num_classes=5)
    with pytest.raises(LrfdynError, match="model: expected one that was trained on recordings"):
        write_recording_page(tmp_path / "a.html", images, recording(), name="a")
    with pytest.raises(LrfdynError, match="exit: expected a number from 0 to 1, got 2"):
        write_recording_page(tmp_path / "a.html", trained(), recording(), name="a", exit=2)
    none = np.zeros(0, np.int64)
    with pytest.raises(LrfdynError, match="events: expected at least one event"):
        write_recording_page(tmp_path / "a.html", trained(), Events(none, none, none, none), name="a")


def test_names_stay_text(tmp_path):
    model, path = trained(), tmp_path / "page.html"
    model.class_names = (HOSTILE,) * 5
    write_recording_page(path, model, recording(), name=HOSTILE)
    page = Page(path.read_text(encoding="utf-8"))
    assert page.data()["classes"] == [HOSTILE] * 5
    assert not any(item.get("id") == "broken" for _, item in page.elements)
