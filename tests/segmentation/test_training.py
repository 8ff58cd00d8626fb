"""Segmentation on the training engine: it learns, resumes, starts from a backbone, and counts over processes."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lrfdyn.cli import main
from lrfdyn.data import Augmentation, create_data
from lrfdyn.data.preprocess import IMAGENET_DEVIATION, IMAGENET_MEAN, Preprocessing
from lrfdyn.errors import LrfdynError
from lrfdyn.io.weights import list_checkpoints, read_checkpoint
from lrfdyn.models import create_model
from lrfdyn.segmentation import metric
from lrfdyn.segmentation.task import Segmentation
from lrfdyn.training.optim import build_optimizer, rate_at, set_rate
from lrfdyn.training.processes import build_accelerator
from lrfdyn.training.recipes import dump_yaml
from lrfdyn.training.run import run_training
from lrfdyn.training.tasks import TestRun
from lrfdyn.training.trainer import Trainer
from tests.segmentation.make import CLASSES, TINY_HOST, tiny_config, tiny_model, write_shapes

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    return write_shapes(tmp_path_factory.mktemp("shapes"))


def test_it_learns_shapes(tmp_path):
    config = tiny_config(
        write_shapes(tmp_path / "data", train=64, validation=8),
        model={"options": {"widths": [16, 16, 16, 16]}, "head": {"width": 64}},
        optimizer={"learning_rate": 0.008},
        schedule={"epochs": 16},
        run={"batch_size": 8},
    )
    summary = run_training(config, tmp_path / "run", recipe="shapes", command="test")
    assert summary["miou"] > 80
    assert summary["pixel_accuracy"] > summary["mean_accuracy"] - 10
    assert "top1" not in summary
    assert {"recipe", "model", "attention", "token", "dilations", "epochs", "seed", "parameters", "wall_s"} <= set(
        summary
    )
    with (tmp_path / "run" / "classes.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["class"] for row in rows] == ["class 1", "class 2", "class 3"]
    assert sum(float(row["iou"]) for row in rows) / 3 == pytest.approx(summary["miou"], abs=1e-3)
    saved = tmp_path / "run" / "model"
    how = Preprocessing(32, IMAGENET_MEAN, IMAGENET_DEVIATION, crop_share=1.0, interpolation="bilinear")
    assert json.loads((saved / "config.json").read_text())["preprocessing"] == how.as_dict()
    card = (saved / "README.md").read_text()
    assert 'pipeline_tag: "image-segmentation"' in card
    assert "[B, 3, H, W] to [B, 3, H, W]" in card


def test_a_run_that_was_interrupted_ends_the_same(shapes, tmp_path):
    config = tiny_config(shapes)
    run_training(config, tmp_path / "whole", recipe="x")
    stopped = Trainer(config, tmp_path / "parts")
    stopped._train_epoch(0, 0.0)
    stopped.save()
    run_training(config, tmp_path / "parts", recipe="x", resume="auto")
    whole, parts = (
        read_checkpoint(list_checkpoints(tmp_path / name / "checkpoints")[0])[0] for name in ("whole", "parts")
    )
    assert whole.keys() == parts.keys()
    for name, value in whole.items():
        assert value.equal(parts[name]), name


def test_backbone_of_a_classifier(shapes, tmp_path):
    torch.manual_seed(3)
    trained = create_model("sdt_v3_t", attention="lrf_dyn", image_size=32, num_classes=7, **TINY_HOST)
    trained.save_pretrained(tmp_path / "classifier")
    trainer = Trainer(tiny_config(shapes, model={"backbone": str(tmp_path / "classifier")}), tmp_path / "run")
    for name, value in trainer.model.backbone.state_dict().items():
        assert value.equal(trained.state_dict()[name]), name
    other = create_model("sdt_v3_t", attention="ssa", image_size=32, **TINY_HOST)
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(LrfdynError, match="does not fit the model"):
        Trainer(tiny_config(shapes, model={"backbone": str(tmp_path / "other")}), tmp_path / "run")
    with pytest.raises(LrfdynError, match=r"model.backbone: no such file"):
        Trainer(tiny_config(shapes, model={"backbone": str(tmp_path / "none")}), tmp_path / "run")


def test_head_learns_at_its_own_rate(shapes):
    config = tiny_config(shapes)
    model = tiny_model()
    optimizer = build_optimizer(model, config.optimizer, config.base_rate)
    set_rate(optimizer, 0.5)
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert len(rates) == len(list(model.parameters()))
    assert {rates[id(p)] for p in model.head.parameters()} == {1.0}
    assert {rates[id(p)] for p in model.backbone.parameters()} == {0.5}


def test_poly_schedule(shapes):
    schedule = tiny_config(shapes, schedule={"epochs": 10, "warmup_epochs": 2, "warmup_rate": 0.0}).schedule
    assert rate_at(schedule, 1.0, 1.0) == pytest.approx(0.5)
    assert rate_at(schedule, 1.0, 2.0) == pytest.approx(1.0)
    assert rate_at(schedule, 1.0, 6.0) == pytest.approx(0.5**0.9)
    assert rate_at(schedule, 1.0, 10.0) == 0


def test_evaluate_command(shapes, tmp_path, capsys):
    config = tiny_config(shapes)
    summary = run_training(config, tmp_path / "run", recipe="x")
    assert main(["evaluate", str(tmp_path / "run"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["miou"] == pytest.approx(summary["miou"])
    assert len(result["classes"]) == CLASSES
    flags = ["--data.options", "{flip: true, window: 32}", "--classes"]
    assert main(["evaluate", str(tmp_path / "run"), *flags]) == 0
    printed = capsys.readouterr().out
    assert "mIoU" in printed
    assert "class 1" in printed


def test_dry_run_counts_the_pictures(shapes, tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(dump_yaml(tiny_config(shapes).as_dict()))
    assert main(["train", str(recipe), "--dry-run", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["train_images"], facts["steps_per_epoch"], facts["steps"]) == (24, 1, 2)
    assert main(["train", str(recipe), "--dry-run", "--data.root", "nowhere"]) == 0
    printed = capsys.readouterr().out
    assert "train_images: 20,210\n" in printed
    assert "(images and classes: of the whole data set, not counted: no such folder nowhere" in printed
    assert main(["train", str(recipe), "--dry-run", "--data.root", str(tmp_path)]) == 0
    assert f"not counted: no such folder {tmp_path}/images/training" in capsys.readouterr().out


def test_the_size_of_test_batches_does_not_matter(shapes):
    """Images of several sizes that are padded to one go through the network together."""
    source = create_data("ade20k", shapes, Augmentation(), image_size=32, num_classes=CLASSES)
    torch.manual_seed(1)
    model = tiny_model().double()
    accelerator = build_accelerator(tiny_config(shapes).run)
    one, many = (Segmentation().test(model, TestRun(source, size, accelerator, torch.float64)) for size in (1, 4))
    assert one["classes"] == many["classes"]
    assert one["test_loss"] == pytest.approx(many["test_loss"], rel=1e-9)


def test_two_processes_equal_one(shapes, tmp_path):
    config = tiny_config(shapes, run={"precision": "fp64"}, schedule={"epochs": 1})
    one = run_training(config, tmp_path / "one", recipe="x")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(dump_yaml(config.as_dict()))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "lrfdyn"]
    done = subprocess.run(
        [*command, "train", str(recipe), "--out", str(tmp_path / "two")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    two = json.loads((tmp_path / "two" / "summary.json").read_text())
    assert two["processes"] == 2
    for key in ("miou", "mean_accuracy", "pixel_accuracy", "test_loss"):
        assert two[key] == pytest.approx(one[key], rel=1e-9), key


def test_what_tests_need_is_asked_for_before_training(shapes, tmp_path, monkeypatch):
    monkeypatch.setattr(metric, "find_spec", lambda name: None)
    with pytest.raises(LrfdynError, match=r"mIoU needs torchmetrics; pip install 'lrfdyn\[segmentation\]'"):
        Trainer(tiny_config(shapes), tmp_path)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (np.full((36, 40), 255, np.uint8), r"the mask .*scene_001\.png has the value 255, expected 0\.\.3"),
        (np.ones((30, 40), np.uint8), r"the mask .*scene_001\.png is 40x30 pixels, its image 47x40"),
    ],
    ids=["value", "size"],
)
def test_validation_pairs_are_checked_before_training(tmp_path, bad, message):
    root = write_shapes(tmp_path / "data", train=16, validation=2)
    Image.fromarray(bad).save(root / "annotations" / "validation" / "scene_001.png")
    with pytest.raises(LrfdynError, match=message):
        Trainer(tiny_config(root, data={"options": {"resident": False}}), tmp_path / "run")


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"augmentation": {"mixup": 0.2}}, r"augmentation.mixup: is not for images of ade20k"),
        ({"distill": {"teacher": "resnet18"}}, r"distill.teacher: is for classification"),
        ({"loss": {"tet": 0.0}}, r"loss.tet: is for classification"),
        ({"model": {"head": {"wdith": 3}}}, r"head_options: .*wdith"),
        (
            {"data": {"name": "digits", "options": {}, "image_size": None}},
            r"augmentation.scale: is not for images of",
        ),
        ({"schedule": {"decay": "linear"}}, r"schedule.decay"),
        ({"data": {"options": {"window": 8}}}, r"window: expected at least the stride 16, got 8"),
    ],
)
def test_wrong_settings(shapes, tmp_path, section, message):
    with pytest.raises(LrfdynError, match=message):
        Trainer(tiny_config(shapes, **section), tmp_path)
