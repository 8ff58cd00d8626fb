"""The plan for ImageNet: its commands run as far as they can without the data, its numbers follow from its formulas."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

pytest.importorskip("yaml")
from benchmarks import imagenet_counts
from docs.parts import imagenet, imagenet_costs
from docs.parts.imagenet_costs import Assumptions, count_of, counted, hours, measured, own_record, scaled, speeds, step
from lrfdyn.cli import build_parser, main
from lrfdyn.training.recipes import load_recipe
from tests.data.make import write_folder
from tests.training.runs import torchrun

PAGE = Path(__file__).parents[1] / "docs" / "imagenet.md"
COUNTED = ("model", "attention", "parameters", "steps", "train_images", "test_images")


def written(page: str) -> list[list[str]]:
    """The words of every command, those of the function `run` put in place."""
    text = re.sub(r"\\\n\s*", " ", page)
    (function,) = re.findall(r"^run\(\) \{ (.*); \}$", text, re.MULTILINE)
    lines = re.findall(r"^ {4}((?:lrfdyn|torchrun|accelerate) .*)$", text, re.MULTILINE)
    lines += [function.replace('"$@"', own) for own in re.findall(r"^run (.*)$", text, re.MULTILINE)]
    return [shlex.split(line, comments=True) for line in lines]


COMMANDS = written(PAGE.read_text("utf-8"))


def launcher(name: str) -> argparse.ArgumentParser:
    if name == "torchrun":
        return get_args_parser()
    return pytest.importorskip("accelerate.commands.launch").launch_command_parser()


def split(words: list[str]) -> tuple[int, list[str]]:
    """How many processes a command starts, as its launcher reads it, and what `lrfdyn` gets in each of them."""
    if words[0] == "lrfdyn":
        return 1, words[1:]
    given = launcher(words[0]).parse_args(words[2 if words[0] == "accelerate" else 1 :])
    assert given.module
    assert given.training_script == "lrfdyn"
    if words[0] == "accelerate":
        assert (given.use_fsdp, str(given.fsdp_version)) == (True, "2")
        return given.num_processes, given.training_script_args
    return int(given.nnodes.split(":")[-1]) * int(given.nproc_per_node), given.training_script_args


def test_the_page_has_all_trainings_of_the_table():
    outs = [words[words.index("--out") + 1] for words in COMMANDS if words[0] == "torchrun"]
    ours = [shlex.split(imagenet.command(run)) for run in counted()]
    assert len({words[-1] for words in ours}) == len(ours) == 25
    assert {words[-1] for words in ours} <= set(outs)
    assert all(["train", *words[1:]] in [split(own)[1][:-4] for own in COMMANDS] for words in ours)
    assert {split(words)[0] for words in COMMANDS} == {1, 8, 64}


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: "-".join(words)[-60:])
def test_commands(words, tmp_path, monkeypatch, capsys):
    """The launcher and `lrfdyn` know every option; every training is dry-run, the whole model on its processes."""
    processes, own = split(words)
    assert build_parser().parse_known_args(own)[1] == []
    if own[0] != "train":
        return
    monkeypatch.setattr("lrfdyn.training.estimate.activation_bytes", lambda *_: 0)  # seconds each, and another test's
    if "webdataset" in own:
        folder = write_folder(tmp_path / "few", train=64)
        assert main(["data", "pack", "imagenet", "--data.root", str(folder), "--workers", "0",
                     "--out", str(tmp_path / "packed")]) == 0  # fmt: skip
        own = [str(tmp_path / "packed") if word == "/data/imagenet_256" else word for word in own]
    capsys.readouterr()
    assert main([*own, "--dry-run", "--processes", str(processes), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    accumulate = facts["recipe"]["run"]["accumulate"]
    assert facts["micro_batch"] * processes * accumulate == facts["batch_size"]
    assert facts["num_classes"] == (3 if "webdataset" in own else 1000)
    for run in counted():
        if own[1:-4] == shlex.split(imagenet.command(run))[1:]:
            assert {key: facts.get(key) for key in COUNTED} == {key: run[key] for key in COUNTED}


def test_a_recipe_from_folders_and_from_shards_to_an_accuracy(tmp_path, capsys):
    """A narrow network on made-up images: stopped, gone on, evaluated."""
    pytest.importorskip("PIL")
    folder, packed = write_folder(tmp_path / "made"), tmp_path / "packed"
    small = ["--attention", "lrf_dyn", "--epochs", "1", "--run.batch_size", "12", "--data.image_size", "32",
             "--data.options", "{workers: 0}", "--model.options", "{widths: [8, 8, 8, 8], depths: [1, 1, 1, 1, 1]}",
             "--resume", "auto", "--out"]  # fmt: skip
    train = ["train", "imagenet_sdt_v3", "--data.root", str(folder), *small, str(tmp_path / "run")]
    assert main([*train, "--minutes", "1e-9"]) == 0
    assert "stopped at step 1 of 2" in capsys.readouterr().out
    assert main(train) == 0
    assert "resuming at step 1" in capsys.readouterr().out
    assert main(["evaluate", str(tmp_path / "run"), "--data.root", str(folder), "--json"]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert json.loads(capsys.readouterr().out)["top1"] == pytest.approx(summary["top1"])
    assert main(["data", "pack", "imagenet", "--data.root", str(folder), "--workers", "0", "--out", str(packed)]) == 0
    from_shards = ["train", "imagenet_sdt_v3", "--data.name", "webdataset", "--data.root", str(packed), *small]
    assert main([*from_shards, str(tmp_path / "other")]) == 0
    assert (tmp_path / "other" / "summary.json").is_file()


@pytest.mark.skipif(sys.platform == "win32", reason="starts processes")
def test_a_recipe_on_two_processes_goes_on_where_it_stopped(tmp_path):
    """By the launcher of the page, with gloo: synchronised norms, a batch that is shared, made-up images."""
    pytest.importorskip("PIL")
    folder, out = write_folder(tmp_path / "made"), tmp_path / "run"
    words = ["-m", "lrfdyn", "train", "imagenet_sdt_v3", "--attention", "lrf_dyn", "--data.root", str(folder),
             "--epochs", "1", "--run.batch_size", "8", "--data.image_size", "32", "--data.options", "{workers: 0}",
             "--model.options", "{widths: [8, 8, 8, 8], depths: [1, 1, 1, 1, 1]}", "--resume", "auto",
             "--run.log_steps", "1", "--out", str(out)]  # several processes can stop where they log  # fmt: skip
    assert "stopped at step 1 of 3" in torchrun(*words, "--minutes", "1e-9")
    assert "resuming at step 1" in torchrun(*words)
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["processes"], summary["epochs"]) == (2, 1)
    assert load_recipe(out / "recipe.yaml").run.sync_batchnorm


def test_counts_are_those_of_the_recipes():
    """What a change of a recipe moves, of all; of one also what takes a second to count."""
    fresh = list(imagenet_counts.trainings())
    for (name, config), run in zip(fresh, counted(), strict=True):
        kept = [run[key] for key in ("recipe", "model", "batch_size", "epochs", "time_steps", "test_epochs")]
        now = config.model.name, config.run.batch_size, config.schedule.total_epochs, config.model.time_steps
        assert kept == [name, *now, config.run.test_epochs]
    again = imagenet_counts.count(*fresh[-2])
    assert again == {key: counted()[-2][key] for key in again}


def test_operations_are_two_for_each_multiplication():
    """ResNet-34 has 3.66 billion; its first convolution, 7 x 7 with stride 2, sees a static image once."""
    first, run = 3 * 64 * 49 * 112 * 112, count_of("sew_resnet34", None)
    assert run["forward_flop"] == pytest.approx(2 * (first + run["time_steps"] * (3.66e9 - first)), rel=0.02)


RUN = {"model": "m", "attention": "ssa", "parameters": 100, "batch_size": 16, "norms": 5, "steps": 3600, "epochs": 10,
       "test_epochs": 5, "test_images": 48, "forward_flop": 10, "kept_bytes": 20}  # fmt: skip
PLAIN = Assumptions(node=4, nvlink=1e3, network=100.0, latency_node=0.01, latency_nodes=0.1, backward=2.0)


def test_a_step_by_its_formula():
    alone = step(RUN, 1, speed=8.0, assumed=PLAIN)
    assert (alone.compute, alone.norms, alone.gradients) == (2.0, 0.0, 0.0)
    near = step(RUN, 4, speed=8.0, assumed=PLAIN)
    assert (near.compute, near.norms, near.gradients) == pytest.approx((0.5, 0.1, 2 * 3 / 4 * 400 / 1e3))
    assert near.seconds(hidden=True) == pytest.approx(0.1 + 0.6), "it cannot be shorter than what it sends"
    assert near.seconds(hidden=False) == pytest.approx(0.1 + 0.5 + 0.6)
    far = step(RUN, 8, speed=8.0, assumed=PLAIN)
    assert (far.norms, far.gradients) == pytest.approx((1.0, 2 * 7 / 8 * 400 / 100))


def test_hours_of_a_range_of_speeds(monkeypatch):
    monkeypatch.setattr(imagenet_costs, "speeds", lambda run: (4.0, 8.0))
    low, high = hours(RUN, 1, PLAIN)
    assert low == pytest.approx(2.0 + 2 * 48 / (3 * 8) / 3600), "and two tests"
    assert high == pytest.approx(4.0 + 2 * 48 / (3 * 4) / 3600)


def test_what_was_measured_is_taken_as_it_is_and_the_rest_in_proportion():
    for run in counted():
        low, high = speeds(run)
        record = own_record(run)
        assert low <= high
        assert (record is not None) == ((run["model"], run["attention"]) in measured())
        assert record is None or low == high == record["images_per_s"]
    known = count_of("sdt_v3_s", "ssa")
    speed = measured()["sdt_v3_s", "ssa"]["images_per_s"]
    double = {**known, "forward_flop": 4 * known["forward_flop"], "kept_bytes": 2 * known["kept_bytes"]}
    assert scaled(double, ["sdt_v3_s"]) == pytest.approx((speed / 4, speed / 2))


def test_rows_side_by_side(monkeypatch):
    """The longest first, each to the node that is free; the fine-tuning of a row stays with it."""
    rows = [{**RUN, "model": name, "long": length} for name, length in (("a", 3), ("b", 5), ("c", 2), ("c", 2))]
    monkeypatch.setattr(imagenet_costs, "counted", lambda: rows)
    monkeypatch.setattr(imagenet_costs, "hours", lambda run, gpus: (run["long"] / 2, run["long"]))
    assert imagenet_costs.side_by_side(1) == (6.0, 12)
    assert imagenet_costs.side_by_side(2) == (3.5, 7), "5, and 4 with 3"
    assert imagenet_costs.side_by_side(8) == (2.5, 5)


@pytest.mark.parametrize(
    ("low", "high", "text"), [(7.46, 7.54, "7.5"), (9.6, 12, "10 to 12"), (1e3, 2e3, "1,000 to 2,000")]
)
def test_a_range_that_cannot_be_seen_is_one_number(low, high, text):
    assert imagenet.span(low, high) == text


def test_a_batch_that_does_not_fit_is_divided(monkeypatch):
    monkeypatch.setattr(imagenet_costs, "peak_bytes", lambda run: 30e9)  # 4 images of 127 GB
    assert [imagenet_costs.parts_needed(RUN, gpus) for gpus in (1, 2, 4)] == [4, 2, 1]
