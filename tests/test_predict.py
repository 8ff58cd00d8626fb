"""Class names and scores of image files, in PyTorch, in ONNX Runtime and without torch."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

import lrfdyn
from lrfdyn.cli import main
from lrfdyn.commands.shared import print_json
from lrfdyn.data import Augmentation
from lrfdyn.data.preprocess import Preprocessing
from lrfdyn.data.resident import Digits
from lrfdyn.deploy.export.write import export_model
from lrfdyn.deploy.predict import Predictor, expand_images
from lrfdyn.errors import LrfdynError
from lrfdyn.segmentation.predict import predict_mask
from tests.deploy.small import small
from tests.segmentation.make import shapes, tiny_model
from tests.training.runs import tiny, train, write_recipe

EXAMPLE = Path(__file__).parents[1] / "examples" / "predict_onnx.py"
NAMES = ("zero", "one", "two", "three", "four")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A saved model, the same as an ONNX file, and twelve digits as PNG files."""
    folder = tmp_path_factory.mktemp("predict")
    model = small("spikformer", "lrf_dyn", in_channels=1)
    model.preprocessing = Preprocessing(16, (0.3,), (0.4,), 1.0)
    model.class_names = NAMES
    model.save_pretrained(folder / "run" / "model")
    export_model(model, folder / "model.onnx")
    (folder / "images").mkdir()
    for i, digit in enumerate(load_digits().images[:12]):
        Image.fromarray((digit * (255 / 16)).round().astype(np.uint8)).save(folder / "images" / f"{i:02}.png")
    return folder


def direct(place: Path, paths: list[Path]) -> torch.Tensor:
    """Scores without any of the code under test but the model."""
    model = lrfdyn.from_pretrained(place / "run" / "model")
    images = [Image.open(path).convert("L").resize((16, 16), Image.Resampling.BICUBIC) for path in paths]
    levels = torch.stack([torch.from_numpy(np.array(image, np.float32))[None] for image in images])
    with torch.no_grad():
        return model((levels / 255 - 0.3) / 0.4).softmax(1)


def predict(capsys, *arguments) -> dict:
    assert main(["predict", *map(str, arguments), "--json", "-"]) == 0
    return json.loads(capsys.readouterr().out)


def test_scores(place, capsys):
    paths = sorted((place / "images").iterdir())
    scores = direct(place, paths)
    assert scores.std(0).max() > 1e-3
    found = predict(capsys, place / "images", "--model", place / "run", "--top", "3", "--batch", "5")
    assert found["unreadable"] == 0
    assert [record["image"] for record in found["images"]] == list(map(str, paths))
    for record, row in zip(found["images"], scores, strict=True):
        best = row.topk(3)
        assert [p["class"] for p in record["predictions"]] == best.indices.tolist()
        assert [p["name"] for p in record["predictions"]] == [NAMES[i] for i in best.indices]
        assert [p["score"] for p in record["predictions"]] == pytest.approx(best.values.tolist(), abs=1e-5)
    saved = predict(capsys, place / "images", "--model", place / "run" / "model", "--top", "3")
    names, others = ([[p["name"] for p in r["predictions"]] for r in result["images"]] for result in (found, saved))
    assert names == others


def test_exported_file(place, capsys):
    paths = sorted((place / "images").iterdir())
    scores = direct(place, paths)
    found = predict(capsys, place / "images", "--model", place / "model.onnx", "--top", "5")
    for record, row in zip(found["images"], scores, strict=True):
        by_class = {p["class"]: p["score"] for p in record["predictions"]}
        assert [by_class[i] for i in range(5)] == pytest.approx(row.tolist(), abs=1e-4)


