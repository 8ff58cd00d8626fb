"""Exported files compute what PyTorch computes, describe themselves, and are not kept otherwise.

All hosts with all attentions are compared in test_exportable.py; here every host is written and run once, and every
attention as a layer. `python benchmarks/export.py --matrix` writes and runs all pairs.
"""

from __future__ import annotations

import builtins
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lrfdyn.attention import Attention
from lrfdyn.cli import main
from lrfdyn.data import Augmentation
from lrfdyn.data.preprocess import Preprocessing
from lrfdyn.data.resident import Digits
from lrfdyn.deploy.export import write as export_check
from lrfdyn.deploy.export.exportable import exportable_model
from lrfdyn.deploy.export.formats import ExecutorchRunner, OnnxRunner, sidecar, write_executorch, write_onnx
from lrfdyn.deploy.export.write import export_model
from lrfdyn.deploy.predict import Predictor
from lrfdyn.errors import LrfdynError
from lrfdyn.models import SpikingModel
from lrfdyn.sources import EXPORTED, find_source
from tests.conftest import random
from tests.deploy.small import KINDS, VARIANTS, side, small
from tests.training.runs import tiny, train

MATRIX = [
    ("spikformer", "lrf_dyn_qkv"),
    ("spikformer", "vsa"),  # whose norm stays
    ("qkformer", "lrf_dyn"),
    ("sdt_v1_dvs", "sdsa"),  # SDT-V1 with maxima over windows
    ("sdt_v2", "lrf_dyn"),
    ("sdt_v3", "lrf_ssa"),
    ("sew_resnet", None),
    ("ms_resnet", None),
]


def check_file(runner, model, shape, batches=(1, 3, 8)):
    """Another look than that of the export itself: other images, and every batch size on its own."""
    agree = []
    for batch in batches:
        images = random(batch, *shape, seed=batch, dtype=torch.float32)
        with torch.no_grad():
            expected = model(images).numpy()
        found = runner(images.numpy())
        assert found.shape == expected.shape
        agree += (np.abs(found - expected).max(1) <= 1e-3 * np.abs(expected).max()).tolist()
    assert sum(agree) >= len(agree) - 1  # a spike may flip


def check_graph(path: Path, allowed: set[str]) -> None:
    """In few and plain operations, for any number of images."""
    import onnx

    graph = onnx.load(path).graph
    unwanted = {"DFT", "Loop", "Scan", "If", "Shape", "BatchNormalization"} - allowed
    assert not unwanted & {node.op_type for node in graph.node}
    assert not graph.input[0].type.tensor_type.shape.dim[0].dim_value  # a free axis


@pytest.mark.parametrize(("host", "kind"), MATRIX)
def test_onnx(host, kind, tmp_path):
    model = small(host, kind)
    size = side(host, model)
    model.preprocessing = Preprocessing(size[0], (0.5,) * 3, (0.25,) * 3)
    model.class_names = tuple("abcde")
    made = export_model(model, tmp_path / "model.onnx", weights="here")
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
    assert made.bytes == made.path.stat().st_size
    assert made.check.images == 16
    assert made.check.real == 8
    assert made.check.logit_spread > 1e-3
    runner = OnnxRunner(made.path, threads=1)
    check_file(runner, model, (model.in_channels, *size))
    facts = runner.facts
    assert facts["class_names"] == list("abcde")
    assert facts["preprocessing"]["size"] == size[0]
    assert facts["host"] == type(model).__name__
    attention, options = VARIANTS.get(kind, (kind, None))
    assert facts["attention"] == attention
    assert facts["weights"] == "here"
    if kind is not None:
        assert facts["attention_options"] == json.loads(json.dumps(options))
    check_graph(made.path, allowed={"BatchNormalization", "Shape"} if kind == "vsa" else set())
    text = made.path.read_bytes()
    assert str(Path(__file__).parents[2]).encode() not in text  # no trace of the machine that wrote it


