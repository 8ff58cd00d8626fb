"""`lrfdyn predict --task segmentation`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from lrfdyn.cli import main
from tests.deploy.small import small
from tests.segmentation.make import shapes, tiny_model


def test_segmentation(tmp_path, capsys):
    tiny_model(num_classes=5).save_pretrained(tmp_path / "run" / "model")
    (tmp_path / "images").mkdir()
    for i in range(2):
        Image.fromarray(shapes(i, 40, 56)[0]).save(tmp_path / "images" / f"{i}.png")
    (tmp_path / "images" / "dark.png").write_text("no image")
    given = [str(tmp_path / "images"), "--task", "segmentation", "--model", str(tmp_path / "run"), "--device", "cpu"]
    out = tmp_path / "masks"
    assert main(["predict", *given, "--out", str(out)]) == 1
    printed = capsys.readouterr()
    assert printed.out.splitlines() == [
        f"{tmp_path / 'images' / f'{i}.png'}: {out / f'{i}_overlay.png'}" for i in (0, 1)
    ]
    assert f"cannot read {tmp_path / 'images' / 'dark.png'} (UnidentifiedImageError" in printed.err
    assert "1 of 3 images could not be read" in printed.err
    for i in range(2):
        with Image.open(out / f"{i}_mask.png") as mask:
            assert (mask.mode, mask.size) == ("P", (56, 40))

    (tmp_path / "images" / "dark.png").unlink()
    assert main(["predict", *given, "--out", str(tmp_path / "other"), "--flip", "--window", "32", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["task"], found["unreadable"]) == ("segmentation", 0)
    for record in found["images"]:
        assert Path(record["mask"]).is_file()
        assert Path(record["overlay"]).is_file()
        assert sum(record["classes"].values()) == pytest.approx(1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "classifier"], "model: classifier is a Spikformer, expected a segmentation model"),
        (["--model", "classifier", "--runtime", "onnx"], "runtime: segmentation runs in torch, got 'onnx'"),
        (["--model", "sdt_v3_s"], "model: sdt_v3_s names a model without weights; expected a trained one"),
        (["--model", "nothing/here/at/all"], "model: no such file or folder: nothing/here/at/all"),
        (["--model", "segmenter", "--device", "abacus"], "device: cannot use 'abacus'"),
        (["--model", "segmenter", "--window", "1"], "window: expected at least the stride"),
        (["--model", "segmenter", "--out", "notes.txt/maps"], "out: cannot write in the folder notes.txt/maps"),
    ],
)
def test_bad_input_for_segmentation(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("text")
    small("spikformer", "ssa").save_pretrained(tmp_path / "classifier" / "model")
    tiny_model().save_pretrained(tmp_path / "segmenter")
    Image.fromarray(shapes(0, 40, 56)[0]).save("image.png")
    assert main(["predict", "image.png", "--task", "segmentation", "--out", "maps", *arguments]) == 2
    assert message in capsys.readouterr().err
