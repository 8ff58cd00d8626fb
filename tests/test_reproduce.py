"""The main job: whole, resumable, honest about bad input."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import lrfdyn
from lrfdyn.cli import main
from lrfdyn.errors import LrfdynError
from lrfdyn.io.weights import load_tensors, save_tensors
from lrfdyn.reproduce import (
    Settings,
    checkpoint_path,
    claim_folder,
    finished_curve,
    reproduce,
    train_run,
    weights_path,
)
from lrfdyn.training.engine import Recipe

SMALL = ["--dim", "8", "--heads", "1", "--depth", "1", "--time-steps", "1", "--batch-size", "256", "--seeds", "0,1"]
TINY = Settings(
    attentions=("ssa", "lrf_dyn"), seeds=(0,), dim=8, depth=1, heads=1, time_steps=1, recipe=Recipe(1, batch_size=256)
)


def same_weights(first: Path, second: Path, attention: str) -> None:
    tensors, others = (load_tensors(weights_path(folder, attention, 0))[0] for folder in (first, second))
    assert tensors.keys() == others.keys()
    assert all(torch.equal(tensors[name], others[name]) for name in tensors)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo")
    command = ["reproduce", "--out", str(out), "--epochs", "2", "--workers", "2", "--figures", "pdf", *SMALL]
    assert main(command) == 0
    return out


def test_everything_is_written(finished):
    # NaN and Infinity are no JSON, though Python would read them.
    results = json.loads((finished / "results.json").read_text(), parse_constant=pytest.fail)
    assert list(results["attentions"]) == ["vsa", "ssa", "causal_ssa", "lrf_ssa", "lrf_dyn"]
    assert len(results["runs"]) == 10
    for run in results["runs"]:
        tensors, meta = load_tensors(finished / run["weights"])
        assert meta["curve"] == run["curve"]
        model = lrfdyn.models.Spikformer(**meta["config"])
        model.load_state_dict(tensors)
        assert sum(p.numel() for p in model.parameters()) == run["parameters"]
    for row in results["attentions"].values():
        assert row["state_bytes"] == sum(term["bytes"] for term in row["state_terms"])
        assert row["peak_inference_bytes"] > 0
        assert row["images_per_second"] > 0
        assert row["accuracy_mean"] == pytest.approx(sum(row["accuracy_values"]) / 2)
        assert row["energy"]["energy_pj"] > 0
        assert row["locality"]["layers"] == ["blocks.0.attn"]
    figures = {path.suffix: path for path in (finished / "figures").iterdir()}
    assert set(figures) == {".pdf", ".txt"}
    assert len(list((finished / "figures").glob("*.pdf"))) >= 9
    assert (finished / "tables" / "energy.csv").is_file()
    page = (finished / "report.html").read_text()
    assert "LRF-Dyn" in page
    assert not re.search(r"""(src|href)=["']?https?:""", page)
    assert not list(finished.glob("**/.*.tmp"))
    assert not list((finished / "checkpoints").iterdir())


def test_second_call_trains_nothing_again(finished, capsys):
    before = {p: p.stat().st_mtime_ns for p in (finished / "weights").iterdir()}
    assert main(["reproduce", "--out", str(finished), "--epochs", "2", "--figures", "none", *SMALL]) == 0
    assert before == {p: p.stat().st_mtime_ns for p in (finished / "weights").iterdir()}
    assert "LRF-Dyn" in capsys.readouterr().out


def test_other_settings_are_refused_and_nothing_is_lost(finished, capsys):
    before = sorted(p.name for p in finished.rglob("*"))
    assert main(["reproduce", "--out", str(finished), "--epochs", "3", *SMALL]) == 2
    error = capsys.readouterr().err
    assert "out:" in error
    assert "(epochs)" in error
    assert sorted(p.name for p in finished.rglob("*")) == before


def test_measures_with_one_thread_and_does_not_depend_on_the_number_of_workers(tmp_path):
    torch.set_num_threads(2)
    try:
        two = reproduce(tmp_path / "two", TINY, workers=2)
        assert two["machine"]["threads"] == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    for run in two["runs"]:
        curve: list = []
        train_run(tmp_path / "one", TINY, run["attention"], 0, curve.append)
        assert curve[-1]["test_accuracy"] == run["test_accuracy"]
        same_weights(tmp_path / "one", tmp_path / "two", run["attention"])


