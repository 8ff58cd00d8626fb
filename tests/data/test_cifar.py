"""CIFAR's files: what is read, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from lrfdyn import LrfdynError
from lrfdyn.data import Augmentation, create_data
from lrfdyn.data.resident import Cifar100
from tests.data.make import dump, write_cifar

PLAIN = Augmentation()


@pytest.mark.parametrize(("name", "classes"), [("cifar10", 10), ("cifar100", 100)])
def test_reads_the_official_form(name: str, classes: int, tmp_path: Path, monkeypatch) -> None:
    folder = write_cifar(tmp_path, name, monkeypatch)
    data = create_data(name, tmp_path, PLAIN)
    assert (data.train_images, data.test_images, data.num_classes) == (40, 13, classes)
    assert (data.image_size, data.in_channels) == (32, 3)
    assert data.class_names == [f"class {i}" for i in range(classes)]
    assert create_data(name, folder, PLAIN).train_images == 40  # the folder itself


def test_official_checksums(tmp_path: Path, monkeypatch) -> None:
    folder = write_cifar(tmp_path, "cifar100", monkeypatch)
    monkeypatch.undo()
    with pytest.raises(LrfdynError, match=r"root: .*train is not the official file .*16019d7e3df5f24257cddd939b257f8d"):
        create_data("cifar100", folder, PLAIN)


@pytest.mark.parametrize("file", ["data_batch_3", "test_batch", "batches.meta"])
def test_missing_and_damaged_files_are_named(file: str, tmp_path: Path, monkeypatch) -> None:
    folder = write_cifar(tmp_path, "cifar10", monkeypatch)
    path = folder / file
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(LrfdynError, match=f"{file} is not the official file"):
        create_data("cifar10", tmp_path, PLAIN)
    path.unlink()
    with pytest.raises(LrfdynError, match=f"cannot read .*{file}"):
        create_data("cifar10", tmp_path, PLAIN)


class Command:
    def __reduce__(self):
        return os.mkdir, ("made_by_a_pickle",)


def test_no_code_is_run(tmp_path: Path, monkeypatch) -> None:
    folder = write_cifar(tmp_path, "cifar100", monkeypatch)
    md5 = dump(folder / "test", Command())
    monkeypatch.setitem(Cifar100.files, "test", {"test": md5})
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LrfdynError, match=r"cannot read .*test .*mkdir is not allowed"):
        create_data("cifar100", tmp_path, PLAIN)
    assert not (tmp_path / "made_by_a_pickle").exists()


def archive(path: Path, **changes: np.ndarray) -> None:
    generator = np.random.default_rng(0)
    arrays = {
        "x_train": generator.integers(0, 256, (6, 32, 32, 3), dtype=np.uint8),
        "y_train": np.array([0, 99, 5, 6, 7, 8]),
        "x_test": generator.integers(0, 256, (3, 32, 32, 3), dtype=np.uint8),
        "y_test": np.array([[1], [2], [3]]),
    }
    np.savez(path, **{**arrays, **changes})


def test_npz_holds_the_same_images(tmp_path: Path, monkeypatch) -> None:
    official = create_data("cifar100", write_cifar(tmp_path / "official", "cifar100", monkeypatch), PLAIN)
    splits = {}
    for split in ("train", "test"):
        images, labels = official.splits[split]
        splits |= {f"x_{split}": images.permute(0, 2, 3, 1).numpy(), f"y_{split}": labels.numpy()}
    np.savez(tmp_path / "cifar100.npz", **splits)
    batches = [
        next(d.train_batches(epoch=0, seed=0, batch_size=8))
        for d in (official, create_data("cifar100", tmp_path, PLAIN))
    ]
    assert torch.equal(batches[0].images, batches[1].images)
    assert torch.equal(batches[0].labels, batches[1].labels)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_train": np.zeros((6, 28, 28, 3), np.uint8)}, "expected uint8 images of 32x32x3"),
        ({"x_test": np.zeros((3, 32, 32, 3), np.float32)}, "float32"),
        ({"y_train": np.array([0, 100, 1, 1, 1, 1])}, "labels .* run from 0 to 100"),
        ({"y_train": np.array([0, 1])}, "6 images but 2 labels"),
        ({"x_test": np.zeros((0, 32, 32, 3), np.uint8), "y_test": np.zeros(0)}, "has no images"),
        ({"x_test": np.array([None], dtype=object)}, "cannot read"),
    ],
)
def test_bad_npz(changes: dict, message: str, tmp_path: Path) -> None:
    archive(tmp_path / "cifar100.npz", **changes)
    with pytest.raises(LrfdynError, match=rf"root: .*{message}|root: {message}.*cifar100.npz"):
        create_data("cifar100", tmp_path, PLAIN)


def test_damaged_npz(tmp_path: Path) -> None:
    (tmp_path / "cifar100.npz").write_bytes(b"PK\x03\x04 and no more")
    with pytest.raises(LrfdynError, match=r"cannot read .*cifar100.npz"):
        create_data("cifar100", tmp_path, PLAIN)


def test_resized_crops_are_for_decoded_images(tmp_path: Path) -> None:
    archive(tmp_path / "cifar100.npz")
    with pytest.raises(LrfdynError, match="crop: "):
        create_data("cifar100", tmp_path, Augmentation(crop="resized"))
