"""Configurations: what is wrong is named, with the near match."""

from __future__ import annotations

import json
from datetime import date
from itertools import pairwise
from pathlib import Path

import pytest

from lrfdyn.cli import main
from lrfdyn.errors import LrfdynError
from lrfdyn.training.config import ScheduleConfig, StageConfig
from lrfdyn.training.recipes import find_recipe, load_recipe, parse_config, parse_yaml
from tests.training.runs import TINY, tiny, write_recipe


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("optimizer", {"learning_rat": 1}, "key in optimizer: unknown name 'learning_rat'; did you mean learning_rate"),
        ("optimizer", {"learning_rate": "fast"}, "optimizer.learning_rate: expected a number, got 'fast'"),
        ("optimizer", {"learning_rate": True}, "optimizer.learning_rate: expected a number, got True"),
        ("optimizer", {"betas": [0.9, 1]}, r"optimizer.betas: expected two numbers in \[0, 1\), got \(0.9, 1.0\)"),
        ("optimizer", {"learning_rate": float("inf")}, "optimizer.learning_rate: expected a finite number, got inf"),
        ("schedule", {"mix_epochs": -1}, "schedule.mix_epochs: expected an integer >= 0, got -1"),
        ("optimizer", {"learning_rate": -1}, "optimizer.learning_rate: expected a positive number, got -1.0"),
        ("optimizer", {"name": "adam"}, "optimizer.name: unknown name 'adam'; did you mean adamw"),
        ("optimizer", {"betas": [0.9]}, r"optimizer.betas: expected 2 numbers, got \[0.9\]"),
        ("schedule", {"epochs": 1.5}, "schedule.epochs: expected an integer, got 1.5"),
        ("schedule", {"epochs": "ten"}, "schedule.epochs: expected an integer, got 'ten'"),
        ("schedule", {"epochs": 3, "warmup_epochs": 4}, "schedule.warmup_epochs: expected 0 to the 3 epochs, got 4"),
        (
            "schedule",
            {"rates": [[0, 1], [1, 0]]},
            r"schedule.rates: expected epochs that grow from 0 to 2, got \[0.0, 1",
        ),
        ("schedule", {"rates": [[0, 1], [2, -1]]}, r"schedule.rates: expected shares >= 0, got \[1.0, -1.0\]"),
        ("schedule", {"rates": []}, r"schedule.rates: expected epochs that grow from 0 to 2, got \[\]"),
        ("schedule", {"rates": [1, 2]}, r"schedule.rates: expected 2 numbers, got \[1\]"),
        ("schedule", {"rates": [[0, "x"]]}, "schedule.rates: expected a number, got 'x'"),
        (
            "schedule",
            {"stages": [{"epochs": 2}]},
            "schedule.stages: expected fewer than the 2 epochs of the run, got 2",
        ),
        ("schedule", {"stages": [{"epochs": 0}]}, "schedule.stages: stage.epochs: expected an integer >= 1, got 0"),
        (
            "schedule",
            {"stages": [{"epochs": 1, "tau": 0.5}]},
            "schedule.stages: stage.tau: expected a number >= 1, got",
        ),
        (
            "schedule",
            {"stages": [{"time_steps": 1}]},
            "schedule.stages: stage.epochs: missing, and there is no default",
        ),
        (
            "schedule",
            {"stages": [{"epoch": 1}]},
            "schedule.stages: key in stage: unknown name 'epoch'; did you mean ep",
        ),
        ("schedule", {"stages": [3]}, "schedule.stages: stage: expected keys with values, got 3"),
        ("schedule", {"stages": {"epochs": 1}}, "schedule.stages: expected a list, got {'epochs': 1}"),
        ("data", {"held_out": 0}, "data.held_out: expected an integer >= 1, got 0"),
        ("run", {"batch_size": 0}, "run.batch_size: expected an integer >= 1, got 0"),
        ("run", {"sync_batchnorm": 1}, "run.sync_batchnorm: expected true or false, got 1"),
        ("model", {"dilations": [1, "x"]}, "model.dilations: expected an integer, got 'x'"),
        ("model", {"dilations": 2.5}, "model.dilations: expected a list, got 2.5"),
        ("model", {"options": 3}, "model.options: expected keys with values, got 3"),
        ("model", {"options": {"num_classes": 5}}, "model.options: num_classes is the data's, and cannot be chosen"),
        ("model", {"options": {"token": "qkv"}}, "model.options: token has a key of its own, model.token"),
        ("model", {"directions": 3}, "model.directions: expected 1 or 2, got 3"),
        ("model", {"directions": True}, "model.directions: expected an integer, got True"),
        ("optimizer", {"weight_decay": float("inf")}, "optimizer.weight_decay: expected a finite number, got inf"),
        ("run", {"seed": 9 * 10**15}, r"run.seed: expected an integer from 0 to 2\^40 - 1, got 9000000000000000"),
        ("model", {"options": {"name": "x"}}, "model.options: name has a key of its own, model.name"),
        ("model", {"options": {"head_options": {}}}, "model.options: head_options has a key of its own, model.head"),
        ("model", {"options": {"mlp_ratio": float("nan")}}, "model.options: mlp_ratio: expected text, finite numbers"),
        ("data", {"options": {"since": date(2020, 1, 1)}}, "data.options: since: expected text, finite numbers"),
        ("model", {"options": {1: 2}}, "model.options: expected keys with values"),
        ("optimizer", {"learning_rate": 10**400}, "optimizer.learning_rate: expected a number"),
        ("augmentation", {"mixup": -1}, "augmentation.mixup: expected a number >= 0, got -1"),
        ("optimiser", {}, "section: unknown name 'optimiser'; did you mean optimizer"),
        ("data", 3, "data: expected keys with values, got 3"),
    ],
)
def test_wrong_value(section, values, message):
    with pytest.raises(LrfdynError, match=f"^r.yaml: .*{message}"):
        parse_config(
            {**TINY, section: {**TINY.get(section, {}), **values} if isinstance(values, dict) else values}, "r.yaml"
        )


