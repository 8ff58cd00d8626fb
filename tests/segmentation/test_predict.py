"""Masks and overlays of image files, the figure, and the page."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lrfdyn.cli import main
from lrfdyn.data import Augmentation, create_data, pack_shards
from lrfdyn.data.augment import normalise
from lrfdyn.data.preprocess import IMAGENET_DEVIATION, IMAGENET_MEAN, Preprocessing
from lrfdyn.deploy import compile_for_inference
from lrfdyn.errors import LrfdynError
from lrfdyn.models import create_model
from lrfdyn.segmentation import predict
from lrfdyn.segmentation.drawing import blend, class_names, class_shares, mask_image, overlay, palette
from lrfdyn.segmentation.inference import segment
from lrfdyn.segmentation.pairs import IGNORED, read_pair
from lrfdyn.segmentation.predict import load_segmenter, predict_mask, predict_segmentation, segmentation_figure
from tests.data.make import write_pets
from tests.segmentation.make import TINY_HOST, shapes, tiny_model, turned_pair, write_shapes

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A model of 150 classes, as a run leaves it, and a data set."""
    folder = tmp_path_factory.mktemp("predict")
    tiny_model(num_classes=150).save_pretrained(folder / "run" / "model")
    write_shapes(folder / "data", train=2, validation=4)
    return folder


def test_masks_and_overlays(place, tmp_path):
    image = Image.fromarray(shapes(1, 60, 90)[0])
    image.save(tmp_path / "a.png")
    (tmp_path / "other").mkdir()
    image.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "other" / "a.jpg")
    (tmp_path / "broken.jpg").write_bytes(b"nothing")
    images = [tmp_path / "a.png", tmp_path / "broken.jpg", tmp_path / "other" / "a.jpg", tmp_path / "none.png"]
    records = list(predict_segmentation(str(place / "run"), images, tmp_path / "out"))
    assert [Path(record["image"]) for record in records] == images
    good, bad, second, missing = records
    assert set(bad) == set(missing) == {"image", "error"}
    assert bad["error"].startswith("UnidentifiedImageError")
    assert missing["error"] == "No such file or directory"
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "a_mask.png", "a_overlay.png", "a_2_mask.png", "a_2_overlay.png",
    }  # fmt: skip
    with Image.open(good["mask"]) as mask:
        assert mask.mode == "P"
        assert mask.size == (90, 60)
        values = np.asarray(mask)
        assert mask.getpalette()[:3] == [120, 120, 120]
    assert good["classes"] == class_shares(values, 150)
    assert sum(good["classes"].values()) == pytest.approx(1)
    assert set(good["classes"]) <= set(class_names())
    with Image.open(good["overlay"]) as picture:
        assert picture.width > 90, "the legend"
        blended = picture.crop((0, 0, 90, 60))
    assert np.array_equal(np.asarray(blended), np.asarray(blend(image, values, 150)))
    assert (second["width"], second["height"]) == (60, 90)


def test_flip_and_window_change_the_way_not_the_size(place, tmp_path):
    model = load_segmenter(str(place / "run" / "model"), "cpu")
    image = Image.fromarray(shapes(1, 60, 90)[0])
    for options in ({}, {"flip": True}, {"window": 32}):
        assert predict_mask(model, image, **options).shape == (60, 90)


def test_images_are_normalised_as_the_training_data_was(tmp_path, monkeypatch):
    """By what the model was saved with; by ImageNet's statistics where that says nothing."""
    seen = []
    monkeypatch.setattr(predict, "segment", lambda model, x, **options: seen.append(x) or segment(model, x, **options))
    model, levels = tiny_model(image_size=64).eval(), shapes(1, 64, 96)[0]
    image, pixels = Image.fromarray(levels), torch.from_numpy(levels).permute(2, 0, 1)[None]
    predict_mask(model, image)
    own = (0.9, 0.1, 0.5), (0.02, 0.03, 0.04)
    model.preprocessing = Preprocessing(64, *own, 1.0, "bilinear")
    model.save_pretrained(tmp_path / "model")
    predict_mask(load_segmenter(str(tmp_path / "model"), "cpu"), image)
    for found, facts in zip(seen, ((IMAGENET_MEAN, IMAGENET_DEVIATION), own), strict=True):
        torch.testing.assert_close(found, normalise(pixels, *facts))
    model.preprocessing = Preprocessing(64, (0.9,), (0.1,))
    with pytest.raises(LrfdynError, match=r"model: expected a mean of 3 channels, as pictures have, got \[0.9\]"):
        predict_mask(model, image)


def test_legend_of_a_small_image_names_its_classes():
    mask = np.repeat(np.arange(6, dtype=np.uint8), 4).reshape(4, 6)
    picture = np.asarray(overlay(Image.new("RGB", (6, 4)), mask, 150))
    shown = {tuple(colour) for colour in picture[:, 6:].reshape(-1, 3)}
    assert {tuple(colour) for colour in palette()[:6]} <= shown


def test_mask_colours():
    mask = np.array([[0, 2, IGNORED]], np.uint8)
    assert np.array_equal(np.asarray(mask_image(mask, 150).convert("RGB"))[0], palette()[mask[0]])
    grey = Image.new("RGB", (3, 1), (100, 100, 100))
    mixed = np.asarray(blend(grey, mask, 150))
    assert tuple(mixed[0, 2]) == (100, 100, 100), "pixels without a class stay as they are"
    assert mixed[0, 1, 2] > mixed[0, 1, 0], "the sky is drawn in light blue"


