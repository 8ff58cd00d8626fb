"""A run that was killed anywhere ends with the bits of one that was not."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore

from lrfdyn.cli import main
from lrfdyn.errors import LrfdynError
from lrfdyn.files import read_json_lines
from lrfdyn.io.weights import list_checkpoints, read_checkpoint
from lrfdyn.training.checkpoint import random_state
from lrfdyn.training.config import differences
from lrfdyn.training.logs import Reporter
from lrfdyn.training.processes import Stop, Stopped, launch_name
from lrfdyn.training.recipes import merge, parse_config
from lrfdyn.training.trainer import COUNTERS
from tests.data.make import write_folder
from tests.training.runs import (
    STEPS,
    TINY,
    Killer,
    Listener,
    assert_same_end,
    final_state,
    in_child,
    tiny,
    train,
    write_recipe,
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("whole")
    summary = train(tiny(), out)
    assert summary["epochs"] == 2
    return out


def test_killed_at_random_steps(whole, tmp_path):
    draw = random.Random(4)
    for run in range(3):
        out = tmp_path / str(run)
        steps = sorted(draw.sample(range(1, STEPS + 1), 3))
        for step in steps:
            assert in_child(lambda: train(tiny(), out, resume="auto", reporter=Killer(step))) == signal.SIGKILL  # noqa: B023
        train(tiny(), out, resume="auto")
        assert_same_end(out, whole)


def test_a_checkpoint_does_not_wake_a_gpu_that_is_not_in_use(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: torch.tensor([7], dtype=torch.uint8))
    for used in (False, True):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda used=used: used)
        assert random_state().get("cuda") == ("07" if used else None)


def test_killed_while_a_checkpoint_is_written(whole, tmp_path, monkeypatch):
    import lrfdyn.io.weights

    save = lrfdyn.io.weights.save_file

    def half(data, path, metadata):
        save(data, path, metadata=metadata)
        if "step-000000008" in str(path):
            with open(path, "rb+") as file:
                file.truncate(path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(lrfdyn.io.weights, "save_file", half)
        assert in_child(lambda: train(tiny(), tmp_path)) == signal.SIGKILL
    assert list((tmp_path / "checkpoints").glob(".lrfdyn-*/step-000000008.safetensors"))
    assert [p.name for p in list_checkpoints(tmp_path / "checkpoints")] == ["step-000000004.safetensors"]
    train(tiny(), tmp_path, resume="auto")
    assert not list((tmp_path / "checkpoints").glob(".*"))
    assert_same_end(tmp_path, whole)


def test_command_killed_from_outside(whole, tmp_path, capsys):
    recipe = write_recipe(tmp_path / "tiny.yaml")
    out = tmp_path / "out"
    command = ["train", str(recipe), "--out", str(out), "--resume", "auto"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-m", "lrfdyn", *command], env=environment, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while process.poll() is None and not any(r["step"] >= 6 for r in read_json_lines(out / "log.jsonl")):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.kill()
    process.wait()
    assert not (out / "summary.json").exists(), "the run was over before it was killed"
    assert main(command) == 0  # here, since another process would take seconds to start
    assert "resuming at step" in capsys.readouterr().out
    assert_same_end(out, whole)


def test_accumulated_run_goes_on_with_the_batches_that_follow(tmp_path):
    """A step takes two parts of a batch, so it goes on at twice as many parts as steps."""
    config = tiny(run={"accumulate": 2}, schedule={"epochs": 1})
    train(config, tmp_path / "whole")
    assert in_child(lambda: train(config, tmp_path / "out", reporter=Killer(5))) == signal.SIGKILL
    train(config, tmp_path / "out", resume="auto")
    ended, expected = final_state(tmp_path / "out"), final_state(tmp_path / "whole")
    assert ended[1:] == expected[1:]
    for name, value in ended[0].items():
        assert value.equal(expected[0][name]), name


def test_two_checkpoints_are_kept_and_a_damaged_one_is_passed_over(whole, tmp_path):
    assert in_child(lambda: train(tiny(), tmp_path, reporter=Killer(14))) == signal.SIGKILL
    newest, older = list_checkpoints(tmp_path / "checkpoints")
    assert newest.name == "step-000000012.safetensors"
    content = bytearray(newest.read_bytes())
    content[-100] ^= 1  # one bit of one weight: the file can be read, but is not what was written
    newest.write_bytes(content)
    listener = Listener()
    train(tiny(), tmp_path, resume="auto", reporter=listener)
    assert "step-000000012.safetensors is damaged" in listener.said[0]
    assert "falling back" in listener.said[0]
    assert str(older) in listener.said[1]
    assert_same_end(tmp_path, whole)


def test_nothing_whole_is_left(tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / "step-000000004.safetensors").write_bytes(b"nothing")
    with pytest.raises(LrfdynError, match=r"every checkpoint in .* is damaged"):
        train(tiny(), tmp_path, resume="auto")


def test_finished_run_is_left_as_it_is(whole):
    before = final_state(whole)[2]
    summary = train(tiny(), whole, resume="auto")
    assert final_state(whole)[2] == before
    assert summary["top1"] == before[-1]["top1"]


def test_folder_of_an_earlier_run_needs_a_word(whole, tmp_path):
    with pytest.raises(LrfdynError, match="holds a run; --resume auto continues it"):
        train(tiny(), whole)
    recipe = (whole / "recipe.yaml").read_bytes()
    with pytest.raises(LrfdynError, match=r"other settings \(optimizer.learning_rate: 0.005 there, 0.1 here\)"):
        train(tiny(optimizer={"learning_rate": 0.1}), whole, resume="auto")
    assert (whole / "recipe.yaml").read_bytes() == recipe, "it describes the run that is there"
    with pytest.raises(LrfdynError, match="resume: no such file"):
        train(tiny(), tmp_path, resume=str(tmp_path / "missing.safetensors"))


class Clock(Reporter):
    """What a run has counted when it starts or goes on."""

    def start(self, trainer):
        self.counted = {name: getattr(trainer, name) for name in COUNTERS}


def test_resume_from_a_named_checkpoint(whole, tmp_path):
    named, clock = list_checkpoints(whole / "checkpoints")[1], Clock()
    train(tiny(), tmp_path, resume=str(named), reporter=clock)
    meta = read_checkpoint(named)[1]
    assert clock.counted == {name: meta[name] for name in COUNTERS}
    assert min(clock.counted.values()) > 0
    for (name, value), other in zip(
        final_state(tmp_path)[0].items(), final_state(whole)[0].values(), strict=True
    ):  # fmt: skip
        assert value.equal(other), name


def test_course_that_was_given_up_does_not_outlive_the_new_one(whole, tmp_path):
    """A run that went on from an earlier checkpoint and is killed continues there, and not behind what it left."""
    early = tmp_path / "early"
    assert in_child(lambda: train(tiny(), early, reporter=Killer(5))) == signal.SIGKILL
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    named = str(early / "checkpoints" / "step-000000004.safetensors")
    assert in_child(lambda: train(tiny(), out, resume=named, reporter=Killer(9))) == signal.SIGKILL
    assert [path.name for path in list_checkpoints(out / "checkpoints")] == ["step-000000008.safetensors"]


def test_other_data_under_the_same_settings_is_refused(tmp_path, capsys):
    """The folder of the data may move; with images missing from the copy, order and steps would be others."""
    pytest.importorskip("PIL")
    first, second = write_folder(tmp_path / "a"), write_folder(tmp_path / "b", train=7)
    data = {"name": "folder", "root": str(first), "image_size": 16}
    config, out = tiny(data=data, run={"batch_size": 4}), tmp_path / "out"
    assert in_child(lambda: train(config, out, reporter=Killer(5))) == signal.SIGKILL
    with pytest.raises(LrfdynError, match=r"was trained on 24 images, and data.root has 21 here"):
        train(tiny(data={**data, "root": str(second)}, run={"batch_size": 4}), out, resume="auto")
    write_folder(tmp_path / "c", classes=4)
    assert main(["evaluate", str(out), "--data.root", str(tmp_path / "c")]) == 2
    assert "(the model is for the 4 classes of the data)" in capsys.readouterr().err
    third = write_folder(tmp_path / "d")
    for split in ("train", "val"):
        (third / split / "n00000001").rename(third / split / "n00000000a")
    with pytest.raises(LrfdynError, match=r"class 1 of .* is 'n00000001', and in data.root it is 'n00000000a'"):
        train(tiny(data={**data, "root": str(third)}, run={"batch_size": 4}), out, resume="auto")
    shutil.move(first, tmp_path / "moved")
    train(tiny(data={**data, "root": str(tmp_path / "moved")}, run={"batch_size": 4}), out, resume="auto")


def test_how_often_a_run_is_tested_may_change(whole, tmp_path):
    rare, often = tiny(run={"test_epochs": 2}), tiny(run={"test_epochs": 1})
    assert in_child(lambda: train(rare, tmp_path, reporter=Killer(13))) == signal.SIGKILL
    train(often, tmp_path, resume="auto")
    tensors, _, log = final_state(tmp_path)
    expected, _, whole_log = final_state(whole)
    assert tensors.keys() == expected.keys()
    for name, value in tensors.items():
        assert value.equal(expected[name]), name
    epochs = [record for record in log if record["kind"] == "epoch"]
    assert ["top1" in record for record in epochs] == [False, True]
    assert epochs[-1] == whole_log[-1]


def test_nothing_of_an_earlier_run_passes_for_the_next(whole, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    shutil.rmtree(out / "checkpoints")  # as where only the result was kept
    with pytest.raises(LrfdynError, match="holds a run"):
        train(tiny(), out)
    assert in_child(lambda: train(tiny(run={"seed": 5}), out, restart=True, reporter=Killer(2))) == signal.SIGKILL
    assert not (out / "summary.json").exists()
    assert not (out / "model").exists()
    assert [record["step"] for record in read_json_lines(out / "log.jsonl")] == [1, 2]


def test_results_without_their_checkpoints_are_not_trained_over(whole, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    shutil.rmtree(out / "checkpoints")
    with pytest.raises(LrfdynError, match="holds a run that ended, and not its checkpoints"):
        train(tiny(), out, resume="auto")
    assert read_json_lines(out / "log.jsonl") == read_json_lines(whole / "log.jsonl")


def test_end_of_a_run_whose_log_is_gone(whole, tmp_path):
    last = list_checkpoints(whole / "checkpoints")[0]
    with pytest.raises(LrfdynError, match=r"is the end of its run, .* lrfdyn evaluate .* measures them"):
        train(tiny(), tmp_path, resume=str(last))


def test_torchrun_begins_again_only_what_it_began(whole, tmp_path, monkeypatch):
    """A try that failed before it came to the folder (here: none did) must not continue what --restart discards."""
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    monkeypatch.setattr("lrfdyn.training.run.launch_name", lambda: "second")
    with pytest.raises(LrfdynError, match="holds a run; --resume auto"):
        train(tiny(), out)
    assert in_child(lambda: train(tiny(), out, restart=True, reporter=Killer(6))) == signal.SIGKILL
    listener = Listener()
    train(tiny(), out, restart=True, reporter=listener)
    assert "resuming at step 4" in listener.said[0]
    assert_same_end(out, whole)
    # What this process has run before, and what another launch has, it was asked to discard.
    for launch in ("second", "third"):
        monkeypatch.setattr("lrfdyn.training.run.launch_name", lambda launch=launch: launch)
        with pytest.raises(Stopped, match="stopped at step 1 of"):
            train(tiny(), out, restart=True, stop=Stop(1e-9))
        monkeypatch.setattr("lrfdyn.training.run.CLAIMED", set())


def test_a_launch_has_one_name_whatever_happens_in_it(monkeypatch):
    assert launch_name() == ""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    names = []
    for _ in range(2):
        store = TCPStore("localhost", 0, is_master=True)
        monkeypatch.setenv("MASTER_PORT", str(store.port))
        names += [launch_name(), launch_name()]
    assert names[0] == names[1] != names[2] == names[3]


def test_a_launch_that_cannot_be_told_from_its_restarts_discards_nothing(whole, tmp_path, monkeypatch):
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run1")
    with pytest.raises(LrfdynError, match=r"restart: torchrun does not share its store .* delete .*out instead"):
        train(tiny(), out, restart=True)
    assert_same_end(out, whole)


def test_how_many_processes_decode_may_change():
    """They change nothing but the speed; every other option of the data decides."""
    given = ({"workers": 8}, {"workers": 4, "on_corrupt": "skip"})
    eight, four = (parse_config(merge(TINY, {"data": {"options": options}})) for options in given)
    assert eight.fingerprint() == four.fingerprint()
    assert not list(differences(eight.as_dict(), four.as_dict()))
    other = parse_config(merge(TINY, {"data": {"options": {"workers": 8, "crop_share": 1.0}}}))
    assert list(differences(other.as_dict(), eight.as_dict())) == ["data.options: {} there, {'crop_share': 1.0} here"]
    assert other.fingerprint() != eight.fingerprint()
