"""The script that makes the runs of the CIFAR-100 table, with small ones."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks.cifar100 import RUNS, main
from lrfdyn.training.recipes import load_recipe


def test_every_run_has_its_recipe():
    for choice in RUNS.values():
        published, strong = (load_recipe(f"cifar100_spikformer{end}", choice) for end in ("", "_strong"))
        assert published.model == strong.model
        assert strong.augmentation.crop == "pad"


@pytest.mark.skipif(sys.platform == "win32", reason="starts processes")
def test_runs_are_made_side_by_side_and_a_failed_one_is_told(tmp_path, capsys, monkeypatch):
    pytest.importorskip("accelerate")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    root, out = str(tmp_path / "data"), tmp_path / "out"
    settings = [
        "--root", root, "--recipe", "digits", "--runs", "ssa", "nothing", "--epochs", "1", "--together", "2",
        "--set", "model.time_steps", "1", "--work", str(tmp_path / "work"), "--out", str(out),
    ]  # fmt: skip
    with pytest.raises(SystemExit) as end:
        main(settings)
    assert end.value.code == 1
    assert "nothing_1: ended with status 2" in capsys.readouterr().out
    assert "unknown name 'nothing'" in (tmp_path / "work" / "nothing_1.txt").read_text()
    assert sorted(path.name for path in out.iterdir()) == ["ssa_1"]
    summary = json.loads((out / "ssa_1" / "summary.json").read_text())
    assert summary["epochs"] == 1
    assert summary["beside"] == "1 of nothing"
    assert str(tmp_path / "work") not in summary["command"]
    assert all(root not in path.read_text() for path in (out / "ssa_1").iterdir())
