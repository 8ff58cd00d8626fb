"""Every door to the models of the zoo, the places that they are looked for in, and what is damaged or not there."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import lrfdyn
from lrfdyn.cli import main
from lrfdyn.errors import LrfdynError
from lrfdyn.io import zoo
from lrfdyn.io.hub import CONFIG_FILE, WEIGHTS_FILE
from lrfdyn.sources import find_source
from tests.test_zoo import ENTRIES, IMAGES, NAME, ROOT, WEIGHTS, stored


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """An installed package with an empty cache, and no hub."""
    hub = pytest.importorskip("huggingface_hub")

    def refuse(repository: str, **_: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr(hub, "snapshot_download", refuse)
    monkeypatch.setattr(zoo, "CHECKOUT", tmp_path / "site-packages")
    monkeypatch.setenv("LRFDYN_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


def output(capsys, *arguments: str) -> str:
    assert main(list(arguments)) == 0, capsys.readouterr().err
    return capsys.readouterr().out


# The doors.


@stored
def test_every_door_gives_the_same_model(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    expected = lrfdyn.from_pretrained(WEIGHTS / NAME)
    doors = {
        "create": lrfdyn.create_model("spikformer_4_384", attention="lrf_dyn", pretrained="digits"),
        "only one": lrfdyn.create_model("Spikformer_4_384", attention="LRF_Dyn", pretrained="Digits", dim=48),
        "name": lrfdyn.from_pretrained(NAME),
        "repository": lrfdyn.from_pretrained(f"lrfdyn/{NAME}"),
        "command": find_source(NAME).load(),
        "file": find_source(WEIGHTS / NAME / WEIGHTS_FILE).load(),
    }
    monkeypatch.chdir(ROOT)  # where `lrfdyn` is a folder
    doors["repository in commands"] = find_source(f"lrfdyn/{NAME}").load()
    monkeypatch.setenv("LRFDYN_HUB_OWNER", "someone")
    doors["owner"] = lrfdyn.from_pretrained(f"someone/{NAME}")
    for door, model in doors.items():
        assert not model.training, door
        assert {p.dtype for p in model.parameters() if p.is_floating_point()} == {torch.float32}, door
        assert torch.equal(model(IMAGES), expected(IMAGES)), door


@stored
def test_true_is_the_only_one(monkeypatch):
    entry = ENTRIES[NAME]
    monkeypatch.setattr(zoo, "read_index", lambda path: {NAME: entry})
    assert lrfdyn.create_model("spikformer_4_384", attention="lrf_dyn", pretrained=True).config["dim"] == 48
    other = dataclasses.replace(entry, name="other", data="cifar100")
    monkeypatch.setattr(zoo, "read_index", lambda path: {NAME: entry, "other": other})
    with pytest.raises(LrfdynError, match=r"was trained on cifar100, digits; expected one of them, got True"):
        lrfdyn.create_model("spikformer_4_384", attention="lrf_dyn", pretrained=True)


@stored
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim": 384}, f"^dim: {NAME} was trained with 48, got 384"),
        ({"time_steps": 2}, f"^time_steps: {NAME} was trained with 4, got 2"),
        ({"dilations": (1,)}, rf"^dilations: {NAME} was trained with \(3, 5\), got \(1,\)"),
        ({"pretrained": "imagenet"}, "^pretrained: spikformer_4_384 with lrf_dyn was trained on .*digits.*'imagenet'"),
        ({"attention": "vsa"}, "^pretrained: no trained spikformer_4_384 with vsa in the zoo; .* digits with lrf_dyn"),
        ({"dilation": 1}, "unknown name 'dilation'"),
        ({"pretrained": 1}, "^pretrained: expected True or False or text, got 1"),
    ],
)
def test_options_that_contradict(options, message):
    with pytest.raises(LrfdynError, match=message):
        lrfdyn.create_model("spikformer_4_384", **{"attention": "lrf_dyn", "pretrained": "digits", **options})


def test_models_that_nobody_trained():
    with pytest.raises(LrfdynError, match=r"no trained sdt_v3_s .*; lrfdyn models --pretrained lists what there is"):
        lrfdyn.create_model("sdt_v3_s", pretrained=True)


@stored
def test_evaluate(capsys):
    result = json.loads(output(capsys, "evaluate", NAME, "--json"))
    assert result["top1"] == pytest.approx(ENTRIES[NAME].bf16)


@stored
def test_predict_without_a_name_takes_the_general_model(capsys, tmp_path, monkeypatch):
    """A photo is named by one command, and which model did is said."""
    pytest.importorskip("PIL")
    photos = ["raccoon", "rocket", "cup"]
    paths = [str(ROOT / "examples" / "photos" / f"{name}.jpg") for name in photos]
    assert main(["predict", *paths, "--top", "1", "--json", str(tmp_path / "found.json")]) == 0
    assert "no --model, so the zoo's spikformer_cifar100_lrf_dyn is taken: 100 classes" in capsys.readouterr().err
    found = json.loads((tmp_path / "found.json").read_text())
    assert [record["predictions"][0]["name"] for record in found["images"]] == photos
    assert found["model"] == zoo.general_model().name
    assert zoo.general_model(recordings=True).data == "nmnist"
    for arguments, message in (
        (["--task", "segmentation", "--out", str(tmp_path)], "model: --task segmentation needs one"),
        (["--runtime", "onnx"], "model: --runtime onnx needs one"),
    ):
        assert main(["predict", *paths, *arguments]) == 2
        assert message in capsys.readouterr().err
    monkeypatch.setattr(zoo, "read_index", lambda path: {NAME: ENTRIES[NAME]})
    assert main(["predict", *paths]) == 2
    assert "model: no model was named, and the zoo has none for colour images" in capsys.readouterr().err


@stored
def test_predict_and_export(capsys, tmp_path, monkeypatch):
    image = pytest.importorskip("PIL.Image")
    path, given = str(tmp_path / "x.png"), []
    image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8)).save(path)
    first, second = (
        json.loads(output(capsys, "predict", path, "--model", str(model), "--json", "-"))["images"]
        for model in (NAME, WEIGHTS / NAME)
    )
    assert first == second
    monkeypatch.setattr("lrfdyn.commands.export.export_model", lambda model, *_, **__: given.append(model) or 1 / 0)
    with pytest.raises(ZeroDivisionError):  # the export itself has tests of its own
        main(["export", NAME, "--out", str(tmp_path / "x.onnx")])
    assert torch.equal(given[0](IMAGES), lrfdyn.from_pretrained(NAME)(IMAGES))


@stored
def test_sources_know_recipe_seed_and_accuracy():
    source, entry = find_source(NAME), ENTRIES[NAME]
    assert (source.kind, source.seed, source.accuracy) == ("saved", entry.seed, entry.bf16 / 100)
    assert source.recipe == WEIGHTS / NAME / "recipe.yaml"


def test_names_that_are_almost_right(capsys, elsewhere):
    for arguments in (["evaluate", NAME + "n"], ["export", NAME + "n", "--out", "x.onnx"]):
        assert main(arguments) == 2
        assert f"did you mean {NAME}" in capsys.readouterr().err
    with pytest.raises(LrfdynError, match=rf"the zoo: did you mean {NAME}.*does not give it \(no network\)"):
        lrfdyn.from_pretrained(f"lrfdyn/{NAME}n")


# Other places.


@stored
def test_a_copy_in_the_cache_will_do(elsewhere):
    shutil.copytree(WEIGHTS / NAME, elsewhere / NAME)
    found = lrfdyn.create_model("spikformer_4_384", attention="lrf_dyn", pretrained="digits")
    assert torch.equal(found(IMAGES), lrfdyn.from_pretrained(WEIGHTS / NAME)(IMAGES))
    assert find_source(NAME).path.parent == elsewhere / NAME
    assert lrfdyn.from_pretrained(NAME, local_files_only=True).name == "spikformer_4_384"


def test_what_is_nowhere_is_said_in_one_line(elsewhere, capsys):
    with pytest.raises(LrfdynError, match=rf"not in {elsewhere}, .* does not give lrfdyn/{NAME} \(no network\)"):
        lrfdyn.from_pretrained(NAME)
    with pytest.raises(LrfdynError, match=f"not in {elsewhere}, and local_files_only asks for no download"):
        lrfdyn.from_pretrained(NAME, local_files_only=True)
    assert main(["predict", "x.png", "--model", NAME]) == 2
    error = capsys.readouterr().err
    assert error.startswith("lrfdyn predict: error: model: ")
    assert error.count("\n") == 1
    assert not list(elsewhere.glob("*"))  # nothing half done is left


@stored
def test_the_hub_fills_the_cache(elsewhere, monkeypatch):
    import huggingface_hub

    asked = []

    def give(repository: str, local_dir: Path, allow_patterns: list[str], **_: object) -> None:
        asked.append(repository)
        local_dir.mkdir()
        for name in allow_patterns:
            shutil.copy(WEIGHTS / repository.partition("/")[2] / name, local_dir)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", give)
    monkeypatch.setenv("LRFDYN_HUB_OWNER", "someone")
    for _ in range(2):
        lrfdyn.from_pretrained(NAME)
    assert asked == [f"someone/{NAME}"]
    assert {path.name for path in (elsewhere / NAME).iterdir()} == set(ENTRIES[NAME].files)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, local_dir, **__: local_dir.mkdir())
    shutil.rmtree(elsewhere / NAME)
    with pytest.raises(LrfdynError, match=f"{NAME} is not whole"):
        lrfdyn.from_pretrained(NAME)
    assert not list(elsewhere.glob("*"))


@stored
@pytest.mark.parametrize("part", [CONFIG_FILE, WEIGHTS_FILE, "recipe.yaml"])
def test_damaged_and_missing_files(elsewhere, part):
    path = shutil.copytree(WEIGHTS / NAME, elsewhere / NAME) / part
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)
    with pytest.raises(LrfdynError, match=f"{part} is damaged or of another version"):
        find_source(NAME)
    path.unlink()
    with pytest.raises(LrfdynError, match=rf"{NAME} is not whole: .*{part}: No such file .*; delete the folder"):
        lrfdyn.create_model("spikformer_4_384", attention="lrf_dyn", pretrained="digits")


def test_the_usual_cache(monkeypatch, tmp_path):
    monkeypatch.delenv("LRFDYN_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert zoo.cache_folder() == tmp_path / "lrfdyn"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert zoo.cache_folder() == tmp_path / ".cache" / "lrfdyn"
