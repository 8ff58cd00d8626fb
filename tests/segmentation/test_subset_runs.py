"""The script that measures the three attentions on a small part of ADE20K, at a small size."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from benchmarks import ade20k_subset, segmentation_test
from docs.parts.segmentation import subset
from lrfdyn.errors import LrfdynError
from lrfdyn.models import create_model
from tests.segmentation.make import RECIPE, TINY_HEAD, TINY_HOST, shapes, write_pair, write_shapes

pytest.importorskip("accelerate")
KEYS = {
    "model.name": "sdt_v3_t",
    "model.options": json.dumps(TINY_HOST),
    "model.head": json.dumps(TINY_HEAD),
    "data.image_size": "32",
    "data.options": "{num_classes: 3, workers: 1}",
    "optimizer.learning_rate": str(RECIPE["optimizer"]["learning_rate"]),
    "run.batch_size": "4",
    "run.precision": "fp32",
}
SMALL = [part for key, value in KEYS.items() for part in ("--set", key, value)]


@pytest.fixture
def script(monkeypatch):
    for name, value in {"WARM_UP": 1, "RESERVE_S": 1, "FIGURE_S": 1, "MOST_EPOCHS": 1}.items():
        monkeypatch.setattr(ade20k_subset, name, value)
    return ade20k_subset


def summaries(out: Path) -> dict[str, dict]:
    return {path.parent.name: json.loads(path.read_text()) for path in out.glob("*/summary.json")}


def test_the_whole_sequence(script, tmp_path, capsys):
    """Speed, three runs of the same length, summaries, figure."""
    data, out = write_shapes(tmp_path / "data", train=16, validation=3), tmp_path / "results"
    given = ["--root", str(data), "--out", str(out), "--minutes", "2", "--timed", "2", "--scenes", "2"]
    assert script.main([*given, "--models", str(tmp_path / "models"), *SMALL]) == 0
    found = summaries(out)
    assert set(found) == {"sdt_v3_t_ssa", "sdt_v3_t_lrf_ssa", "sdt_v3_t_lrf_dyn"}
    for summary in found.values():
        assert summary["epochs"] == 1
        assert 0 <= summary["miou"] <= 100
        assert summary["backbone"] is None
        assert "ade20k_subset.py --root DATA --minutes 2" in summary["command"]
    assert all((out / name / "log.jsonl").is_file() for name in found)
    assert not any(str(tmp_path) in path.read_text() for path in out.glob("*/*"))
    assert (out / "figure.jpg").is_file()
    assert {path.name for path in (tmp_path / "models").iterdir()} == {"ssa", "lrf_ssa", "lrf_dyn"}
    printed = capsys.readouterr().out
    for phase in ("ssa: measuring the speed", "s per epoch", "ssa: 1 epochs", "epoch 1: loss", "figure", "3 of 3 runs"):
        assert phase in printed, phase
    section = subset(out)
    for summary in found.values():
        assert f"| {summary['miou']:.2f} |" in section
        found_classes = sum(
            float(row["iou"]) > 0
            for row in csv.DictReader((out / f"sdt_v3_t_{summary['attention']}" / "classes.csv").open())
        )
        assert f"| {summary['pixel_accuracy']:.2f} | {found_classes} of " in section
    assert "| training and validation pairs | 16 and 3 |" in section
    assert "shared" not in section
    (out / "sdt_v3_t_ssa" / "summary.json").write_text(json.dumps({**found["sdt_v3_t_ssa"], "epochs": 2}))
    with pytest.raises(LrfdynError, match=r"epochs: expected the same in all runs, got \[2, 1, 1\]"):
        subset(out)


def test_a_run_that_fails_takes_no_other_with_it(script, tmp_path, capsys, monkeypatch):
    data, out = write_shapes(tmp_path / "data", train=8, validation=2), tmp_path / "results"
    usual = script.run_training

    def fails(config, *rest, **options):
        if config.model.attention == "lrf_ssa":
            raise RuntimeError("out of memory")
        return usual(config, *rest, **options)

    monkeypatch.setattr(script, "run_training", fails)
    given = ["--root", str(data), "--out", str(out), "--epochs", "1", "--scenes", "1", "--beside", "another run"]
    assert script.main([*given, *SMALL]) == 1
    assert set(summaries(out)) == {"sdt_v3_t_ssa", "sdt_v3_t_lrf_dyn"}
    assert set(json.loads((out / "figure.json").read_text())["pixel_accuracy"]) == {"SSA", "LRF-Dyn"}
    assert "lrf_ssa: failed" in capsys.readouterr().out
    assert subset(out).count("| the GPU was shared | ") == 2


def test_results_are_there_when_a_run_ends(script, tmp_path, monkeypatch):
    """Whatever ends the process later, a figure that fails or a time limit, finds them written."""
    data, out = write_shapes(tmp_path / "data", train=8, validation=2), tmp_path / "results"
    ended = []

    def killed(config, *rest, **options):
        if config.model.attention == "lrf_dyn":
            ended.extend(summaries(out))
            raise SystemExit(143)
        return usual(config, *rest, **options)

    usual = script.run_training
    monkeypatch.setattr(script, "run_training", killed)
    with pytest.raises(SystemExit):
        script.main(["--root", str(data), "--out", str(out), "--epochs", "1", *SMALL, "--attentions", "ssa", "lrf_dyn"])
    assert ended == ["sdt_v3_t_ssa"]


def test_from_a_backbone_of_other_images(script, tmp_path):
    """Classifiers of images of another size, one for each attention; their folder is told without the machine's."""
    data, out = write_shapes(tmp_path / "data", train=8, validation=2), tmp_path / "results"
    for kind in ("ssa", "lrf_dyn"):
        model = create_model("sdt_v3_t", attention=kind, image_size=64, num_classes=7, **TINY_HOST)
        model.save_pretrained(tmp_path / "classifiers" / kind)
    given = ["--root", str(data), "--out", str(out), "--epochs", "1", "--scenes", "1", "--attentions", "ssa", "lrf_dyn"]
    assert script.main([*given, "--backbone", str(tmp_path / "classifiers" / "{attention}"), *SMALL]) == 0
    assert {summary["backbone"] for summary in summaries(out).values()} == {"classifiers/ssa", "classifiers/lrf_dyn"}
    assert not any(str(tmp_path) in path.read_text() for path in out.glob("*/*"))