def test_an_override_in_a_section_that_is_a_text():
    with pytest.raises(LrfdynError, match=r"^r: model: expected keys with values, got 'imagenet'"):
        parse_config({**TINY, "model": "imagenet"}, "r", {"model.attention": "ssa"})


def test_what_is_needed_and_missing():
    with pytest.raises(LrfdynError, match=r"^r: model.name: missing, and there is no default"):
        parse_config({**TINY, "model": {}}, "r")
    with pytest.raises(LrfdynError, match=r"^r: data: missing"):
        parse_config({"model": {"name": "x"}}, "r")


def test_numbers_as_yaml_reads_them():
    assert tiny(optimizer={"learning_rate": "5e-4"}).optimizer.learning_rate == 5e-4  # no number in YAML 1.1
    assert tiny(schedule={"warmup_epochs": 1}).schedule.warmup_epochs == 1.0
    assert tiny(run={"cuda_graph": False}).run.cuda_graph == "off"
    assert parse_config(tiny().as_dict()) == tiny()


@pytest.mark.parametrize(
    ("text", "dilations"), [("1,3", (1, 3)), ("[1, 3]", (1, 3)), ("()", ()), ("[]", ()), ("1", (1,)), ("null", None)]
)
def test_override(text, dilations, tmp_path):
    path = write_recipe(tmp_path / "r.yaml")
    config = load_recipe(path, {"model.dilations": text, "run.seed": "7", "model.options": "{dim: 16}"})
    assert (config.model.dilations, config.run.seed) == (dilations, 7)
    assert config.model.options == {**TINY["model"]["options"], "dim": 16}


