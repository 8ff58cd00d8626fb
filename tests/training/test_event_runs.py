"""Runs on recordings of an event camera."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lrfdyn
from lrfdyn import LrfdynError
from lrfdyn.analysis.analyze import analyze, sources_for
from lrfdyn.analysis.measure.observe import load_images
from lrfdyn.analysis.report.write import figures
from lrfdyn.cli import main
from lrfdyn.data.recordings import Framing, read_events
from lrfdyn.models.registry import model_defaults
from lrfdyn.training.config import TrainConfig
from lrfdyn.training.estimate import estimate
from lrfdyn.training.tasks import build_data, data_options
from tests.data.recordings import write_nmnist
from tests.training.runs import Killer, assert_same_end, in_child, tiny, train

STEPS = 10


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return write_nmnist(tmp_path_factory.mktemp("nmnist"))


def small(root: Path | None, **sections: dict[str, Any]) -> TrainConfig:
    augmentation = {"flip": 0.5, "mixup": 0.5, "event_operations": ["shift_x", "cut_out"]}
    mine: dict[str, dict[str, Any]] = {
        "model": {"time_steps": 3},
        "data": {"name": "nmnist", "root": None if root is None else str(root), "image_size": 17},
        "augmentation": augmentation,
        "run": {"batch_size": 8, "checkpoint_steps": 3},
    }
    return tiny(**{name: {**mine.get(name, {}), **sections.get(name, {})} for name in {**mine, **sections}})


@pytest.fixture(scope="module")
def whole(root, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("whole")
    train(small(root), out)
    return out


def test_stopped_and_resumed_is_the_same(root, whole, tmp_path):
    for step in (4, 8):
        assert in_child(lambda: train(small(root), tmp_path, resume="auto", reporter=Killer(step))) == signal.SIGKILL  # noqa: B023
    train(small(root), tmp_path, resume="auto")
    assert_same_end(tmp_path, whole, STEPS)


def test_a_trained_model_knows_its_frames(root, whole, capsys):
    model = lrfdyn.from_pretrained(whole / "model")
    assert model.framing == Framing(3, "number", (34, 34), 17)
    assert model.preprocessing is None
    (batch,) = build_data(small(root)).test_batches(batch_size=20)
    frames = model.framing.frames(read_events(root / "Test/0/00000.bin"))
    assert torch.equal(frames, batch.images[:, 0])
    right = int((model(batch.images).argmax(1) == batch.labels).sum())
    assert main(["evaluate", str(whole)]) == 0
    assert f"top-1 {100 * right / 20:.2f} %" in capsys.readouterr().out


def test_predict_finds_what_evaluate_finds(root, whole, capsys):
    assert main(["predict", str(root / "Test"), "--model", str(whole), "--json", "-"]) == 0
    records = json.loads(capsys.readouterr().out)["recordings"]
    right = [r["predictions"][0]["name"] == Path(r["recording"]).parent.name for r in records]
    assert len(right) == 20
    assert main(["evaluate", str(whole), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["top1"] == 100 * np.mean(right)


def test_analysis_of_recordings(root, whole):
    images = load_images("nmnist", root, 5, 2, torch.device("cpu"), 17, 3)
    assert [batch.shape for batch in images.batches] == [(3, n, 2, 17, 17) for n in (2, 2, 1)]
    source = build_data(small(root))
    batch = source.pick_test_images(np.array([0, 5, 10, 14, 19]))
    assert torch.equal(torch.cat(images.batches, 1), batch.images)
    results = analyze(sources_for(str(whole), images), images, maps=["2"])
    (entry,) = results["attentions"].values()
    assert [picture["name"] for picture in results["pictures"]] == ["recording 1", "recording 5"]
    assert len(entry["attention_maps"]["maps"]) == 2
    assert results["lead"].endswith("analysed on 5 test recordings of nmnist.")
    captions = {name: figure.caption for name, figure in figures(results).items()}
    assert "5 test recordings of nmnist" in captions["firing_rates"]
    assert "The picture is the sum of all frames" in captions["attention_maps"]
    assert not any("image" in text for text in (*captions.values(), *results["notes"]))
    with pytest.raises(LrfdynError, match=r"maps: expected a number of the recordings of nmnist, got a\.png"):
        analyze(sources_for(str(whole), images), images, maps=["a.png"])
    assert entry["energy"]["energy_pj"] > 0
    assert entry["accuracy_on_images"] is not None
    (named,) = sources_for("spikformer_4_384", images)
    assert {key: named.options[key] for key in ("time_steps", "in_channels")} == {"time_steps": 3, "in_channels": 2}
    other = load_images("nmnist", root, 2, 2, torch.device("cpu"), 17)
    with pytest.raises(
        LrfdynError, match="nmnist has 16 frames a recording, the model has 3 time steps; pass --frames"
    ):
        other.of(lrfdyn.from_pretrained(whole / "model"))
    with pytest.raises(LrfdynError, match="frames: random images have none"):
        load_images("random", None, 2, 2, torch.device("cpu"), frames=3)


def test_frames_are_the_time_steps_of_the_model(root):
    assert data_options(small(root))["frames"] == 3
    own = model_defaults("spikformer_dvs_2_256")["time_steps"]
    assert data_options(small(root, model={"name": "spikformer_dvs_2_256", "time_steps": None}))["frames"] == own
    assert data_options(small(root, data={"options": {"frames": 3}}))["frames"] == 3
    with pytest.raises(LrfdynError, match=r"data\.options: frames: expected 3, the model's time steps, got 4"):
        build_data(small(root, data={"options": {"frames": 4}}))


def test_dry_run_without_files(root):
    facts = estimate(small(None))
    assert (facts["train_images"], facts["test_images"], facts["num_classes"]) == (60_000, 10_000, 10)
    assert facts["memory"]["activations"] > 8 * 3 * 2 * 17 * 17 * 4  # the first layer keeps every frame of the batch
    assert estimate(small(root), memory=False)["train_images"] == 40


def test_stages_of_recordings(root, tmp_path):
    stages: list[dict[str, Any]] = [{"epochs": 1, "image_size": 16}]
    config = small(root, schedule={"stages": stages, "epochs": 2}, run={"batch_size": 20, "checkpoint_steps": 100})
    assert train(config, tmp_path)["epochs"] == 2
    with pytest.raises(LrfdynError, match=r"schedule\.stages: time_steps: is for images, and nmnist has frames, got 2"):
        estimate(small(root, schedule={"stages": [{"epochs": 1, "time_steps": 2}]}))
