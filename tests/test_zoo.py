"""The zoo: its index against the files and the logs, the list, and the script that fills it."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import statistics
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import lrfdyn
from benchmarks import zoo as script
from benchmarks.zoo_card import TERMS
from lrfdyn.cli import main
from lrfdyn.errors import LrfdynError
from lrfdyn.files import read_json
from lrfdyn.io import zoo
from lrfdyn.io.hub import CARD_FILE, CONFIG_FILE, WEIGHTS_FILE
from lrfdyn.io.weights import load_tensors
from lrfdyn.models import list_models
from lrfdyn.sources import find_source
from tests.training.runs import tiny, train

ROOT = Path(__file__).parent.parent
WEIGHTS = ROOT / "weights"
ENTRIES = {entry.name: entry for entry in lrfdyn.list_pretrained()}
NAME = "spikformer_digits_lrf_dyn"
IMAGES = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
stored = pytest.mark.skipif((ROOT / "PKG-INFO").is_file(), reason="an sdist has no weights")


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
        for key in ("model", "attention", "data", "recipe", "epochs", "parameters", "precision"):
            assert summary[key] == getattr(entry, key), key
    assert entry.mean == statistics.mean(entry.top1.values())
    assert abs(entry.float32 - entry.top1[str(entry.seed)]) <= 0.5
    for value in (entry.float32, entry.bf16, entry.integer):  # whole images
        assert value is None or round(value * entry.test_images / 100, 6).is_integer()


def test_integers_cost_at_most_three_tenths_of_a_percent():
    """Where there are images enough to tell."""
    many = [entry for entry in ENTRIES.values() if entry.integer is not None and entry.test_images >= 10_000]
    assert many
    for entry in many:
        assert entry.integer >= max(entry.float32, entry.bf16) - 0.3, entry.name


@stored
@pytest.mark.parametrize("name", ENTRIES)
def test_cards_say_what_the_index_says(name):
    entry, card = ENTRIES[name], (WEIGHTS / name / CARD_FILE).read_text()
    digest = entry.files[WEIGHTS_FILE]["sha256"]
    for text in (
        digest,
        f"{entry.mean:.2f}",
        f"{entry.bf16:.2f} %",
        "Apache-2.0",
        TERMS[entry.data][1],
        *entry.logs,
        "## Limits",
    ):
        assert text in card, text
    integer = "in integers | none: it takes event frames" if entry.integer is None else f"{entry.integer:.2f} %"
    assert integer in card
    assert not re.search(r"(/root|/home|/work|/tmp)/", card)


# The list, and the script.


def test_the_list(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = output(capsys, "models", "--pretrained")
    entry = ENTRIES[NAME]
    (line,) = [line for line in text.splitlines() if line.startswith(NAME)]
    number = f"{entry.mean:.2f} ± {entry.deviation:.2f}"
    assert line.split() == [NAME, "digits", "lrf_dyn", *number.split(), "67,612", f"{entry.bytes / 1e6:.1f}"]
    names = {line.split()[0] for line in text.splitlines()}
    assert names >= ENTRIES.keys()  # none is broken in two
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
    changed = dataclasses.replace(entry, integer=0.0)
    card = tmp_path / "weights" / entry.name / CARD_FILE
    written = card.read_text()
    card.unlink()
    assert script.measure_integers(changed, None, tmp_path / "weights", tmp_path / "zoo.json") == entry
    assert card.read_text() == written
    assert str(run) not in (tmp_path / "weights" / entry.name / "recipe.yaml").read_text()


def test_add_wants_the_logs_of_the_run(run, tmp_path):
    other = shutil.copytree(run, tmp_path / "other")
    summary = read_json(other / "summary.json", "run")
    (other / "summary.json").write_text(json.dumps({**summary, "seed": 7}))
    where = {"data_root": None, "name": None, "weights": tmp_path, "index": tmp_path / "zoo.json"}
    with pytest.raises(LrfdynError, match="a seed that is not in the logs: 0"):
        script.add(run, [other], **where)
    (other / "summary.json").write_text(json.dumps({**summary, "seed": 7, "epochs": 3}))
    with pytest.raises(LrfdynError, match="logs: expected runs that differ in their seed only"):
        script.add(run, [run, other], **where)
    (other / "summary.json").write_text(json.dumps({**summary, "top1": 1.0}))
    with pytest.raises(LrfdynError, match=r"says 1\.00 %, the model has"):
        script.add(run, [other], **where)
    with pytest.raises(LrfdynError, match="name: spikformer_4_384 is the name of a network"):
        script.add(run, [run], **{**where, "name": "spikformer_4_384"})


def test_a_network_attention_and_data_are_one_model(tmp_path):
    entry = ENTRIES[NAME]
    for name in ("first", "first"):  # again: it takes its own place
        script.store_entry(dataclasses.replace(entry, name=name), tmp_path / "zoo.json")
    with pytest.raises(LrfdynError, match="name: first is of the same network, attention and data"):
        script.store_entry(dataclasses.replace(entry, name="second"), tmp_path / "zoo.json")


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