def test_extends(tmp_path):
    write_recipe(tmp_path / "_base.yaml")
    (tmp_path / "r.yaml").write_text("extends: _base.yaml\nmodel: {attention: ssa}\nrun: {seed: 2}\n")
    config = load_recipe(tmp_path / "r.yaml")
    assert (config.model.attention, config.run.seed, config.model.time_steps) == ("ssa", 2, 1)
    (tmp_path / "r.yaml").write_text("extends: _base.yaml\nrun:\n  # seed: 2\n")
    assert load_recipe(tmp_path / "r.yaml") == load_recipe(tmp_path / "_base.yaml"), "a section without keys"
    (tmp_path / "r.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(LrfdynError, match=r"recipe: .*r.yaml is not UTF-8 text"):
        load_recipe(tmp_path / "r.yaml")
    (tmp_path / "loop.yaml").write_text("extends: loop.yaml\n")
    with pytest.raises(LrfdynError, match=r"recipe: .*loop.yaml extends itself"):
        load_recipe(tmp_path / "loop.yaml")
    (tmp_path / "lost.yaml").write_text("extends: nowhere.yaml\n")
    with pytest.raises(LrfdynError, match=r"recipe: extends: no such file: nowhere.yaml"):
        load_recipe(tmp_path / "lost.yaml")
    (tmp_path / "bad.yaml").write_text("model:\n  name: [\n")
    with pytest.raises(LrfdynError, match=r"bad.yaml is not YAML in line 3"):
        load_recipe(tmp_path / "bad.yaml")


def test_a_key_that_stands_twice_is_an_error(tmp_path, capsys):
    """PyYAML takes the last one: half of what was edited would have no effect."""
    path = write_recipe(tmp_path / "r.yaml")
    path.write_text(path.read_text() + "schedule:\n  epochs: 3\n")
    with pytest.raises(LrfdynError, match=r"r.yaml is not YAML in line \d+ \(the key schedule stands twice\)"):
        load_recipe(path)
    assert main(["train", "digits", "--dry-run", "--model.options", "{dim: 8, dim: 16}"]) == 2
    assert "--model.options: cannot read '{dim: 8, dim: 16}' as YAML" in capsys.readouterr().err
    assert parse_yaml("a: &a {x: 1, y: 2}\nb:\n  <<: *a\n  x: 3\nc: {<<: *a}") == {
        "a": {"x": 1, "y": 2},
        "b": {"x": 3, "y": 2},
        "c": {"x": 1, "y": 2},
    }, "keys that are merged in may be replaced"


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join(9 * [f'*{old}'])}]\n" for old, new in pairwise("abcdefghijk")
)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: !!float x", "cannot read 'x' as float"),
        ("a: !!timestamp x", "cannot read 'x' as timestamp"),
        ("a: 2001-13-45", "cannot read '2001-13-45' as timestamp"),
        ("a: " + 5000 * "9", "cannot read '999"),
        ("a: " + 5000 * "[", "more than 30 levels deep"),
        ("a: &a [*a]", "an alias inside of what it stands for"),
        (BOMB, "more than 10000 values"),
    ],
    ids=["float", "timestamp", "date", "digits", "deep", "cycle", "bomb"],
)
def test_yaml_that_cannot_be_a_recipe_is_one_line(text, problem, tmp_path):
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(LrfdynError, match=r"r.yaml is not YAML in line \d+ ") as error:
        load_recipe(tmp_path / "r.yaml")
    assert problem in str(error.value)
    assert len(str(error.value)) < 400


def test_a_network_without_end_is_refused_by_the_dry_run(capsys):
    assert main(["train", "digits", "--dry-run", "--model.options", "{depth: 1000000}"]) == 2
    assert "depth: expected at most 1000, got 1000000" in capsys.readouterr().err


