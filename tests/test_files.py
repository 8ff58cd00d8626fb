"""A file is whole or absent."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch

from lrfdyn.cli import main
from lrfdyn.errors import LrfdynError
from lrfdyn.files import (
    read_json,
    remove_abandoned,
    sole_user,
    temporary_folder,
    writable_folder,
    write_atomic,
    write_json,
)
from lrfdyn.io.weights import save_tensors
from tests.training.runs import in_child, write_recipe


def test_failed_write_leaves_the_old_file_and_no_litter(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"x": 1})

    def half(file):
        file.write_text("{")
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        write_atomic(path, half)
    assert read_json(path, "out") == {"x": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_a_pipe_or_device_is_not_replaced(tmp_path):
    """A user that may write in /dev could lose /dev/null."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="it is no file"):
        write_atomic(pipe, lambda file: file.write_text("x"))
    assert pipe.is_fifo()
    assert os.listdir(tmp_path) == ["pipe"]


def test_the_next_start_removes_what_a_killed_process_left_and_nothing_else(tmp_path):
    def killed_in_the_middle(file):
        file.write_text("{")
        file.with_name(".tmp8KttAR").touch()  # safetensors writes to such a file first
        os.kill(os.getpid(), signal.SIGKILL)

    for place in (tmp_path, tmp_path / "model"):
        assert in_child(lambda place=place: write_atomic(place / "a.json", killed_in_the_middle)) == signal.SIGKILL
    assert len(list(tmp_path.rglob("*.json"))) == 2
    with temporary_folder(tmp_path) as live, temporary_folder(tmp_path / "model") as inner, sole_user(tmp_path):
        assert set(tmp_path.rglob("*")) == {tmp_path / "model", live, inner}
    assert list(tmp_path.rglob("*")) == [tmp_path / "model"]


def test_a_temporary_folder_that_was_taken_for_an_old_one(tmp_path, monkeypatch):
    made = []

    def taken_once(**where):
        made.append(Path(mkdtemp(**where)))
        if len(made) == 1:
            remove_abandoned(tmp_path)
        return str(made[-1])

    monkeypatch.setattr("lrfdyn.files.mkdtemp", taken_once)
    write_json(tmp_path / "a.json", {"x": 1})
    assert len(made) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize(
    "command",
    ["train RECIPE", "train RECIPE --restart", "sweep SWEEP", "reproduce", "analyze spikformer_4_384", "theory"],
)
def test_commands_leave_a_folder_alone_that_another_process_has(command, tmp_path, capsys):
    recipe, out = write_recipe(tmp_path / "tiny.yaml"), tmp_path / "out"
    (tmp_path / "sweep.yaml").write_text(f"- {recipe}\n")
    names = {"RECIPE": str(recipe), "SWEEP": str(tmp_path / "sweep.yaml")}
    with sole_user(out):
        assert main([names.get(word, word) for word in command.split()] + ["--out", str(out)]) == 2
        assert capsys.readouterr().err.endswith(
            f": error: out: another process is using {out}; wait for it, or take another folder\n"
        )
        assert not list(out.iterdir())


def test_files_can_be_read_by_whom_the_folder_is_for(tmp_path):
    """safetensors makes files that nobody else can read, also in a folder that is shared."""
    write_json(tmp_path / "a.json", {})
    save_tensors(tmp_path / "a.safetensors", {"x": torch.ones(2)})
    modes = {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    (tmp_path / "plain").touch()
    assert modes == {(tmp_path / "plain").stat().st_mode & 0o777}


def test_damaged_json_names_argument_and_file(tmp_path):
    (tmp_path / "settings.json").write_text("{")
    with pytest.raises(LrfdynError, match=r"out: cannot read .*settings\.json"):
        read_json(tmp_path / "settings.json", "out")


def test_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LrfdynError, match="out: cannot write"):
        writable_folder(tmp_path / "file" / "inside", "out")
    assert writable_folder(tmp_path / "new" / "folder", "out").is_dir()
    assert list((tmp_path / "new" / "folder").iterdir()) == []
