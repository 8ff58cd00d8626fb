"""The main job: whole, resumable, honest about bad input."""

from __future__ import annotations

import json
import re

import pytest
import torch

import lrfdyn
from lrfdyn.cli import main
from lrfdyn.errors import LrfdynError
from lrfdyn.files import sole_user

HOST = "{dim: 8, heads: 1, depth: 1}"
SMALL = ["--model.options", HOST, "--model.time_steps", "1", "--run.batch_size", "256", "--seeds", "0,1"]
SMALL += ["--attentions", "ssa,lrf_dyn", "--epochs", "2"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    pytest.importorskip("accelerate")
    out = tmp_path_factory.mktemp("demo")
    assert main(["reproduce", "--out", str(out), "--together", "2", "--figures", "pdf", *SMALL]) == 0
    return out


def test_everything_is_written(finished):
    # NaN and Infinity are no JSON, though Python would read them.
    results = json.loads((finished / "results.json").read_text(), parse_constant=pytest.fail)
    assert list(results["attentions"]) == ["ssa", "lrf_dyn"]
    assert [run["seed"] for run in results["runs"]] == [0, 0, 1, 1]  # the first of every attention, then the second
    assert results["title"] == "Spikformer on digits"
    assert results["machine"]["threads"] == 1
    assert results["data"] == {"name": "digits", "kind": "image", "train": 1437, "test": 360, "classes": 10}
    for run in results["runs"]:
        folder = finished / "runs" / f"{run['attention']}-seed{run['seed']}"
        model = lrfdyn.from_pretrained(folder / "model")
        assert sum(p.numel() for p in model.parameters()) == run["parameters"]
        summary = json.loads((folder / "summary.json").read_text())
        assert summary["top1"] / 100 == pytest.approx(run["test_accuracy"])
        assert [record["epoch"] for record in run["curve"]] == [1, 2]
    for row in results["attentions"].values():
        assert row["state_bytes"] == sum(term["bytes"] for term in row["state_terms"])
        assert row["peak_inference_bytes"] > 0
        assert row["images_per_second"] > 0
        assert row["accuracy_mean"] == pytest.approx(sum(row["accuracy_values"]) / 2)
        assert row["accuracy_on_images"] == pytest.approx(row["accuracy_values"][0], abs=0.01)
        assert row["energy"]["energy_pj"] > 0
        assert row["locality"]["layers"] == ["blocks.0.attn"]
    figures = {path.suffix: path for path in (finished / "figures").iterdir()}
    assert set(figures) == {".pdf", ".txt"}
    assert len(list((finished / "figures").glob("*.pdf"))) >= 9
    assert (finished / "tables" / "energy.csv").is_file()
    page = (finished / "report.html").read_text()
    assert "LRF-Dyn" in page
    assert not re.search(r"""(src|href)=["']?https?:""", page)
    assert not list(finished.glob("**/.lrfdyn-*"))


def test_second_call_trains_nothing_again(finished, capsys):
    before = {p: p.stat().st_mtime_ns for p in finished.glob("runs/*/*")}
    torch.set_num_threads(2)
    try:
        assert main(["reproduce", "--out", str(finished), "--figures", "none", *SMALL]) == 0
        assert torch.get_num_threads() == 2, "as it was; measured is with one"
    finally:
        torch.set_num_threads(1)
    assert json.loads((finished / "results.json").read_text())["machine"]["threads"] == 1
    assert before == {p: p.stat().st_mtime_ns for p in finished.glob("runs/*/*")}
    assert "LRF-Dyn" in capsys.readouterr().out


def test_nobody_else_has_the_folders_while_they_are_measured(finished, monkeypatch):
    def measure(*_, **__):
        for folder in (finished, finished / "runs" / "ssa-seed0"):
            with pytest.raises(LrfdynError, match=f"out: another process is using {folder};"), sole_user(folder):
                pass
        raise LrfdynError("measured")

    monkeypatch.setattr("lrfdyn.commands.reproduce.analyze_with_bar", measure)
    assert main(["reproduce", "--out", str(finished), *SMALL]) == 2
    assert (finished / "runs" / "ssa-seed0" / "model" / "model.safetensors").is_file()


def test_restart_beside_a_live_run_discards_nothing(finished, capsys):
    before = sorted(finished.rglob("*"))
    with sole_user(finished / "runs" / "lrf_dyn-seed1"):  # as `lrfdyn train` has it
        assert main(["reproduce", "--out", str(finished), *SMALL, "--restart"]) == 2
    assert "lrf_dyn-seed1; wait for it" in capsys.readouterr().err
    assert sorted(finished.rglob("*")) == before


def test_other_settings_are_refused_and_nothing_is_lost(finished, capsys):
    before = sorted(p.name for p in finished.rglob("*"))
    assert main(["reproduce", "--out", str(finished), *SMALL, "--epochs", "3"]) == 2
    error = capsys.readouterr().err
    assert "out:" in error
    assert "schedule.epochs: 2 there, 3 here" in error
    assert sorted(p.name for p in finished.rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--attentions", "lrf_dym"], "attention: unknown name 'lrf_dym'; did you mean lrf_dyn"),
        (["--attentions", ""], "attentions: expected at least one"),
        (["--seeds", "1,1"], "seeds: expected different ones"),
        (["--seeds", "x"], "argument --seeds"),
        (["--model.options", "{heads: 5}"], "heads: expected a divisor of the width 48, got 5"),
        (["--model.options", "{dim: 12}"], "dim: expected a multiple of 8"),
        (["--model.time_steps", "0"], "time_steps: expected an integer >= 1, got 0"),
        (["--run.batch_size", "5000"], "batch_size: expected at most the 1437 training images"),
        (["--run.seed", "1"], "run.seed: has a key of its own, seeds"),
        (["--epochs", "0"], "epochs: expected an integer >= 1, got 0"),
        (["--together", "0"], "together: expected an integer >= 1, got 0"),
        (["--out", "/dev/null/x"], "out: cannot write in the folder /dev/null/x"),
        (["--figures", "jpg"], "figures: unknown name 'jpg'"),
        (["--epoch"], "option: unknown name '--epoch'; did you mean --epochs"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_arguments_give_one_line_and_exit_code_2(arguments, message, capsys, tmp_path):
    out = tmp_path / "out"
    if "--out" not in arguments:
        arguments = [*arguments, "--out", str(out)]
    try:
        code = main(["reproduce", *arguments])
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    assert code == 2
    assert message in captured.err
    assert len(captured.err.strip().splitlines()) == 1
    assert not out.exists()