def test_files_of_films(tmp_path):
    model = small("sew_resnet", in_channels=2, time_steps=2)
    model.preprocessing = Preprocessing(24, (0.5,) * 2, (0.25,) * 2)  # this host takes any size
    made = export_model(model, tmp_path / "film.onnx", frames=True)
    assert (made.check.images, made.check.real) == (8, 0)
    runner = OnnxRunner(made.path, threads=1)
    facts = runner.facts
    assert (facts["frames"], facts["preprocessing"]) == (2, None)
    films = random(5, 2, 2, 24, 24, dtype=torch.float32)
    with torch.no_grad():
        expected = model(films.transpose(0, 1)).numpy()
    np.testing.assert_allclose(runner(films.numpy()), expected, atol=1e-3 * np.abs(expected).max())
    with pytest.raises(LrfdynError, match=r"model: .*film\.onnx takes films of 2 frames, and does not say how"):
        Predictor.open(str(made.path))
    with pytest.raises(LrfdynError, match="frames: a NIR graph"):
        export_model(model, tmp_path / "film.nir", frames=True)
    with pytest.raises(LrfdynError, match="images: a film has no image files"):
        export_model(model, tmp_path / "film.onnx", frames=True, images=[tmp_path])


def test_executorch(tmp_path, capsys):
    """By the commands, from a saved model to predictions."""
    model = small("spikformer", "lrf_dyn", attention_options={"directions": 2})
    model.save_pretrained(tmp_path / "saved")
    path, image = tmp_path / "out" / "model.pte", tmp_path / "noise.png"
    assert main(["export", str(tmp_path / "saved"), "--out", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["format"] == "executorch"
    assert sorted(file.name for file in path.parent.iterdir()) == ["model.pte", "model.pte.json"]
    runner = ExecutorchRunner(path)
    assert runner.facts["most_images"] == 8
    assert json.loads(sidecar(path).read_text())["preprocessing"]["size"] == 16
    check_file(runner, model, model.input_size)

    Image.effect_noise((16, 16), 60).convert("RGB").save(image)
    scores = []
    for source in (path, tmp_path / "saved"):
        assert main(["predict", str(image), "--model", str(source), "--top", "5", "--json", "-"]) == 0
        predictions = json.loads(capsys.readouterr().out)["images"][0]["predictions"]
        scores.append({entry["class"]: entry["score"] for entry in predictions})
    assert scores[0] == pytest.approx(scores[1], abs=1e-3)

    (tmp_path / "other.pte").write_bytes(b"no program")
    with pytest.raises(LrfdynError, match=r"other\.pte needs its description other\.pte\.json beside it"):
        ExecutorchRunner(tmp_path / "other.pte")
    sidecar(tmp_path / "other.pte").write_text(sidecar(path).read_text())
    with pytest.raises(LrfdynError, match=r"other\.pte is not an ExecuTorch program"):
        ExecutorchRunner(tmp_path / "other.pte")


@pytest.mark.parametrize("most", [1, 2, 5])
def test_executorch_of_so_many_images(most, tmp_path):
    layer = torch.nn.Linear(4, 3)
    write_executorch(layer, torch.zeros(2, 4), tmp_path / "layer.pte", {"most_images": most})
    runner = ExecutorchRunner(tmp_path / "layer.pte")
    for batch in range(1, most + 1):
        images = random(batch, 4, dtype=torch.float32)
        assert np.allclose(runner(images.numpy()), layer(images).detach().numpy(), atol=1e-6)


class Layers(torch.nn.Module):
    """What attention layers do between their convolutions as a network: spikes of q, k and v `[B, T, 3C, H, W]` to
    what each of them mixes of these, `[B, L, T, C, H, W]`; SDSA, whose neuron is in the middle, to its spikes."""

    def __init__(self, layers: list[Attention]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, spikes: torch.Tensor) -> torch.Tensor:
        parts = spikes.transpose(0, 1).chunk(3, 2)
        ways = [layer.spikes if layer.kind == "sdsa" else layer.mix for layer in self.layers]
        mixed = [way(*parts[-len(layer.projections) :]) for way, layer in zip(ways, self.layers, strict=True)]
        return torch.stack(mixed).permute(2, 0, 1, 3, 4, 5)


@pytest.mark.parametrize(
    ("format", "time_steps", "without"),
    [("onnx", 2, {"vsa", "lrf_dyn_qkv"}), ("executorch", 1, {"lrf_dyn", "lrf_dyn_same"})],
    ids=["onnx", "executorch"],
)
def test_attentions(format, time_steps, without, tmp_path):
    """The kinds that no network above has, as layers of one file, since a whole network takes long to write. Their
    convolutions and neurons are those of the networks, and the coupling of dendrites is in constants only."""
    models = {kind: small("spikformer", kind) for kind in KINDS if kind not in without}
    if format == "onnx":
        models["two directions"] = small("spikformer", "lrf_dyn", attention_options={"directions": 2})
    originals, forms = (
        Layers([next(m for m in model.modules() if isinstance(m, Attention)) for model in form]).eval()
        for form in (models.values(), [exportable_model(model, (16, 16)) for model in models.values()])
    )
    spikes = (random(3, time_steps, 3 * 16, *originals.layers[0].grid, dtype=torch.float32) > 0.5).float()
    path = tmp_path / "layers"
    if format == "onnx":
        write_onnx(forms, spikes[:2], path, {})
        check_graph(path, allowed=set())
        runner: OnnxRunner | ExecutorchRunner = OnnxRunner(path, threads=1)
    else:
        write_executorch(forms, spikes[:2], path, {"most_images": 4})
        runner = ExecutorchRunner(path)
    for batch in (1, 3):
        with torch.no_grad():
            expected = originals(spikes[:batch]).numpy()
        found = runner(spikes[:batch].numpy())
        assert found.shape == expected.shape
        for i, kind in enumerate(models):
            assert expected[:, i].std() > 1e-2, kind
            np.testing.assert_allclose(found[:, i], expected[:, i], rtol=1e-4, atol=1e-4, err_msg=kind)


@pytest.mark.parametrize("kind", KINDS)
def test_facts_name_the_attention(kind):
    facts = json.loads(json.dumps(export_check.model_facts(small("spikformer", kind), "here")))
    attention, options = VARIANTS.get(kind, (kind, None))
    assert (facts["attention"], facts["attention_options"]) == (attention, json.loads(json.dumps(options)))


def test_trained_digits(tmp_path):
    """A trained model on real images: the same class on every held-out digit, and the same logits but for flips."""
    config = tiny(
        model={"time_steps": 2, "drop_path": 0.0, "options": {"dim": 32, "depth": 1}},
        augmentation={"mixup": 0.0, "label_smoothing": 0.0},
        optimizer={"ema_decay": None, "learning_rate": 0.01},
        schedule={"epochs": 6, "mix_epochs": None},
        run={"batch_size": 32, "checkpoint_steps": 1000},
    )
    summary = train(config, tmp_path / "run")
    model = find_source(tmp_path / "run").load()
    made = export_model(model, tmp_path / "model.onnx")
    images, labels = Digits(None, Augmentation()).splits["test"]
    digits = images.to(torch.uint8)
    images = np.stack([model.preprocessing.apply(Image.fromarray(digit[0].numpy())) for digit in digits])
    with torch.no_grad():
        expected = model(torch.from_numpy(images)).numpy()
    right = expected.argmax(1) == labels.numpy()
    assert 100 * right.mean() == pytest.approx(summary["top1"], abs=0.5)  # files are preprocessed as in training
    assert right.mean() > 0.4
    runner = OnnxRunner(made.path, threads=1)
    for batch in (7, 360):
        found = np.concatenate([runner(images[i : i + batch]) for i in range(0, 360, batch)])
        assert np.array_equal(found.argmax(1), expected.argmax(1))
        differences = np.abs(found - expected).max(1) / np.abs(expected).max()
        assert (differences > 1e-5).sum() <= 3  # flips
        assert np.median(differences) < 1e-6


def test_command(tmp_path, capsys):
    model = small("sew_resnet")
    model.preprocessing = Preprocessing(24, (0.5,) * 3, (0.25,) * 3)
    model.save_pretrained(tmp_path / "run" / "model")
    out = tmp_path / "new" / "model.onnx"
    assert main(["export", str(tmp_path / "run"), "--out", str(out), "--json", "--check", "4"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["file"] == str(out)
    assert (printed["images"], printed["real"]) == (12, 8)
    assert printed["argmax_agreement"] >= 0.9
    assert printed["weights"] == str(tmp_path / "run")


def wrong(model):
    """A runner that computes something else."""

    def run(images):
        logits = export_check.torch_logits(model, images)
        return logits + 0.1 * np.random.default_rng(0).standard_normal(logits.shape) * np.abs(logits).max()

    return run


def test_wrong_file_is_not_kept_and_the_model_is_left_as_it_was(tmp_path, monkeypatch):
    model = small("sew_resnet").double()
    model.preprocessing = Preprocessing(24, (0.5,) * 3, (0.25,) * 3)
    monkeypatch.setattr(OnnxRunner, "__call__", lambda self, images: wrong(model)(images))
    with pytest.raises(LrfdynError, match=r"does not compute the model, so it was not kept; 8 real and 8 random"):
        export_model(model, tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []
    assert all(p.dtype == torch.float64 for p in model.parameters())


def test_check_counts_flips():
    """One image off is a flipped spike; most images off are an error unless PyTorch's own rounding does the same."""
    model = small("spikformer", "ssa")
    images = export_check.check_images(model.input_size, 12, [])
    right = export_check.torch_logits(model, images)

    def off(count):
        shifted = right.copy()
        shifted[:count] *= 1.05
        rows = iter(shifted)
        return lambda batch: np.stack([next(rows) for _ in batch])

    clean = export_check.check(off(0), model, images, 0)
    assert clean.within_tolerance == 12
    assert clean.float64_within_tolerance is None
    flipped = export_check.check(off(1), model, images, 0)
    assert flipped.within_tolerance == 11
    assert flipped.float64_within_tolerance == 12
    assert "a spike flipped in 1" in str(flipped)
    with pytest.raises(LrfdynError, match="a spike flipped in 12"):
        export_check.check(off(12), model, images, 0)
    with pytest.raises(LrfdynError, match=r"\[12, 4\] logits, 100% of them finite"):
        export_check.check(lambda x: export_check.torch_logits(model, x)[:, 1:], model, images, 0)


@pytest.mark.parametrize(("most", "sizes"), [(None, [1, 3, 8, 2]), (8, [1, 3, 8, 2]), (2, [1, 2, 2, 2, 2, 2, 2, 1])])
def test_batches_of_a_check_differ(most, sizes):
    images, shown = np.arange(14.0).reshape(14, 1), []

    def run(part):
        shown.append(len(part))
        return 2 * part

    assert np.array_equal(export_check.run_batches(run, images, most), 2 * images)
    assert shown == sizes


def test_a_program_is_traced_with_two_images(tmp_path, monkeypatch):
    """One would be taken for a constant, and three would be too many for a program of two."""
    traced = []

    def write(_form, sample, _path, facts):
        traced.append((*sample.shape, facts["most_images"]))
        raise LrfdynError("seen")

    monkeypatch.setattr(export_check, "write_executorch", write)
    model = small("spikformer", "ssa")
    with pytest.raises(LrfdynError, match="seen"):
        export_model(model, tmp_path / "model.pte", most_images=2)
    assert traced == [(2, *model.input_size, 2)]


def test_norms_settle_on_the_statistics_of_one_batch():
    norm = torch.nn.BatchNorm2d(2, momentum=0.3)
    norm.input_size = (2, 5, 5)
    norm.running_mean += 7  # of before, which leaves no trace
    export_check.settle_norms(norm.eval())
    images = torch.from_numpy(export_check.check_images((2, 5, 5), 4, []))
    torch.testing.assert_close(norm.running_mean, images.mean((0, 2, 3)))
    torch.testing.assert_close(norm.running_var, images.var((0, 2, 3)))
    assert (norm.momentum, norm.training) == (0.3, False)


def test_silent_model_is_said_to_prove_little():
    model = small("spikformer", "ssa")
    torch.nn.init.zeros_(model.head.weight)
    torch.nn.init.ones_(model.head.bias)
    images = export_check.check_images(model.input_size, 4, [])
    result = export_check.check(lambda x: export_check.torch_logits(model, x), model, images, 0)
    assert "proves little" in str(result)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"format": "onx"}, "format: unknown name 'onx'; did you mean onnx"),
        ({"out": "model.bin"}, r"out: expected a name that ends in \.onnx or \.pte or \.nir, got .*model\.bin"),
        ({"out": "model.pte", "format": "onnx"}, r"out: expected a name that ends in \.onnx, got .*model\.pte"),
        ({"out": "file/model.onnx"}, r"out: cannot write in the folder .*file"),
        ({"out": "folder.onnx"}, r"out: expected a file, got the folder"),
        ({"images": [Path("missing.png")]}, r"images: cannot read .*missing\.png \(No such file"),
        ({"dense": True}, r"dense: only for NIR files, got .*model\.onnx"),
        ({"random_images": 0}, "random_images: expected an integer >= 1"),
        ({"most_images": 0}, "most_images: expected an integer >= 1"),
    ],
)
def test_bad_arguments(arguments, message, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.onnx").mkdir()
    out = tmp_path / arguments.pop("out", "model.onnx")
    with pytest.raises(LrfdynError, match=message):
        export_model(small("sew_resnet"), out, **arguments)


def test_bad_models(tmp_path):
    with pytest.raises(LrfdynError, match="expected evaluation mode"):
        export_model(small("sew_resnet").train(), tmp_path / "model.onnx")
    with pytest.raises(LrfdynError, match="expected a classifier"):
        export_model(small("sew_resnet", num_classes=0), tmp_path / "model.onnx")


@pytest.mark.parametrize(
    ("format", "package", "extra"),
    [("onnx", "onnxscript", "export"), ("executorch", "executorch", "executorch"), ("nir", "nir", "nir")],
)
def test_missing_extra(format, package, extra, tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *rest, **others):
        if name.partition(".")[0] == package:
            raise ImportError(f"No module named {name!r}", name=package)
        return real(name, *rest, **others)

    monkeypatch.setattr(builtins, "__import__", without)
    out = tmp_path / f"model{EXPORTED[format]}"
    with pytest.raises(LrfdynError, match=rf"format: {format} needs .*pip install 'lrfdyn\[{extra}\]'"):
        export_model(small("sew_resnet"), out, format=format)


def test_options_of_a_named_model(tmp_path, monkeypatch, capsys):
    made: list[SpikingModel] = []
    monkeypatch.setattr("lrfdyn.commands.export.settle_norms", made.append)
    options = ["--dilations", "1,2", "--num-classes", "7", "--image-size", "16", "--out", "file/x.onnx"]
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    assert main(["export", "spikformer_4_384:lrf_dyn", *options]) == 2
    assert "out: cannot write in the folder file" in capsys.readouterr().err
    assert made[0].num_classes == 7
    assert made[0].input_size == (3, 16, 16)
    assert made[0].config["attention_options"] == {"dilations": (1, 2)}
    small("spikformer").save_pretrained(tmp_path / "saved")
    assert main(["export", "saved", *options]) == 2
    assert "num_classes, image_size, dilations: only for the name of a model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["spikformer_4_38", "--out", "x.onnx"], "no model; did you mean spikformer_4_384"),
        (["run", "--out", "x.onnx"], "model: run holds no model"),
        (["empty", "--out", "x.onnx"], "model: empty holds no model"),
        (["file", "--out", "x.onnx"], "model: expected a folder, a file that ends in"),
        (["spikformer_4_384", "--out", "x.onnx", "--attention", "sss"], "attention: unknown name 'sss'"),
        (["spikformer_4_384", "--out", "x.onnx", "--check", "0"], "check: expected an integer >= 1"),
    ],
)
def test_bad_commands(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    assert main(["export", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "x.onnx").exists()