def test_epochs_that_fit(script, monkeypatch):
    monkeypatch.setattr(script, "MOST_EPOCHS", 100)
    # 1 s for the figure; each of two runs: 1 s, 2 s an epoch, and 3 s for a test after every tenth epoch and the last.
    assert script.epochs_within(1 + 2 * (1 + 2 * 10 + 3), [2.0, 2.0], 3.0, 10) == 10
    assert script.epochs_within(1 + 2 * (1 + 2 * 11 + 3), [2.0, 2.0], 3.0, 10) == 10, "the eleventh has a test more"
    assert script.epochs_within(5, [2.0, 2.0], 3.0, 10) == 0
    assert script.epochs_within(1e9, [2.0], 3.0, 10) == 100


def test_time_of_a_test(tmp_path, capsys):
    """Three images of three sizes: two are padded to one, so the second test and one batch of the first know theirs."""
    data = write_shapes(tmp_path / "data", train=8, validation=3)
    write_pair(data, "validation", "wide", *shapes(9, 36, 90))
    first, second = segmentation_test.main(
        ["--root", str(data), *SMALL, "--set", "run.test_batch_size", "1", "--profile"]
    )
    assert (first["new_batches"], first["known_batches"]) == (2, 2)
    assert (second["new_batches"], second["known_batches"]) == (0, 4)
    assert 0 < first["new_s"] + first["known_s"] <= first["all_s"]
    assert "convolution" in capsys.readouterr().out
