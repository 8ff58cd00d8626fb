"""Every kind of source in every command that takes it, and what is said of paths and names that are none."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lrfdyn.cli import main
from lrfdyn.deploy.export.write import export_model
from lrfdyn.errors import LrfdynError
from lrfdyn.io.weights import list_checkpoints, load_tensors, save_tensors
from lrfdyn.segmentation.model import create_segmenter, load_backbone
from lrfdyn.sources import find_source, find_sources
from lrfdyn.training.trainer import Trainer
from tests.training.runs import tiny, train, write_recipe

# Everything that holds the model of one and the same run.
KINDS = {
    "run": "saved",
    "run/model": "saved",
    "run/model/model.safetensors": "saved",
    "copy.safetensors": "weights",
    "run/checkpoints": "checkpoint",
    "run/checkpoints/step-000000011.safetensors": "checkpoint",
    "begun": "checkpoint",
    "one": "saved",  # a sweep of one run
    "someone/model": "hub",
}
NAMES = ("spikformer_4_384", "spikformer_4_384:lrf_ssa")
WITH_RECIPE = [path for path in KINDS if path not in ("copy.safetensors", "someone/model")]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A run in all its forms, a sweep of three runs of which one has just begun, and a picture."""
    folder = tmp_path_factory.mktemp("sources")
    run = folder / "run"
    train(tiny(schedule={"epochs": 1, "warmup_epochs": 0, "mix_epochs": 0}), run)
    shutil.rmtree(run / "tensorboard", ignore_errors=True)
    shutil.copy(run / "model" / "model.safetensors", folder / "copy.safetensors")
    shutil.copytree(run, folder / "begun")
    shutil.rmtree(folder / "begun" / "model")
    (folder / "begun" / "summary.json").unlink()
    for name in ("lrf_dyn-seed0", "ssa-seed1", "ssa-seed0"):
        shutil.copytree(run, folder / "demo" / "runs" / name)
    (folder / "demo" / "runs" / "vsa-seed0").mkdir()
    (folder / "demo" / "runs" / "vsa-seed0" / "recipe.yaml").write_text("")
    shutil.copytree(run, folder / "one" / "runs" / "ssa-seed0")
    shutil.copytree(run / "model", folder / "hub")
    tensors, _ = load_tensors(folder / "copy.safetensors")
    save_tensors(folder / "bare.safetensors", tensors)
    export_model(find_source(run).load(), folder / "model.onnx", random_images=1)
    write_recipe(folder / "tiny.yaml")
    Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8)).save(folder / "x.png")
    return folder


@pytest.fixture(autouse=True)
def here(place, monkeypatch):
    """Paths are relative to the folder, and the hub is a folder too."""
    import huggingface_hub

    monkeypatch.chdir(place)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo_id, **_: str(place / "hub"))


def output(capsys, *arguments: str) -> dict:
    assert main(list(arguments)) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("path", KINDS)
def test_find_and_load(path):
    source = find_source(path)
    origin = "one/runs/ssa-seed0" if path == "one" else path
    assert (source.kind, source.origin, source.trained) == (KINDS[path], origin, True)
    expected, model, weights = find_source("run").load(), source.load(), source.weights()
    assert not model.training
    for fact in ("config", "class_names", "preprocessing"):
        assert getattr(model, fact) == getattr(expected, fact)
    assert expected.state_dict().keys() == weights.keys()
    for name, value in model.state_dict().items():
        assert torch.equal(expected.state_dict()[name], value), name
        assert torch.equal(weights[name], value), name
    assert (source.recipe is not None) == (path in WITH_RECIPE)


@pytest.mark.parametrize("path", [*KINDS, "model.onnx"])
def test_predict(path, capsys):
    wanted, found = (output(capsys, "predict", "x.png", "--model", model, "--json", "-") for model in ("run", path))
    best, other = (result["images"][0]["predictions"] for result in (wanted, found))
    assert [p["class"] for p in other] == [p["class"] for p in best]
    assert [p["score"] for p in other] == pytest.approx([p["score"] for p in best], abs=1e-5)