def test_unknown_recipe_and_option(capsys):
    with pytest.raises(LrfdynError, match="unknown name 'imagenet_spikformr'; did you mean imagenet_spikformer"):
        find_recipe("imagenet_spikformr")
    assert main(["train", "digits", "--optimizer.learning_rat", "3"]) == 2
    assert "unknown name '--optimizer.learning_rat'; did you mean --optimizer.learning_rate" in capsys.readouterr().err
    assert main(["train", "digits", "--schedule.epochs", "x", "--dry-run"]) == 2
    assert "error: --schedule.epochs: expected an integer, got 'x'" in capsys.readouterr().err


def test_fingerprint_is_of_what_decides():
    assert tiny().fingerprint() == tiny(run={"log_steps": 9}, data={"root": "elsewhere"}).fingerprint()
    assert tiny().fingerprint() != tiny(run={"seed": 1}).fingerprint()
    assert tiny().fingerprint() == "e7b54846ad9465a5", "of keys that came later and are not set"
    for section, values in (("schedule", {"stages": [{"epochs": 1}]}), ("data", {"held_out": 10})):
        assert tiny(**{section: values}).fingerprint() != tiny().fingerprint()
    assert tiny(model={"coupling": "opposite"}).fingerprint() != tiny().fingerprint()
    two = tiny(model={"attention": "lrf_dyn", "directions": 2})
    assert two.fingerprint() != tiny(model={"attention": "lrf_dyn"}).fingerprint()


@pytest.mark.parametrize("name", ["lrf_dyn_qkv_100", "ssa_strong_300"])
def test_fingerprint_of_recorded_runs(name):
    """Keys that came later leave the runs from before as they were: a sweep does not make them again."""
    folder = Path(__file__).parents[2] / "results" / "cifar100" / name
    recorded = json.loads((folder / "summary.json").read_text(encoding="utf-8"))["fingerprint"]
    assert load_recipe(folder / "recipe.yaml").fingerprint() == recorded


def test_share_of_the_batch():
    assert tiny().micro_batch(4) == 32
    with pytest.raises(
        LrfdynError, match=r"run.batch_size: expected a multiple of 6 \(3 processes x run.accumulate 2\)"
    ):
        tiny(run={"accumulate": 2}).micro_batch(3)
    assert tiny().micro_batch(64) == 2
    with pytest.raises(LrfdynError, match=r"run.batch_size: mixup and cutmix pair .* multiple of 256, got 128"):
        tiny().micro_batch(128)
    assert tiny(schedule={"mix_epochs": 0}).micro_batch(128) == 1


def test_schedule_in_fewer_epochs(tmp_path, capsys):
    official = ScheduleConfig(epochs=300, warmup_epochs=20, cooldown_epochs=10, mix_epochs=200)
    short = official.within(100)
    assert (short.epochs, short.cooldown_epochs, short.warmup_epochs, short.mix_epochs) == (97, 3, 6.45, 65)
    assert short.total_epochs == 100
    assert official.within(310) == official
    for total in (1, 2, 3):
        assert official.within(total).total_epochs == total
    fast = load_recipe("cifar100_spikformer_fast").schedule
    short = fast.within(20)
    assert short.stages == (StageConfig(14, time_steps=1, tau=1.5),)
    assert short.rates == ((0, 0.02), (0.33, 1), (14, 0.5), (20, 0))
    assert fast.within(150) == fast
    assert fast.within(1).stages == (), "the last stage is the one that stays"
    assert main(["train", "cifar100_spikformer", "--epochs", "31", "--dry-run", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["epochs"], facts["recipe"]["schedule"]["epochs"]) == (31, 30)
    assert main(["train", "cifar100_spikformer", "--epochs", "0", "--dry-run"]) == 2
    assert "epochs: expected an integer >= 1, got 0" in capsys.readouterr().err


@pytest.mark.parametrize("folder", ["2024", "1e3", "true"])
def test_a_text_that_reads_like_a_number_stays_a_text(folder):
    assert load_recipe("digits", {"data.root": folder}).data.root == folder