def test_stops_when_sure(place, capsys):
    found = predict(capsys, place / "images", "--model", place / "run")
    for threshold, steps in (("0", 1), ("1", 2)):
        early = predict(capsys, place / "images", "--model", place / "run", "--exit", threshold, "--batch", "5")
        assert {record.pop("steps") for record in early["images"]} == {steps}
        scores, others = ([p["score"] for r in each["images"] for p in r["predictions"]] for each in (found, early))
        assert (scores == pytest.approx(others, abs=1e-5)) == (threshold == "1")
    image = next((place / "images").iterdir())
    assert main(["predict", str(image), "--model", str(place / "run"), "--exit", "0"]) == 0
    assert "(time step 1)" in capsys.readouterr().out


def test_example_without_torch(place, tmp_path):
    """In a process in which torch and lrfdyn cannot be imported."""
    paths = sorted((place / "images").iterdir())
    given = [str(place / "model.onnx"), *map(str, paths), "text.png", "--json"]
    code = (
        "import runpy, sys\n"
        "sys.modules['torch'] = sys.modules['lrfdyn'] = None\n"
        "try:\n    import torch\nexcept ImportError:\n    pass\nelse:\n    sys.exit('torch is here')\n"
        f"sys.argv = ['predict_onnx.py', *{given!r}]\n"
        f"runpy.run_path({str(EXAMPLE)!r}, run_name='__main__')\n"
    )
    (tmp_path / "text.png").write_text("not an image")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 1, done.stderr
    assert "cannot read text.png" in done.stderr
    found = json.loads(done.stdout)
    assert found["attention"] == "lrf_dyn"
    assert "error" in found["images"].pop()
    for record, row in zip(found["images"], direct(place, paths), strict=True):
        by_name = {p["name"]: p["score"] for p in record["predictions"]}
        assert [by_name[name] for name in NAMES] == pytest.approx(row.tolist(), abs=1e-4)