@pytest.mark.parametrize("path", [*KINDS, *NAMES])
def test_export(path, capsys, monkeypatch, tmp_path):
    made = []
    monkeypatch.setattr("lrfdyn.commands.export.export_model", lambda model, *_, **__: made.append(model) or 1 / 0)
    with pytest.raises(ZeroDivisionError):  # what follows is the export itself, which has tests of its own
        main(["export", path, "--out", str(tmp_path / "x.onnx")])
    assert made[0].config["attention"] == {"spikformer_4_384": "ssa", NAMES[1]: "lrf_ssa"}.get(path, "lrf_dyn")


@pytest.mark.parametrize("path", KINDS)
def test_profile(path, capsys):
    (found,) = output(capsys, "profile", path, "--batch", "1", "--repeats", "1", "--device", "cpu", "--json")
    assert (found["model"], found["attention"]) == (find_source(path).origin, "lrf_dyn")


@pytest.mark.parametrize("path", WITH_RECIPE)
def test_evaluate(path, capsys):
    summary = json.loads(Path("run/summary.json").read_text())
    assert output(capsys, "evaluate", path, "--json")["top1"] == summary["top1"]


@pytest.mark.parametrize("path", [*KINDS, "bare.safetensors"])
def test_evaluate_with_a_recipe(path, capsys):
    summary = json.loads(Path("run/summary.json").read_text())
    assert output(capsys, "evaluate", "tiny.yaml", "--weights", path, "--json")["top1"] == summary["top1"]


def test_analyze(capsys, tmp_path):
    given = ["--data", "digits", "--images", "2", "--figures", "none", "--device", "cpu", "--out", str(tmp_path)]
    assert main(["analyze", *KINDS, *NAMES, *given]) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert [run["weights"] for run in results["runs"]] == [find_source(path).origin for path in (*KINDS, *NAMES)]
    trained = [entry for entry in results["attentions"].values() if entry["trained"]]
    assert len({entry["firing_rate"] for entry in trained}) == 1
    assert main(["analyze", "demo", *given]) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert [run["weights"] for run in results["runs"]] == [
        f"demo/runs/{name}" for name in ("ssa-seed0", "ssa-seed1", "lrf_dyn-seed0")
    ]


@pytest.mark.parametrize("path", [*KINDS, "bare.safetensors"])
def test_weights_of_a_recipe(path, tmp_path):
    trainer = Trainer(tiny(model={"weights": path}), tmp_path)
    trained = find_source("run").weights()
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(value, trained[name]), name


@pytest.mark.parametrize("path", [*KINDS, "bare.safetensors"])
def test_backbone_of_a_segmenter(path):
    options = {k: v for k, v in find_source("run").load().config.items() if k not in ("num_classes", "image_size")}
    model = create_segmenter("spikformer_4_384", image_size=8, num_classes=3, **options)
    load_backbone(model, path)
    trained = find_source("run").weights()
    for name, value in model.backbone.state_dict().items():
        assert torch.equal(value, trained[name]), name


def test_a_run_that_has_not_ended_says_so(capsys):
    source = find_source("begun")
    said = "model: begun is a run that has not ended; its newest checkpoint is taken, step-000000011.safetensors\n"
    assert capsys.readouterr().err == said
    assert (source.seed, source.accuracy, len(source.curve)) == (None, None, 1)
    assert main(["predict", "x.png", "--model", "begun"]) == 0
    assert "begun is a run that has not ended" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_passed_over(tmp_path, capsys):
    shutil.copytree("begun", tmp_path / "run")
    newest, older = list_checkpoints(tmp_path / "run" / "checkpoints")
    newest.write_bytes(newest.read_bytes()[:-9])
    assert find_source(tmp_path / "run").path == older
    assert "falling back to the one before" in capsys.readouterr().err.splitlines()[0]


def test_what_a_run_knows_of_its_training():
    summary = json.loads(Path("run/summary.json").read_text())
    for path in ("run", "run/model", "run/model/model.safetensors"):
        source = find_source(path)
        assert (source.seed, source.accuracy) == (summary["seed"], summary["top1"] / 100)
        assert source.curve[-1]["test_accuracy"] == source.accuracy
        assert source.train_seconds == summary["wall_s"]


