"""The zoo: its index against the files and the logs, every door to a model, and what is damaged or not there."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import statistics
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import lrfdyn
from benchmarks import zoo as script
from lrfdyn.cli import main
from lrfdyn.errors import LrfdynError
from lrfdyn.files import read_json
from lrfdyn.io import zoo
from lrfdyn.io.hub import CARD_FILE, CONFIG_FILE, WEIGHTS_FILE
from lrfdyn.io.weights import load_tensors
from lrfdyn.models import Spikformer, list_models
from lrfdyn.sources import find_source
from tests.models.host_checks import randomize
from tests.training.runs import tiny, train

ROOT = Path(__file__).parent.parent
WEIGHTS = ROOT / "weights"
ENTRIES = {entry.name: entry for entry in lrfdyn.list_pretrained()}
NAME = "spikformer_digits_lrf_dyn"
IMAGES = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
stored = pytest.mark.skipif(not WEIGHTS.is_dir(), reason="no weights here: an sdist has none")


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


# The index.


@stored
def test_the_index_has_all_folders_and_no_others():
    assert {path.name for path in WEIGHTS.iterdir()} == set(ENTRIES)
    assert not set(ENTRIES) & set(list_models())
    kinds = [(entry.model, entry.attention, entry.data) for entry in ENTRIES.values()]
    assert len({*kinds}) == len(kinds)  # `create_model(..., pretrained=DATA)` finds one


@stored
@pytest.mark.parametrize("name", ENTRIES)
def test_files_are_those_of_the_index(name):
    entry, folder = ENTRIES[name], WEIGHTS / name
    assert {path.name for path in folder.iterdir()} == {*entry.files, CARD_FILE}
    zoo.verify(entry, folder)
    assert {part: (folder / part).stat().st_size for part in entry.files} == {
        part: facts["bytes"] for part, facts in entry.files.items()
    }
    tensors, _ = load_tensors(folder / WEIGHTS_FILE)
    assert {value.dtype for value in tensors.values() if value.is_floating_point()} == {torch.bfloat16}
    config = read_json(folder / CONFIG_FILE, "config")
    assert (config["model"], config["options"].get("attention")) == (entry.model, entry.attention)
    model = find_source(folder).load()
    assert sum(parameter.numel() for parameter in model.parameters()) == entry.parameters


@stored
def test_files_are_small():
    sizes = [path.stat().st_size for path in WEIGHTS.rglob("*") if path.is_file()]
    assert max(sizes) <= 20e6
    assert sum(sizes) <= 150e6


@pytest.mark.parametrize("name", ENTRIES)
def test_numbers_are_those_of_the_logs(name):
    entry = ENTRIES[name]
    summaries = [read_json(ROOT / log / "summary.json", "log") for log in entry.logs]
    assert entry.top1 == {str(summary["seed"]): summary["top1"] for summary in summaries}
    assert str(entry.seed) == next(iter(entry.top1))  # the first and not the best
    for summary in summaries:
        for key in ("model", "attention", "data", "recipe", "epochs", "parameters"):
            assert summary[key] == getattr(entry, key), key
    assert entry.mean == statistics.mean(entry.top1.values())
    assert abs(entry.float32 - entry.top1[str(entry.seed)]) <= 0.5
    for value in (entry.float32, entry.bf16, entry.integer):  # whole images
        assert value is None or round(value * entry.test_images / 100, 6).is_integer()


@stored
@pytest.mark.parametrize("name", ENTRIES)
def test_cards_say_what_the_index_says(name):
    entry, card = ENTRIES[name], (WEIGHTS / name / CARD_FILE).read_text()
    digest = entry.files[WEIGHTS_FILE]["sha256"]
    for text in (digest, f"{entry.mean:.2f}", f"{entry.bf16:.2f} %", "Apache-2.0", "CC BY", *entry.logs, "## Limits"):
        assert text in card, text
    integer = "in integers | none: it takes event frames" if entry.integer is None else f"{entry.integer:.2f} %"
    assert integer in card
    assert not re.search(r"(/root|/home|/work|/tmp)/", card)


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
    with pytest.raises(LrfdynError, match=rf"{NAME} is not whole: cannot read .*{part} \(No such file"):
        lrfdyn.create_model("spikformer_4_384", attention="lrf_dyn", pretrained="digits")


def test_the_usual_cache(monkeypatch, tmp_path):
    monkeypatch.delenv("LRFDYN_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert zoo.cache_folder() == tmp_path / "lrfdyn"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert zoo.cache_folder() == tmp_path / ".cache" / "lrfdyn"


# Rounded weights.


def test_stored_weights_are_the_rounded_ones(tmp_path):
    model = randomize(Spikformer(dim=16, depth=1, heads=2, image_size=16, in_channels=1, attention="lrf_dyn")).eval()
    model.save_pretrained(tmp_path, dtype=torch.bfloat16, description="Of a test.")
    loaded = lrfdyn.from_pretrained(tmp_path)
    rounded = {
        name: value.bfloat16().float() if value.is_floating_point() else value
        for name, value in model.state_dict().items()
    }
    assert any(not torch.equal(value, rounded[name]) for name, value in model.state_dict().items())
    model.load_state_dict(rounded)
    for name, value in loaded.state_dict().items():
        assert value.dtype == rounded[name].dtype
        assert torch.equal(value, rounded[name]), name
    images = torch.randn(2, 1, 16, 16)
    assert torch.equal(loaded(images), model(images))
    loaded.save_pretrained(tmp_path / "again")  # it is as it was, and so keeps its description
    assert "Of a test." in (tmp_path / "again" / CARD_FILE).read_text()


def test_types_that_weights_cannot_have(tmp_path):
    model = Spikformer(dim=8, depth=1, heads=1, image_size=16)
    with pytest.raises(LrfdynError, match=r"^dtype: expected one of float32, .*, got torch\.int8"):
        model.save_pretrained(tmp_path, dtype=torch.int8)
    with torch.no_grad():
        model.head.weight[0, 0] = 1e6
    with pytest.raises(LrfdynError, match=r"^dtype: torch\.float16 cannot hold head\.weight"):
        model.save_pretrained(tmp_path, dtype=torch.float16)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / CONFIG_FILE).read_text()) | {"dtype": "int8"}
    tensors, _ = load_tensors(tmp_path / WEIGHTS_FILE)
    lrfdyn.io.save_tensors(tmp_path / WEIGHTS_FILE, tensors, config)
    (tmp_path / CONFIG_FILE).write_text(json.dumps(config))
    with pytest.raises(LrfdynError, match="dtype: expected one of float32, .*, got 'int8'"):
        lrfdyn.from_pretrained(tmp_path)


# The list, and the script.


def test_the_list(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = output(capsys, "models", "--pretrained")
    entry = ENTRIES[NAME]
    (line,) = [line for line in text.splitlines() if line.startswith(NAME)]
    number = f"{entry.mean:.2f} ± {entry.deviation:.2f}"
    assert line.split() == [NAME, "digits", "lrf_dyn", *number.split(), "67,612", f"{entry.bytes / 1e6:.2f}"]
    rows = json.loads(output(capsys, "models", "--pretrained", "--json"))
    assert [row["name"] for row in rows] == sorted(ENTRIES)
    (row,) = [row for row in rows if row["name"] == NAME]
    assert (row["top1_mean"], row["top1_std"], row["bytes"]) == (entry.mean, entry.deviation, entry.bytes)
    chosen = json.loads(output(capsys, "models", "spikformer_4_384", "--pretrained", "--attention", "ssa", "--json"))
    assert {(row["model"], row["attention"]) for row in chosen} == {("spikformer_4_384", "ssa")}
    best = json.loads(output(capsys, "models", "--pretrained", "--sort", "accuracy", "--json"))
    assert [row["top1_mean"] for row in best] == sorted((row["top1_mean"] for row in rows), reverse=True)
    assert main(["models", "sdt*", "--pretrained"]) == 2
    assert "no trained model matches 'sdt*'" in capsys.readouterr().err
    assert main(["models", "--pretrained", "--sort", "input"]) == 2


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("zoo")
    train(tiny(schedule={"epochs": 1, "warmup_epochs": 0, "mix_epochs": 0}), folder / "run")
    return folder / "run"


def test_add(run, tmp_path, monkeypatch):
    """A run, which is then a model of the zoo as any other."""
    monkeypatch.setattr(script, "ROOT", run.parent)
    arguments = ["add", str(run), "--logs", str(run), "--weights", str(tmp_path / "weights")]
    assert script.main([*arguments, "--index", str(tmp_path / "zoo.json")]) == 0
    monkeypatch.setattr(zoo, "INDEX", tmp_path / "zoo.json")
    monkeypatch.setattr(zoo, "CHECKOUT", tmp_path)
    (tmp_path / "pyproject.toml").touch()
    (entry,) = lrfdyn.list_pretrained()
    summary = read_json(run / "summary.json", "run")
    assert (entry.name, entry.logs, entry.deviation) == ("spikformer_digits_lrf_dyn", ("run",), None)
    assert entry.float32 == pytest.approx(summary["top1"])
    assert (entry.test_images, entry.train_images, entry.parameters) == (360, 1437, summary["parameters"])
    assert entry.integer is not None
    assert find_source(entry.name).load().config["dim"] == 8
    assert str(run) not in (tmp_path / "weights" / entry.name / "recipe.yaml").read_text()


def test_add_wants_the_logs_of_the_run(run, tmp_path):
    other = shutil.copytree(run, tmp_path / "other")
    summary = read_json(other / "summary.json", "run")
    (other / "summary.json").write_text(json.dumps({**summary, "seed": 7}))
    where = {"data_root": None, "name": None, "weights": tmp_path, "index": tmp_path / "zoo.json"}
    with pytest.raises(LrfdynError, match="a seed that is not in the logs: 0"):
        script.add(run, [other], **where)
    with pytest.raises(LrfdynError, match="logs: expected runs that differ in their seed only"):
        (other / "summary.json").write_text(json.dumps({**summary, "seed": 7, "epochs": 3}))
        script.add(run, [run, other], **where)
    with pytest.raises(LrfdynError, match="says 1.00 %, the model has"):
        (other / "summary.json").write_text(json.dumps({**summary, "top1": 1.0}))
        script.add(run, [other], **where)
    with pytest.raises(LrfdynError, match="name: spikformer_4_384 is the name of a network"):
        script.add(run, [run], **{**where, "name": "spikformer_4_384"})


@stored
def test_build(tmp_path, monkeypatch):
    """The integer files are made and compared; the float file, which takes long, has tests of its own."""
    monkeypatch.setenv("LRFDYN_HUB_OWNER", "someone")
    made = SimpleNamespace(path="model.onnx", check="nothing")
    monkeypatch.setattr(script, "export_model", lambda model, path, **_: path.touch() or made)
    assert script.main(["build", str(tmp_path), "--names", NAME]) == 0
    folder = tmp_path / "someone" / NAME
    extra = {"model.onnx", "integer.onnx", "integer.safetensors"}
    assert {path.name for path in folder.iterdir()} == {*ENTRIES[NAME].files, CARD_FILE, *extra}
    monkeypatch.setattr(script, "load_integer", lambda path: lambda levels: torch.zeros(len(levels), 10))
    with pytest.raises(LrfdynError, match=r"integer\.safetensors gives other integers"):
        script.build(ENTRIES[NAME], tmp_path)