def test_ctrl_c_and_again_gives_the_same_weights(tmp_path):
    interrupted, whole = tmp_path / "interrupted", tmp_path / "whole"
    epochs = 10
    command = ["reproduce", "--out", str(interrupted), "--attentions", "ssa", "--epochs", str(epochs)]
    command += [*SMALL[:-1], "0", "--figures", "none"]
    process = subprocess.Popen(
        [sys.executable, "-m", "lrfdyn", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        # A shell without job control starts what is in the background deaf to Ctrl-C, and that is inherited.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.default_int_handler),
    )
    # Interrupt as soon as the first checkpoint is there.
    checkpoint = checkpoint_path(interrupted, "ssa", 0)
    deadline = time.monotonic() + 120
    while not checkpoint.exists() and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGINT)
    output = process.communicate(timeout=60)[0].decode()
    assert process.returncode == 130, output
    assert "goes on from here" in output
    assert "Traceback" not in output
    assert not list(interrupted.glob("**/.*.tmp"))
    assert not (interrupted / "results.json").exists()
    done = load_tensors(checkpoint)[1]["curve"]
    assert 1 <= len(done) < epochs

    # What the same command does in a worker, without the seconds that a process takes to start.
    settings = replace(TINY, recipe=Recipe(epochs, batch_size=256))
    for folder in (interrupted, whole):
        claim_folder(folder, settings, restart=False)
        train_run(folder, settings, "ssa", 0, lambda _: None)
    # It went on and did not start anew: the first epochs are those of before, down to the time they took.
    curve = finished_curve(weights_path(interrupted, "ssa", 0))
    assert curve[: len(done)] == done
    assert len(curve) == epochs
    same_weights(interrupted, whole, "ssa")


def test_error_in_a_worker_reaches_the_user(tmp_path):
    out = tmp_path / "out"
    (out / "weights").mkdir(parents=True)
    weights_path(out, "ssa", 0).write_bytes(b"damaged")
    with pytest.raises(LrfdynError, match=r"weights: .*ssa-seed0\.safetensors is damaged.*pass --restart"):
        reproduce(out, TINY)
    save_tensors(weights_path(out, "ssa", 0), {"x": torch.zeros(1)})
    with pytest.raises(LrfdynError, match="was not written by this command"):
        reproduce(out, TINY)
    (out / "settings.json").write_text("[]")
    with pytest.raises(LrfdynError, match=r"out: .*settings\.json is damaged"):
        reproduce(out, TINY)


def test_only_own_files_are_removed(tmp_path):
    mine = ["weights/precious.safetensors", "sub/.data.tmp", "notes.txt"]
    ours = ["weights/ssa-seed0.safetensors", "checkpoints/lrf_dyn-seed0.safetensors", "report.html"]
    stale = ["weights/.ssa-seed0.safetensors.123.tmp"]
    for name in [*mine, *ours, *stale]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    claim_folder(tmp_path, TINY, restart=True)
    left = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
    assert left == {*mine, "settings.json"}


def test_a_call_that_cannot_run_does_not_claim_the_folder(tmp_path):
    with pytest.raises(LrfdynError, match="batch_size: expected at most the 1437"):
        reproduce(tmp_path / "out", Settings(recipe=Recipe(batch_size=5000)))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--attentions", "lrf_dym"], "attention: unknown name 'lrf_dym'; did you mean lrf_dyn"),
        (["--attentions", ""], "attentions: expected at least one"),
        (["--seeds", "1,1"], "seeds: expected different ones"),
        (["--heads", "5"], "heads: expected a divisor of the width 48, got 5"),
        (["--time-steps", "0"], "time_steps: expected an integer >= 1, got 0"),
        (["--epochs", "0"], "epochs: expected an integer >= 1, got 0"),
        (["--workers", "0"], "workers: expected an integer >= 1, got 0"),
        (["--dim", "12"], "dim: expected a multiple of 8"),
        (["--seeds", "x"], "argument --seeds"),
        (["--out", "/dev/null/x"], "out: cannot write in the folder /dev/null/x"),
        (["--figures", "jpg"], "figures: unknown name 'jpg'"),
        (["--epoch"], "argument"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_arguments_give_one_line_and_exit_code_2(arguments, message, capsys, tmp_path):
    if "--out" not in arguments:
        arguments = [*arguments, "--out", str(tmp_path)]
    try:
        code = main(["reproduce", *arguments])
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    assert code == 2
    assert message in captured.err
    assert len(captured.err.strip().splitlines()) == 1
    assert captured.out == ""
