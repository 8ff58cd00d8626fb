"""A file is whole or absent."""

from __future__ import annotations

import pytest
import torch

from lrfdyn.errors import LrfdynError
from lrfdyn.files import read_json, writable_folder, write_atomic, write_json
from lrfdyn.io.weights import save_tensors


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
