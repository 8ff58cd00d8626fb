"""What the benchmarks share, and that every script starts; the scripts are also tested with what they measure."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import before_after, common, integers, loader
from lrfdyn import create_model
from lrfdyn.errors import LrfdynError
from tests.data.make import write_pets, write_tiny_imagenet

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted(
    path.name for path in (ROOT / "benchmarks").glob("*.py") if path.stem not in ("__init__", "common", "zoo_card")
)


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_explains_itself(script, monkeypatch, capsys):
    """As `python benchmarks/SCRIPT --help`, in this process."""
    path = str(ROOT / "benchmarks" / script)
    monkeypatch.setattr(sys, "argv", [path, "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(path, run_name="__main__")
    assert end.value.code == 0
    assert f"usage: {script}" in capsys.readouterr().out


def test_records_of_an_earlier_run_keep_their_machine(tmp_path):
    path = tmp_path / "records.json"
    earlier = {"ms": 1.0, "machine": {"gpu": "another"}, "versions": {"torch": "1.0"}}
    common.write([earlier, {"ms": 2.0}], str(path))
    first, second = json.loads(path.read_text())
    assert first == earlier
    assert second == {"ms": 2.0, **common.about()}
    assert second["versions"]["torch"] != "1.0"


@pytest.mark.parametrize("name", ["tiny_imagenet", "oxford_pets", "oxford_pets_trimaps"])
def test_loader(name, tmp_path, monkeypatch, capsys):
    """With and without augmentation, for every number of processes."""
    pytest.importorskip("PIL")
    (write_tiny_imagenet if name == "tiny_imagenet" else write_pets)(tmp_path)
    out, size = tmp_path / "out.json", [] if name == "tiny_imagenet" else ["--image-size", "24"]
    argv = ["loader.py", name, "--root", str(tmp_path), "--workers", "0", "1", "--batches", "2", "--steps", "2", *size]
    monkeypatch.setattr(sys, "argv", [*argv, "--device", "cpu", "--json", str(out)])
    loader.main()
    records = json.loads(out.read_text())
    assert [(r["workers"], r["augmentation"]) for r in records] == [(0, "none"), (0, "full"), (1, "none"), (1, "full")]
    assert all(record["images_per_s"] > 0 and record["steps"] == 2 for record in records)
    assert "images_per_s" in capsys.readouterr().out


def test_loader_forms(tmp_path, monkeypatch, capsys):
    """The same pictures as files, shards and mapped levels; of what is elsewhere the record has no folder."""
    pytest.importorskip("PIL")
    root, out = tmp_path / "pets", tmp_path / "out.json"
    write_pets(root)
    argv = ["loader.py", "oxford_pets", "--root", str(root), "--forms", str(tmp_path / "forms"), "--image-size", "24"]
    monkeypatch.setattr(sys, "argv", [*argv, "--batches", "2", "--steps", "2", "--device", "cpu", "--json", str(out)])
    threads = torch.get_num_threads()
    try:
        loader.main()
    finally:
        torch.set_num_threads(threads)
    records = json.loads(out.read_text())
    forms = [(record["form"], record["short_side"]) for record in records]
    assert forms == [("one file a picture", "as it is"), ("one file a picture, draft", "as it is"),
                     ("shards", "256"), ("shards", "192"), ("mapped levels", "256")]  # fmt: skip
    assert all(record["images_per_s"] == record["images_per_s_core"] > 0 for record in records)
    assert records[-1]["bytes"] == 256 * 256 * 3
    assert str(tmp_path) not in out.read_text()
    assert "mapped levels" in capsys.readouterr().out


def test_one_that_fails_is_told_and_left_behind(capsys):
    with common.attempt("this one"):
        raise ValueError("no")
    assert "this one: failed: ValueError: no" in capsys.readouterr().out


def test_two_versions_are_measured_in_turn(tmp_path, monkeypatch):
    """Medians of three rounds each; the order alternates; versions are named without git metadata too."""
    order = []

    def measure(folder, options):
        order.append(folder.name)
        speed = {"old": [10.0, 30.0, 20.0], "new": [40.0, 44.0, 48.0]}[folder.name][order.count(folder.name) - 1]
        counts = {"training ssa": {"old": 7, "new": None}[folder.name]}
        return {"speeds": {"training ssa": speed}, "operations": counts, "version": folder.name}

    monkeypatch.setattr(before_after, "measure", measure)
    (tmp_path / "old").mkdir()
    (tmp_path / "new").mkdir()
    out = tmp_path / "out.json"
    given = ["--before", str(tmp_path / "old"), "--after", str(tmp_path / "new"), "--before-commit", "abc"]
    before_after.main([*given, "--json", str(out)])
    assert order == ["old", "new"] * 3
    result = json.loads(out.read_text())
    (record,) = result["records"]
    assert (record["before"]["median"], record["after"]["median"], record["ratio"]) == (20.0, 44.0, 2.2)
    assert record["before"]["operations"] == 7
    assert "operations" not in record["after"]
    assert result["before"] == {"commit": "abc", "version": "old"}
    assert result["after"]["commit"] is None
    assert str(tmp_path / "old") not in result["command"]


def test_what_is_measured_of_a_version():
    model = create_model("spikformer_4_384", dim=32, depth=1, heads=4, num_classes=5, image_size=16)
    images, labels = torch.randn(2, 3, 16, 16), torch.tensor([0, 4])
    assert before_after.training_step(model, images, labels)().isfinite()
    with torch.inference_mode():
        assert before_after.inference_call(model, images)().shape == (2, 5)
    assert before_after.operations(lambda: images + images) == 1
    assert before_after.operations(lambda: images + images * images) == 2


def test_integers_are_the_same_everywhere_and_a_run_goes_on(tmp_path, capsys, monkeypatch):
    pytest.importorskip("onnxruntime")
    monkeypatch.setattr(integers, "PART", 4)
    out = tmp_path / "found.json"
    command = ["spikformer_digits_ssa", "--data", "digits", "--images", "10", "--every", "3", "--json", str(out)]
    integers.main(command)
    (record,) = json.loads(out.read_text())
    assert [record[key] for key in ("images", "same", "of", "defined")] == [10, 10, 10, 5]  # 2 + 2 + 1 of 4 + 4 + 2
    assert record["top1"] == 10 * record["right"] >= 80
    out.write_text(json.dumps([{**record, "images": 8, "same": 7, "right": 8}]))  # as if the last part were to come
    with pytest.raises(LrfdynError, match="same: spikformer_digits_ssa gives other integers elsewhere"):
        integers.main(command)
    (record,) = json.loads(out.read_text())
    assert (record["images"], record["same"]) == (10, 9)