def test_random_weights_depend_on_the_seed_alone():
    source = find_source("spikformer_4_384:lrf_dyn", dim=16, depth=1, heads=2)
    state = torch.get_rng_state()
    one, again, other = source.load(), source.load(), source.load(seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert not source.trained
    assert torch.equal(one.head.weight, again.head.weight)
    assert not torch.equal(one.head.weight, other.head.weight)


TRAINED = "names a model without weights; expected a trained one"
SEVERAL = "demo holds 3 models; name one, such as demo/runs/ssa-seed0"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("predict x.png --model demo", f"model: {SEVERAL}"),
        ("export demo --out x.onnx", f"model: {SEVERAL}"),
        ("profile demo", f"model: {SEVERAL}"),
        ("evaluate demo", f"source: {SEVERAL}"),
        ("evaluate tiny.yaml --weights demo", f"weights: {SEVERAL}"),
        ("predict x.png --model demo/runs/vsa-seed0", "model: demo/runs/vsa-seed0 holds no model: no config.json"),
        ("analyze demo/runs/vsa-seed0", "model: demo/runs/vsa-seed0 holds no model: no config.json"),
        ("predict x.png --model demo/runs/ssa-sed0", "no such file or folder: demo/runs/ssa-sed0; did you mean demo/"),
        ("predict x.png --model absent.safetensors", "model: no such file or folder: absent.safetensors"),
        ("predict x.png --model bare.safetensors", "bare.safetensors does not say which model its weights are of"),
        ("predict x.png --model x.png", "expected a folder, a file that ends in .safetensors, .onnx, .pte, .nir, or"),
        ("predict x.png --model spikformer_4_384", f"model: spikformer_4_384 {TRAINED}"),
        ("evaluate tiny.yaml --weights spikformer_4_384", f"weights: spikformer_4_384 {TRAINED}"),
        ("evaluate spikformer_4_384", "source: no such file or folder, and no recipe of that name"),
        ("evaluate run/model --weights run", "weights: only with a recipe"),
        ("evaluate copy.safetensors", "source: copy.safetensors says nothing of its data; give its recipe"),
        ("evaluate copy.safetensors --raw", "raw: copy.safetensors has no checkpoint"),
        ("evaluate model.onnx", "source: model.onnx says nothing of its data"),
        ("evaluate tiny.yaml --weights model.onnx", "weights: model.onnx is an exported file"),
        ("export model.onnx --out x.onnx", "model: model.onnx is an exported file"),
        ("profile model.onnx", "model: model.onnx is an exported file"),
        ("analyze model.onnx", "model: model.onnx is an exported file"),
        ("predict x.png --model model.onnx --runtime torch", "model: model.onnx is an exported file"),
        ("export run --attention ssa --out x.onnx", "attention: only for the name of a model"),
        ("profile run --time-steps 2", "time_steps: only for the name of a model, whose weights are random; got run"),
        ("profile spikformer_4_385", "model: 'spikformer_4_385' is no file or folder here and no model; did you mean"),
        ("profile spikformer_4_384:sssa", "attention: unknown name 'sssa'; did you mean ssa"),
        ("analyze sew_resnet18:ssa", "model: sew_resnet18 has no attention, got 'sew_resnet18:ssa'"),
    ],
)  # fmt: skip
def test_bad_input(command, message, capsys):
    assert main(command.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_bad_sources_of_a_recipe(tmp_path):
    with pytest.raises(LrfdynError, match=r"^model.backbone: demo holds 3 models"):
        load_backbone(create_segmenter("sdt_v3_t", image_size=32), "demo")
    with pytest.raises(LrfdynError, match=r"^model.weights: no such file or folder: run/absent"):
        find_source("run/absent", "model.weights")
    with pytest.raises(LrfdynError, match=r"^model: .* holds no model"):
        find_sources(tmp_path)