def test_names_that_the_output_cannot_encode(place, tmp_path):
    """A pipe of another encoding gets escapes instead of a traceback."""
    image = tmp_path / "Zahl – 数字.png"
    image.write_bytes(sorted((place / "images").iterdir())[0].read_bytes())
    done = subprocess.run(
        [sys.executable, "-m", "lrfdyn", "predict", str(image), "--model", str(place / "model.onnx"), "--top", "1"],
        capture_output=True, env={**os.environ, "PYTHONIOENCODING": "latin-1"}, timeout=120,
        cwd=Path(lrfdyn.__file__).parents[1],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert b"Zahl \\u2013 \\u6570\\u5b57.png: " in done.stdout


def test_large_pictures_pass_without_a_warning(tmp_path, recwarn):
    """A picture of 100 million pixels is nothing but a picture."""
    Image.new("1", (10000, 10000), 1).save(tmp_path / "large.png")
    levels = Preprocessing(8, (0.5,), (0.5,)).load(tmp_path / "large.png")
    assert levels.shape == (1, 8, 8)
    assert levels.min() == 1
    assert not list(recwarn)


def test_unreadable_images_do_not_stop_the_others(place, tmp_path, capsys):
    good = sorted((place / "images").iterdir())[0]
    (tmp_path / "broken.png").write_bytes(good.read_bytes()[:40])
    (tmp_path / "text.png").write_text("not an image")
    out = tmp_path / "out.json"
    inputs = [tmp_path / "broken.png", good, tmp_path / "missing.png", tmp_path / "text.png", good]
    assert main(["predict", *map(str, inputs), "--model", str(place / "model.onnx"), "--json", str(out)]) == 1
    printed = capsys.readouterr()
    assert printed.out.count(f"{good}: ") == 2
    for name in ("broken", "missing", "text"):
        assert f"cannot read {tmp_path / name}.png" in printed.err
    assert "3 of 5 images could not be read" in printed.err
    result = json.loads(out.read_text())
    assert result["unreadable"] == 3
    assert ["error" in record for record in result["images"]] == [True, False, True, True, False]


def pictures(folder: Path) -> dict[str, Path]:
    """One picture in all the ways in which files hold it, and some that no network can see."""
    levels = shapes(3, 40, 40)[0][..., 0]
    colour = Image.fromarray(levels)
    turned = Image.Exif()
    turned[0x0112] = 6  # the camera was held upright: to be turned clockwise
    made = {
        "grey": colour,
        "rgb": colour.convert("RGB"),
        "rgba": colour.convert("RGBA"),
        "alpha": colour.convert("LA"),
        "sixteen": Image.fromarray(levels.astype(np.uint16) * 257),
        "integers": Image.fromarray(levels.astype(np.int32) * 257),
        "numbers": Image.fromarray(levels.astype(np.float32) / 255),
        "thin": Image.new("RGB", (20000, 1)),
        "beyond": Image.fromarray(levels.astype(np.int32) * 70000),
    }
    paths = {name: folder / f"{name}.{'tiff' if name in ('numbers', 'integers', 'beyond') else 'png'}" for name in made}
    for name, image in made.items():
        image.save(paths[name])
    paths["cmyk"], paths["turned"] = folder / "cmyk.tiff", folder / "turned.png"
    colour.convert("RGB").convert("CMYK").save(paths["cmyk"])
    colour.rotate(90).save(paths["turned"], exif=turned)
    return paths


def test_every_kind_of_picture(place, tmp_path, capsys):
    """Grey, transparent, 16-bit, CMYK and turned ones give the scores of the plain one; others say what is wrong."""
    paths = pictures(tmp_path)
    bad = {"numbers": "got mode F", "thin": "20000 x 1 pixels are too thin", "beyond": "got mode I from"}
    predictor = Predictor.open(str(place / "model.onnx"), threads=1)
    predictor = replace(predictor, preprocessing=replace(predictor.preprocessing, crop_share=0.1))  # thin ones grow
    with pytest.raises(LrfdynError, match="images: expected at least one file"):
        next(predictor.predict([]))
    found = {Path(r["image"]).stem: r for r in predictor.predict(list(paths.values()))}
    for name, message in bad.items():
        assert message in found[name]["error"]
    plain = found["grey"]["predictions"]
    for name in set(paths) - set(bad):
        assert [p["score"] for p in found[name]["predictions"]] == pytest.approx([p["score"] for p in plain], abs=0.01)
        assert found[name]["predictions"][0]["class"] == plain[0]["class"], name
    for name in ("sixteen", "turned"):
        code = f"import sys, runpy; sys.argv = ['x', {str(place / 'model.onnx')!r}, {str(paths[name])!r}, '--json']"
        done = subprocess.run(
            [sys.executable, "-c", f"{code}; runpy.run_path({str(EXAMPLE)!r}, run_name='__main__')"],
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert json.loads(done.stdout)["images"][0]["predictions"][0]["name"] == plain[0]["name"], done.stderr


def test_pictures_to_segment(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    paths = pictures(tmp_path / "in")
    tiny_model(image_size=128).save_pretrained(tmp_path / "model")
    given = [
        "--task",
        "segmentation",
        "--model",
        str(tmp_path / "model"),
        "--out",
        str(tmp_path / "out"),
        "--json",
        "-",
    ]
    assert main(["predict", *map(str, paths.values()), *given]) == 1
    records = {Path(r["image"]).stem: r for r in json.loads(capsys.readouterr().out)["images"]}
    assert {name for name, record in records.items() if "error" in record} == {"numbers", "thin", "beyond"}
    for name in ("sixteen", "turned", "rgba"):
        assert np.array_equal(
            np.asarray(Image.open(records[name]["mask"])), np.asarray(Image.open(records["grey"]["mask"]))
        )


@pytest.mark.parametrize(
    ("package", "arguments", "message"),
    [
        ("PIL", ["predict", "IMAGE", "--model", "run"], "reading images needs Pillow; pip install 'lrfdyn[data]'"),
        ("PIL", ["predict", "IMAGE", "--task", "segmentation", "--model", "run", "--out", "x"], "lrfdyn[segmentation]"),
        ("onnxruntime", ["predict", "IMAGE", "--model", "model.onnx"], "runtime: onnx needs onnxruntime; pip install"),
        ("onnx", ["export", "run", "--out", "x.onnx"], "format: onnx needs onnx; pip install 'lrfdyn[export]'"),
        ("executorch", ["export", "run", "--format", "executorch", "--out", "x.pte"], "'lrfdyn[executorch]'"),
        ("nir", ["export", "run", "--out", "x.nir"], "format: nir needs nir; pip install 'lrfdyn[nir]'"),
        ("matplotlib", ["profile", "sdt_v3_t", "--plot", "x.png"], "pip install 'lrfdyn[analysis]'"),
        ("huggingface_hub", ["predict", "IMAGE", "--model", "someone/model"], "model: no folder 'someone/model' here"),
    ],
)  # fmt: skip
def test_missing_packages(package, arguments, message, place, monkeypatch, capsys, tmp_path):
    """One line that names what to install, and no file."""
    monkeypatch.chdir(tmp_path)
    for name in ("run", "model.onnx"):
        (tmp_path / name).symlink_to(place / name)
    for name in [package, *(name for name in sys.modules if name.startswith(f"{package}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    image = str(sorted((place / "images").iterdir())[0])
    assert main([image if argument == "IMAGE" else argument for argument in arguments]) == 2
    (line,) = [
        line for line in capsys.readouterr().err.splitlines() if not line.startswith("lrfdyn predict: the model")
    ]
    assert message in line
    assert "pip install" in line
    assert not list(tmp_path.glob("x.*"))


def test_inputs(place, tmp_path, monkeypatch):
    images = place / "images"
    assert expand_images([images]) == sorted(images.iterdir())
    assert expand_images([f"{images}/0*.png", images / "11.png"]) == [*sorted(images.glob("0*.png")), images / "11.png"]
    inside = tmp_path / "a" / "b"
    inside.mkdir(parents=True)
    (inside / "x.JPG").write_bytes(b"")
    (inside / "notes.txt").write_text("")
    odd = tmp_path / "a" / "[1].png"
    odd.write_bytes(b"")
    assert expand_images([tmp_path / "a"]) == [odd, inside / "x.JPG"]
    assert expand_images([odd]) == [odd]  # a name, although it reads like a pattern
    (inside / "scan.TIF").write_bytes(b"")
    both = [inside / "scan.TIF", inside / "x.JPG"]
    assert expand_images([f"{tmp_path}/a/b*"]) == both  # a pattern may match folders
    assert expand_images([f"{tmp_path}/a/b/**"]) == [*both, inside / "notes.txt"]  # each file once
    monkeypatch.setenv("HOME", str(tmp_path))
    assert expand_images(["~/a/b/*.JPG"]) == [inside / "x.JPG"]
    with pytest.raises(LrfdynError, match="images: nothing matches"):
        expand_images([f"{tmp_path}/*.webp"])
    (tmp_path / "none").mkdir()
    with pytest.raises(LrfdynError, match=r"images: .*none holds no images"):
        expand_images([tmp_path / "none"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--model", "notes.txt"],
            "model: expected a folder, a file that ends in .safetensors, .onnx",
        ),
        (["--model", "other.onnx"], "model: other.onnx is not an ONNX file that can be run"),
        (["--model", "missing.onnx"], "model: no such file or folder: missing.onnx"),
        (["--model", "run", "--runtime", "onnx"], "runtime: onnx runs .onnx files, got run; lrfdyn export"),
        (["--model", "run", "--runtime", "tensorrt"], "runtime: unknown name 'tensorrt'"),
        (["--model", "model.onnx", "--device", "cuda"], "device: only for the torch runtime"),
        (["--model", "run", "--device", "abacus"], "device: cannot use 'abacus'"),
        (["--model", "spikformer_4_384"], "model: spikformer_4_384 names a model without weights"),
        (["--model", "run", "--top", "0"], "top: expected an integer >= 1"),
        (["--model", "run", "--batch", "0"], "batch: expected an integer >= 1"),
        (["--model", "segmenter"], "task: segmenter is a segmentation model; pass --task segmentation"),
        (
            ["--model", "spikformer_4_38"],
            "model: 'spikformer_4_38' is no file or folder here and no model",
        ),
        (["--model", "run", "--task", "detection"], "task: unknown name 'detection'"),
        (["--model", "run", "--flip"], "flip: only with --task segmentation"),
        (["--model", "run", "--task", "segmentation"], "out: --task segmentation needs the folder"),
        (["--model", "model.onnx", "--exit", "0.9"], "exit: only in torch, got onnx, which computes all time steps"),
        (["--model", "run", "--exit", "90"], "exit: expected a number from 0 to 1, got 90.0"),
        (
            ["--model", "x", "--exit", "1", "--task", "segmentation", "--out", "x"],
            "exit: only with --task classification",
        ),
        (["--model", "run", "--json", "notes.txt/x.json"], "json: cannot write in the folder notes.txt"),
    ],
)
def test_bad_input(arguments, message, place, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("text")
    (tmp_path / "other.onnx").write_text("text")
    tiny_model().save_pretrained(tmp_path / "segmenter")
    for name in ("run", "model.onnx"):
        (tmp_path / name).symlink_to(place / name)
    image = sorted((place / "images").iterdir())[0]
    assert main(["predict", str(image), *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("description", "message"),
    [
        (None, "was not exported by lrfdyn"),
        ("not JSON", "foreign.onnx: its metadata 'lrfdyn' is no JSON"),
        ("[]", "it is no JSON object"),
        ("{}", "the description of .* says no num_classes"),
        ('{"num_classes": 2, "class_names": "ab"}', "class_names: expected a list of names"),
        ('{"num_classes": 5}', "preprocessing: expected an object, got None"),
        ('{"num_classes": 5, "integer": true}', "the description of .* says no scale of its integers"),
        ('{"num_classes": 5, "integer": true, "scale": 0}', "the description of .* says no scale of its integers"),
    ],
)
def test_foreign_onnx_file(description, message, place, tmp_path):
    import onnx

    file = onnx.load(place / "model.onnx")
    del file.metadata_props[:]
    if description is not None:
        entry = file.metadata_props.add()
        entry.key, entry.value = "lrfdyn", description
    onnx.save(file, tmp_path / "foreign.onnx")
    with pytest.raises(LrfdynError, match=f"model: .*{message}"):
        Predictor.open(str(tmp_path / "foreign.onnx"))


@pytest.mark.parametrize("classes", [1, 500])
def test_a_description_of_another_number_of_classes(classes, place):
    opened = Predictor.open(str(place / "model.onnx"))
    predictor = dataclasses.replace(opened, class_names=tuple(map(str, range(classes))))
    with pytest.raises(LrfdynError, match=f"model: its description says {classes} classes, and it gives"):
        list(predictor.predict(sorted((place / "images").iterdir())[:1]))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_said_by_every_command(value, place, tmp_path, capsys):
    folder, out = tmp_path / "model", tmp_path / "out"
    model = lrfdyn.from_pretrained(place / "run" / "model")
    model.head.weight.data[0, 0] = value
    model.save_pretrained(folder)
    for command in (
        f"predict {place / 'images'} --model {folder}",
        f"predict {place / 'images'} --model {folder} --json -",
        f"evaluate {write_recipe(tmp_path / 'tiny.yaml')} --weights {folder} --json",
        f"analyze {folder} --image-size 16 --out {out}",
        f"export {folder} --out {tmp_path / 'model.onnx'}",
        f"profile {folder} --json",
    ):
        assert main(command.split()) == 2, command
        said = capsys.readouterr()
        assert "model.safetensors is of no use: head.weight holds numbers that are not finite\n" in said.err, command
        assert "nan" not in said.out, command


def test_logits_that_are_not_finite_are_said(place, tmp_path):
    """Numbers in the weights are not enough: large ones add up to inf."""
    model = lrfdyn.from_pretrained(place / "run" / "model")
    model.head.weight.data.fill_(3e38)
    model.head.bias.data.fill_(3e38)
    model.save_pretrained(tmp_path)
    with pytest.raises(LrfdynError, match=r"model: its logits of .*00.png or those after it are not finite"):
        list(Predictor.open(str(tmp_path)).predict(sorted((place / "images").iterdir())))
    network = tiny_model()
    network.head.classifier.bias.data[0] = float("nan")
    with pytest.raises(LrfdynError, match="model: its scores are not finite"):
        predict_mask(network.eval(), Image.new("RGB", (64, 64)))


def test_a_loss_that_is_not_finite_is_said(tmp_path, monkeypatch, capsys):
    train(tiny(schedule={"epochs": 1, "warmup_epochs": 0, "mix_epochs": 0}), tmp_path)
    monkeypatch.setattr("lrfdyn.training.tasks.Classification.test", lambda *_: {"test_loss": float("nan"), "top1": 0})
    assert main(["evaluate", str(tmp_path), "--json"]) == 2
    assert "is of no use: the loss on the test images is nan" in capsys.readouterr().err


def test_json_has_no_numbers_that_are_none(capsys):
    print_json({"a": [float("nan"), 1.5], "b": -float("inf")})
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == {"a": [None, 1.5], "b": None}


def test_model_without_description(tmp_path, place, capsys):
    """Folders of before class names and preprocessing were kept: the usual is taken, and said."""
    model = small("spikformer", "ssa")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert "preprocessing" not in config
    assert "class_names" not in config
    image = sorted((place / "images").iterdir())[0]
    assert main(["predict", str(image), "--model", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert "does not say how images are preprocessed" in printed.err
    assert "class 0" in printed.out


def test_saved_description(place, tmp_path):
    model = lrfdyn.from_pretrained(place / "run" / "model")
    assert model.class_names == NAMES
    assert model.preprocessing == Preprocessing(16, (0.3,), (0.4,), 1.0)
    assert lrfdyn.from_pretrained(place / "run" / "model", time_steps=3).class_names == NAMES
    model.reset_classifier(7)
    assert model.class_names is None
    model.save_pretrained(tmp_path)
    assert lrfdyn.from_pretrained(tmp_path).class_names is None


def test_trained_model_finds_what_its_test_found(tmp_path, capsys):
    """The test images as files give the accuracy that the run reports."""
    config = tiny(
        optimizer={"ema_decay": None},
        augmentation={"mixup": 0.0},
        schedule={"epochs": 3},
        run={"batch_size": 32},
        model={"drop_path": 0.0, "options": {"dim": 16, "depth": 1}},
    )
    summary = train(config, tmp_path / "run")
    images, labels = Digits(None, Augmentation()).splits["test"]
    (tmp_path / "images").mkdir()
    for i, (image, label) in enumerate(zip(images, labels, strict=True)):
        path = tmp_path / "images" / f"{i:03}_{label}.png"
        Image.fromarray(image[0].numpy().astype(np.uint8)).save(path)
    found = predict(capsys, tmp_path / "images", "--model", tmp_path / "run", "--batch", "64")
    right = [r["predictions"][0]["name"] == Path(r["image"]).stem[-1] for r in found["images"]]
    assert len(right) == 360
    assert 100 * np.mean(right) == pytest.approx(summary["top1"], abs=0.3)  # one image: folded norms round otherwise
    assert summary["top1"] > 15  # not by chance