def test_not_a_segmentation_model(tmp_path):
    create_model("sdt_v3_t", image_size=32, **TINY_HOST).save_pretrained(tmp_path / "classifier")
    with pytest.raises(LrfdynError, match="is a SDTV3, expected a segmentation model"):
        load_segmenter(str(tmp_path / "classifier"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(LrfdynError, match=r"model: .*empty holds no model"):
        load_segmenter(str(tmp_path / "empty"))
    with pytest.raises(LrfdynError, match="images: expected at least one file"):
        next(predict_segmentation("x", [], tmp_path))


def test_figure_command(place, tmp_path, capsys):
    model, out = place / "run", tmp_path / "figure.png"
    write = ["figure-segmentation", f"SSA={model}", f"LRF-Dyn={model}", "--root", str(place / "data")]
    assert main([*write, "--count", "2", "--out", str(out), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["scenes"] == ["scene_000", "scene_003"]
    assert result["pixel_accuracy"]["SSA"] == result["pixel_accuracy"]["LRF-Dyn"]
    with Image.open(out) as picture:
        assert picture.format == "PNG"
        assert picture.width > 4 * 300
        assert picture.height > 2 * 300
    assert main([*write, "--scenes", "scene_999", "--out", str(out)]) == 2
    assert "unknown name 'scene_999'" in capsys.readouterr().err
    assert main(["figure-segmentation", "a/seed0", "b/seed0", "--root", str(place / "data")]) == 2
    assert "models: several are called 'seed0'; put a title in front: A=b/seed0" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    for bad, message in (
        ("file/x.png", "out: cannot write in the folder"),
        (".", "out: expected a file, got the folder"),
    ):
        assert main([*write, "--out", str(tmp_path / bad)]) == 2
        assert message in capsys.readouterr().err


def test_figure_of_a_model_whose_path_has_an_equals_sign(place, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("lr=1").symlink_to(place / "run")
    arguments = ["figure-segmentation", "lr=1", "SSA=lr=1", "--root", str(place / "data"), "--count", "1", "--json"]
    assert main(arguments) == 0
    assert list(json.loads(capsys.readouterr().out)["pixel_accuracy"]) == ["lr=1", "SSA"]


def test_figure_of_an_image_that_exif_turns(place, tmp_path):
    """The row shows the pixels that the mask was drawn on, and counts on them."""
    data = write_shapes(tmp_path / "data", train=1, validation=1)
    turned_pair(data, "validation", "scene_000")
    source = create_data("ade20k", data, Augmentation())
    model = load_segmenter(str(place / "run"), "cpu")
    pixels, truth = read_pair(source.test_pairs[0])
    mask = predict_mask(model, Image.fromarray(pixels))
    with pytest.raises(LrfdynError, match="scenes: expected at least one"):
        segmentation_figure({"SSA": model}, source, [], tmp_path / "figure.jpg")
    accuracy = segmentation_figure({"SSA": model}, source, [0], tmp_path / "figure.jpg")
    with Image.open(tmp_path / "figure.jpg") as picture:
        assert picture.format == "JPEG"
    labelled = truth != IGNORED
    assert accuracy == {"SSA": [pytest.approx(100 * (mask == truth)[labelled].mean())]}


def test_figure_of_any_data_set_with_masks(place, tmp_path, capsys):
    """Pets and shards too; what a data set ignores does not count."""
    tiny_model(num_classes=2).save_pretrained(tmp_path / "two")
    tiny_model(num_classes=3).save_pretrained(tmp_path / "three")
    write_pets(tmp_path / "pets", breeds=2)
    pets = create_data("oxford_pets_trimaps", tmp_path / "pets", Augmentation())
    pack_shards(pets, tmp_path / "shards", name="oxford_pets_trimaps", workers=0)
    out = str(tmp_path / "figure.png")

    def figure(model, *data):
        return main(["figure-segmentation", f"A={tmp_path / model}", "--out", out, "--device", "cpu", "--json", *data])

    def printed():
        return json.loads(capsys.readouterr().out)

    assert figure("two", "--data", "oxford_pets_trimaps", "--root", str(tmp_path / "pets")) == 0
    found, model = printed(), load_segmenter(str(tmp_path / "two"), "cpu")
    assert found["scenes"] == [pair.image.stem for pair in pets.test_pairs]
    for i, accuracy in enumerate(found["pixel_accuracy"]["A"]):
        pixels, truth = pets.picture("test", i)
        correct = predict_mask(model, Image.fromarray(pixels)) == truth
        assert accuracy == pytest.approx(100 * correct[truth != IGNORED].mean())
    assert figure("two", "--data.name", "mask_shards", "--root", str(tmp_path / "shards"), "--count", "1") == 0
    assert len(printed()["scenes"]) == 1
    trimaps = ["--data", "oxford_pets_trimaps", "--root", str(tmp_path / "pets")]
    assert figure("three", *trimaps, "--data.options", "{border: class}") == 0
    assert figure("three", "--root", str(place / "data")) == 0, "as many classes as the model has, in that layout"
    capsys.readouterr()
    for model, data, message in (
        ("three", trimaps, "models: expected 2 classes, as the data has, got 3"),
        ("three", ["--data", "mask_shards", "--root", str(tmp_path / "shards")], "num_classes: the shards in"),
        ("two", ["--data", "digits"], "data: expected one with masks (ade20k, oxford_pets_trimaps, mask_shards), got"),
        ("two", [], "root: ade20k needs the folder of its files"),
    ):
        assert figure(model, *data) == 2
        assert message in capsys.readouterr().err


def test_only_classifiers_are_exported_and_compiled(place, tmp_path, capsys):
    assert main(["export", str(place / "run"), "--out", str(tmp_path / "x.onnx")]) == 2
    assert "model: expected a classifier, got a segmentation model" in capsys.readouterr().err
    with pytest.raises(LrfdynError, match="model: expected a classifier, got a segmentation model"):
        compile_for_inference(tiny_model().eval())
