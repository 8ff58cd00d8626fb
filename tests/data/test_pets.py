"""Oxford-IIIT Pet in its official layout, for classification."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lrfdyn.data import Augmentation, create_data
from lrfdyn.errors import LrfdynError
from tests.data.make import write_pets

Image = pytest.importorskip("PIL.Image")


def test_split_classes_and_names(tmp_path: Path) -> None:
    write_pets(tmp_path / "oxford-iiit-pet")
    source = create_data("oxford_pets", tmp_path, Augmentation(), image_size=24)
    assert (source.train_images, source.test_images, source.num_classes) == (74, 37, 37)
    assert source.class_names[0] == "Cat breed 0"
    assert source.class_names[36] == "dog breed 36"
    (batch,) = source.test_batches(batch_size=37)
    assert batch.labels.tolist() == list(range(37))
    picture, label = source.picture("train", 3)
    stored = Image.open(tmp_path / "oxford-iiit-pet" / "images" / "Cat_breed_1_1.jpg")
    assert label == 1
    np.testing.assert_array_equal(picture, np.asarray(stored))


@pytest.mark.parametrize(
    ("break_it", "problem"),
    [
        (lambda root: (root / "annotations" / "trainval.txt").unlink(), r"root: \S+ has no annotations/trainval.txt"),
        (lambda root: (root / "annotations" / "test.txt").unlink(), r"root: cannot read \S+test.txt"),
        (lambda root: (root / "annotations" / "test.txt").write_text("#\n"), r"root: \S+test.txt lists no images"),
        (lambda root: (root / "annotations" / "test.txt").write_text("a_1 38 1 1\n"), r"test.txt: line 1: expected a"),
        (lambda root: (root / "images").rename(root / "pictures"), r"root: no such folder \S+images"),
        (lambda root: (root / "images" / "Cat_breed_3_2.jpg").unlink(), r"cannot read the image \S+Cat_breed_3_2.jpg"),
    ],
)
def test_wrong_layouts(tmp_path: Path, break_it: Callable[[Path], object], problem: str) -> None:
    break_it(write_pets(tmp_path))
    with pytest.raises(LrfdynError, match=problem):
        list(create_data("oxford_pets", tmp_path, Augmentation(), image_size=24).test_batches(batch_size=8))
