"""Tiny-ImageNet in its official layout: what is read, what is kept, what is wrong."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from lrfdyn.data import Augmentation, create_data, tiny_imagenet
from lrfdyn.errors import LrfdynError
from lrfdyn.training.estimate import estimate
from lrfdyn.training.recipes import load_recipe
from tests.data.make import jpeg, write_tiny_imagenet

Image = pytest.importorskip("PIL.Image")


def data(root: Path, **options) -> tiny_imagenet.TinyImageNet:
    return create_data("tiny_imagenet", root, Augmentation(), **{"workers": 0, **options})


def pixels(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path).convert("RGB"))


def test_images_labels_and_names(tmp_path: Path) -> None:
    """Sorted classes, whatever the order of wnids.txt; grey images are in colour."""
    root = write_tiny_imagenet(tmp_path / "tiny-imagenet-200")
    grey = root / "train" / "n00000001" / "images" / "n00000001_2.JPEG"
    Image.open(grey).convert("L").save(grey, "JPEG")
    source = data(tmp_path)
    assert (source.train_images, source.test_images, source.num_classes) == (12, 6, 3)
    assert source.class_names == ["name 0", "name 1", "name 2"]
    (batch,) = source.test_batches(batch_size=6)
    assert batch.labels.tolist() == [1, 0, 2, 1, 0, 2]
    mean, deviation = (torch.tensor(x).view(3, 1, 1) for x in (source.mean, source.deviation))
    for i in range(6):
        levels = torch.tensor(pixels(root / "val" / "images" / f"val_{i}.JPEG")).permute(2, 0, 1) / 255
        assert torch.allclose(batch.images[i], (levels - mean) / deviation, atol=1e-5)
    picture, label = source.picture("train", 6)
    assert label == 1
    np.testing.assert_array_equal(picture, pixels(grey))


def test_decoded_once_and_anew_when_an_image_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, calls = write_tiny_imagenet(tmp_path), []
    decode = tiny_imagenet.DecodedOnce._decode
    monkeypatch.setattr(
        tiny_imagenet.DecodedOnce, "_decode", lambda self, which: calls.append(len(which)) or decode(self, which)
    )
    first = np.array(data(root).levels())
    assert sum(calls) == 18
    assert isinstance(data(root).levels(), np.memmap)
    assert sum(calls) == 18
    file = root / ".levels" / "TinyImageNet"
    file.write_bytes(file.read_bytes()[:-1])
    np.testing.assert_array_equal(data(root).levels(), first)
    assert sum(calls) == 36
    image = root / "val" / "images" / "val_3.JPEG"
    image.write_bytes(jpeg(900, (64, 64)))
    os.utime(image, ns=(1, 1))
    again = data(root).levels()
    assert (again != first).any((1, 2, 3)).nonzero()[0].tolist() == [15]
    estimate(load_recipe("tiny_imagenet_spikformer", {"data.root": str(root), "run.batch_size": 4}), memory=False)
    assert sum(calls) == 54


def test_processes_decode_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_imagenet, "TOGETHER", 5)
    root = write_tiny_imagenet(tmp_path / "data")
    caches = [str(tmp_path / name) for name in ("one", "two")]
    alone, together = (data(root, workers=n, cache=c).levels() for n, c in zip((0, 2), caches, strict=True))
    np.testing.assert_array_equal(alone, together)


def test_a_test_in_inference_mode_leaves_training_alone(tmp_path: Path) -> None:
    source = data(write_tiny_imagenet(tmp_path))
    with torch.inference_mode():
        assert len(list(source.test_batches(batch_size=6))) == 1
    batch = next(source.train_batches(epoch=0, seed=0, batch_size=4))
    model = torch.nn.Conv2d(3, 3, 64)
    torch.nn.functional.cross_entropy(model(batch.images).flatten(1), batch.targets).backward()
    assert model.weight.grad is not None


def damaged(name: str) -> Callable[[Path], object]:
    return lambda root: (root / name).write_bytes((root / name).read_bytes()[:200])


@pytest.mark.parametrize(
    ("break_it", "problem"),
    [
        (lambda root: (root / "wnids.txt").unlink(), r"root: \S+ has no wnids.txt"),
        (lambda root: (root / "wnids.txt").write_text("\n"), r"root: \S+wnids.txt lists no classes"),
        (lambda root: (root / "words.txt").unlink(), r"root: cannot read \S+words.txt"),
        (lambda root: (root / "val" / "val_annotations.txt").unlink(), r"root: cannot read \S+val_annotations.txt"),
        (
            lambda root: (root / "val" / "val_annotations.txt").write_text("a\tb\n"),
            r"line 1: expected an image and its",
        ),
        (
            lambda root: (root / "train" / "n00000001").rename(root / "away"),
            r"root: no such folder \S+n00000001/images",
        ),
        (lambda root: (root / "val" / "images" / "val_2.JPEG").unlink(), r"data: cannot read the image \S+val_2.JPEG"),
        (damaged("val/images/val_1.JPEG"), r"data: cannot read the image \S+val_1.JPEG \("),
        (
            lambda root: (root / "val" / "images" / "val_1.JPEG").write_bytes(jpeg(1, (32, 64))),
            r"data: the image \S+val_1.JPEG is 32x64 pixels, expected 64x64",
        ),
    ],
)
def test_wrong_layouts_and_damaged_files(tmp_path: Path, break_it: Callable[[Path], object], problem: str) -> None:
    root = write_tiny_imagenet(tmp_path)
    break_it(root)
    with pytest.raises(LrfdynError, match=problem):
        list(data(root).test_batches(batch_size=2))
    assert not (root / ".levels" / "TinyImageNet").exists()


def test_crops_of_decoded_images_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LrfdynError, match="crop: expected pad or none for images that are kept decoded, got resized"):
        create_data("tiny_imagenet", write_tiny_imagenet(tmp_path), Augmentation(crop="resized"))
