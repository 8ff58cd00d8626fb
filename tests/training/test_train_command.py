"""What `lrfdyn train` and `lrfdyn evaluate` show."""

from __future__ import annotations

import io
import json
from types import SimpleNamespace

import pytest
from rich.console import Console
from rich.progress import Progress

from lrfdyn.cli import main
from lrfdyn.commands import evaluate
from lrfdyn.commands.train import Bar
from lrfdyn.files import read_json_lines
from lrfdyn.training.estimate import estimate
from tests.data.make import write_folder
from tests.training.runs import tiny, write_recipe


def test_progress_bar_ends_with_the_last_epoch():
    """And not with the one before, which was the news while the last was running."""
    text = io.StringIO()
    with Bar(Console(file=text, width=80)) as bar:
        bar.start(SimpleNamespace(is_main=True, total_steps=2, done=0, graph_obstacle="not on a GPU", parameters=1,
                                  processes=1, device=SimpleNamespace(type="cpu"), config=tiny(),
                                  source=SimpleNamespace(num_classes=10),
                                  task=SimpleNamespace(headline="top1")))  # fmt: skip
        for epoch, loss, top1 in ((1, 0.75, 40.0), (2, 0.25, 50.0)):
            bar.step(SimpleNamespace(done=epoch, epoch=epoch, speed=10.0))
            bar.epoch({"epoch": epoch, "train_loss": loss, "images_per_s": 10.0, "top1": top1, "top5": 90.0})
    assert "epoch 2: loss 0.2500, top-1 50.00 %, top-5 90.00 %" in text.getvalue()
    last = text.getvalue().splitlines()[-1]
    assert "2/2 10 images/s, top-1 50.00 %" in last
    assert last.split()[-1].count(":") == 2, "the time left is there in 80 columns"


def test_evaluation_shows_how_far_it_is(tmp_path, monkeypatch):
    recipe, out = write_recipe(tmp_path / "tiny.yaml"), tmp_path / "run"
    assert main(["train", str(recipe), "--out", str(out)]) == 0
    text = io.StringIO()
    shown = Progress(console=Console(file=text, force_terminal=True, width=80))
    monkeypatch.setattr(evaluate, "bar", lambda visible: shown)
    assert main(["evaluate", str(out), "--run.test_batch_size", "100"]) == 0
    (task,) = shown.tasks
    assert (task.completed, task.total) == (360, 360), "the held-out digits"
    assert "100%" in text.getvalue()


def test_a_test_on_held_out_images_says_so(tmp_path, capsys):
    """In the log, the summary, the card and wherever it is measured again."""
    recipe, out = write_recipe(tmp_path / "tiny.yaml", schedule={"epochs": 1, "warmup_epochs": 0}), tmp_path / "run"
    assert main(["train", str(recipe), "--out", str(out), "--data.held_out", "100"]) == 0
    summary = json.loads((out / "summary.json").read_text())
    assert summary["held_out"] == 100
    assert read_json_lines(out / "log.jsonl")[-1]["held_out"] == 100
    assert "on the 100 held-out training images of digits" in (out / "model" / "README.md").read_text()
    capsys.readouterr()
    assert main(["evaluate", str(out)]) == 0
    assert "on 100 held-out training images" in capsys.readouterr().out
    assert main(["evaluate", str(out), "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)
    assert (measured["held_out"], measured["top1"]) == (100, summary["top1"])
    assert main(["evaluate", str(out), "--data.held_out", "null"]) == 0
    assert "held-out" not in capsys.readouterr().out
    facts = estimate(tiny(data={"name": "cifar100", "held_out": 5000}), memory=False)
    assert (facts["train_images"], facts["test_images"]) == (45_000, 5_000)


def test_three_classes_have_no_top_5(tmp_path, capsys):
    """It would be 100 % whatever the network says; the files keep it."""
    pytest.importorskip("PIL")
    write_folder(tmp_path / "images")
    data = {"name": "folder", "root": str(tmp_path / "images"), "image_size": 16}
    recipe = write_recipe(tmp_path / "three.yaml", data=data, run={"batch_size": 8})
    out = str(tmp_path / "run")
    for command in (["train", str(recipe), "--out", out], ["evaluate", out]):
        assert main(command) == 0
        said = capsys.readouterr().out
        assert "top-1" in said
        assert "top-5" not in said
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["top5"] == 100
    assert main(["evaluate", out, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["top5"] == 100
