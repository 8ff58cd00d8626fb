"""A full disk and a loss that is no number end with one line and a checkpoint to go on from."""

from __future__ import annotations

import errno
import json
import shutil

import pytest
import torch
from safetensors import SafetensorError

import lrfdyn.io.weights
from lrfdyn.cli import main
from lrfdyn.errors import LrfdynError
from lrfdyn.files import read_json_lines
from lrfdyn.io.weights import list_checkpoints, not_finite, read_checkpoint
from lrfdyn.training.logs import Reporter
from tests.training.runs import STEPS, final_state, tiny, train, write_recipe


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("I/O error: No space left on device")],
    ids=["OSError", "SafetensorError"],
)
def test_full_disk(error, tmp_path, monkeypatch, capsys):
    save = lrfdyn.io.weights.save_file

    def full(data, path, metadata):
        if "step-000000008" in str(path):
            path.write_bytes(b"as much as there was room for")
            raise error
        save(data, path, metadata=metadata)

    recipe, out = write_recipe(tmp_path / "tiny.yaml"), tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(lrfdyn.io.weights, "save_file", full)
        assert main(["train", str(recipe), "--out", str(out)]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"lrfdyn train: error: out: cannot write in {out} (")
    assert "No space left on device" in message
    assert "the last good checkpoint is" in message
    assert message.count("\n") == 1
    assert [p.name for p in (out / "checkpoints").iterdir()] == ["step-000000004.safetensors"]
    assert main(["train", str(recipe), "--out", str(out), "--resume", "auto"]) == 0
    assert final_state(out)[1]["step"] == STEPS


class Poison(Reporter):
    """Breaks the weights after a step."""

    def __init__(self, step: int) -> None:
        self.at = step

    def step(self, trainer):
        if trainer.done == self.at:
            torch.nn.init.constant_(trainer.model.head.weight, float("nan"))


@pytest.mark.parametrize(("step", "log_steps", "message"), [(5, 1, "loss: it is nan at step 6"), (5, 50, "weights: ")])
def test_loss_that_is_no_number(step, log_steps, message, tmp_path):
    """Where the loss is not looked at in time, the weights are: a checkpoint never holds what is not a number."""
    config = tiny(run={"log_steps": log_steps})
    with pytest.raises(LrfdynError, match=f"^{message}.*the last good checkpoint is .*step-000000004"):
        train(config, tmp_path, reporter=Poison(step))
    tensors, meta = read_checkpoint(list_checkpoints(tmp_path / "checkpoints")[0])
    assert meta["step"] == 4
    assert not not_finite(tensors)
    train(config, tmp_path, resume="auto")
    assert final_state(tmp_path)[1]["step"] == STEPS


def test_summary_log_and_evaluation_agree(tmp_path, capsys):
    recipe, out = write_recipe(tmp_path / "tiny.yaml"), tmp_path / "out"
    assert main(["train", str(recipe), "--out", str(out), "--run.seed", "3", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    summary = json.loads((out / "summary.json").read_text())
    assert printed == summary
    wanted = "recipe model attention token dilations epochs seed top1 parameters images_per_s wall_s command"
    assert set(wanted.split()) <= set(summary)
    assert (summary["recipe"], summary["seed"], summary["dilations"], summary["token"]) == ("tiny", 3, [3, 5], "value")
    assert not {"coupling", "norm", "dendrites"} & summary.keys()  # which are the default
    assert (summary["dim"], summary["depth"], summary["heads"]) == (8, 2, 2), "not of the model it is named after"
    last = read_json_lines(out / "log.jsonl")[-1]
    assert last["top1"] == summary["top1"]
    card = (out / "model" / "README.md").read_text()
    tested = (
        f"(2 epochs, seed 3): top-1 {last['top1']:.2f} %, top-5 {last['top5']:.2f} % on the 360 test images of digits"
    )
    assert tested in card
    assert (out / "log.csv").read_text().count("\n") == 3
    assert list((out / "tensorboard").iterdir())
    assert main(["evaluate", str(out), "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)
    assert (measured["top1"], measured["test_loss"]) == (last["top1"], last["test_loss"])
    assert (measured["device"], measured["precision"]) == (summary["device"], summary["precision"])
    assert main(["evaluate", str(recipe), "--weights", str(out / "model"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["top1"] == last["top1"]
    assert main(["evaluate", str(out), "--raw", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["test_loss"] != last["test_loss"]
    shutil.rmtree(out / "checkpoints")
    assert main(["evaluate", str(out), "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)
    assert (measured["top1"], measured["source"]) == (last["top1"], str(out / "model" / "model.safetensors"))
    assert main(["evaluate", str(out), "--raw"]) == 2
    assert "raw: " in capsys.readouterr().err
    shutil.rmtree(out / "model")
    assert main(["evaluate", str(out)]) == 2
    assert "holds no model" in capsys.readouterr().err


def test_no_memory_is_one_line(monkeypatch, capsys):
    def on_a_gpu(args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    def on_a_cpu(args):
        torch.empty(10**15)

    def another(args):
        raise RuntimeError("not of memory")

    for run in (on_a_gpu, on_a_cpu):
        monkeypatch.setattr("lrfdyn.commands.models.run", run)
        assert main(["models"]) == 2
        said = capsys.readouterr().err
        assert said.startswith("lrfdyn models: error: memory: ")
        assert said.count("\n") == 1
    monkeypatch.setattr("lrfdyn.commands.models.run", another)
    with pytest.raises(RuntimeError, match="not of memory"):
        main(["models"])
