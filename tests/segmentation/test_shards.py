"""Pictures with masks in shards, and the trimaps of Oxford-IIIT Pet."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lrfdyn.data import Augmentation, create_data, pack, pack_shards
from lrfdyn.errors import LrfdynError
from lrfdyn.segmentation.pairs import IGNORED
from lrfdyn.training.run import run_training
from tests.data.make import assert_equal, write_pets
from tests.segmentation.make import CLASSES, tiny_config, write_pair, write_shapes

NONE, AUGMENT = Augmentation(), Augmentation(flip=0.5, scale=(0.5, 2.0), photometric=True)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shapes(tmp_path_factory.mktemp("shapes"), train=12, validation=5)


@pytest.fixture(scope="module")
def out(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a short side of 36, the smallest that the pictures have; several shards of each split."""
    out = tmp_path_factory.mktemp("shards") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pack, "MIB", 20_480)
        source = create_data("ade20k", root, NONE, num_classes=CLASSES)
        manifest = pack_shards(source, out, name="ade20k", short_side=36, quality=100, shard_mib=1, workers=0)
    assert len(manifest.shards) > 3
    return out


def test_shards_give_the_pictures_of_their_source(root: Path, out: Path) -> None:
    source, shards = create_data("ade20k", root, NONE, num_classes=CLASSES), create_data("mask_shards", out, NONE)
    assert (shards.train_images, shards.test_images, shards.num_classes) == (12, 5, CLASSES)
    for split, count in (("train", 12), ("test", 5)):
        for i in range(count):
            (image, mask), (found, labels) = source.picture(split, i), shards.picture(split, i)
            picture = Image.fromarray(image)
            size = tuple(round(side * 36 / min(picture.size)) for side in picture.size)
            expected = np.asarray(picture.resize(size, Image.Resampling.BICUBIC), int)
            assert np.abs(expected - found).mean() < 2
            np.testing.assert_array_equal(labels, np.asarray(Image.fromarray(mask).resize(size, 0)))
            assert (labels == IGNORED).any()


def test_resume_in_the_middle_of_an_epoch(out: Path) -> None:
    """By processes or resident, from any step; another epoch has another order."""
    how = {"epoch": 2, "seed": 1, "batch_size": 4}
    shards = create_data("mask_shards", out, AUGMENT, image_size=32, shuffle_shards=2)
    whole = list(shards.train_batches(**how))
    for options in ({"workers": 2}, {"resident": True}):
        again = create_data("mask_shards", out, AUGMENT, image_size=32, shuffle_shards=2, **options)
        assert_equal(list(again.train_batches(**how, start_step=1)), whole[1:])
        assert_equal(list(again.test_batches(batch_size=2)), list(shards.test_batches(batch_size=2)))
    assert sorted(shards.order(0, 0)) == list(range(12))
    assert (shards.order(0, 0) != shards.order(0, 1)).any()


def test_wrong_shards(out: Path, root: Path, tmp_path: Path) -> None:
    with pytest.raises(LrfdynError, match=r"holds shards for segmentation, which mask_shards reads"):
        create_data("webdataset", out, NONE)
    with pytest.raises(LrfdynError, match=r"num_classes: the shards in \S+ have 3, got 5"):
        create_data("mask_shards", out, NONE, num_classes=5)
    (tmp_path / "train-0.tar").write_bytes((out / "train-00000.tar").read_bytes())
    (tmp_path / "val-0.tar").write_bytes((out / "val-00000.tar").read_bytes())
    with pytest.raises(LrfdynError, match=r"num_classes: expected one, as \S+ has no manifest.json that says it"):
        create_data("mask_shards", tmp_path, NONE)
    found = create_data("mask_shards", tmp_path, NONE, num_classes=2)
    with pytest.raises(LrfdynError, match=r"the mask \S+train-0.tar \(0000\d+.png at byte \d+\) has the value 3"):
        _ = [found.picture("train", i) for i in range(found.train_images)]
    cut = (out / "train-00000.tar").read_bytes()
    (tmp_path / "train-0.tar").write_bytes(cut[: len(cut) // 2])
    with pytest.raises(LrfdynError, match=r"root: cannot read the shard \S+train-0.tar \(unexpected end of data\)"):
        create_data("mask_shards", tmp_path, NONE, num_classes=CLASSES)


@pytest.mark.parametrize("border", ["ignore", "class"])
def test_trimaps(tmp_path: Path, border: str) -> None:
    root = write_pets(tmp_path, breeds=4)
    source = create_data("oxford_pets_trimaps", root, NONE, border=border)
    assert (source.train_images, source.test_images) == (8, 4)
    assert source.num_classes == len(source.class_names) == (2 if border == "ignore" else 3)
    image, mask = source.picture("train", 1)
    stored = np.asarray(Image.open(root / "annotations" / "trimaps" / "Cat_breed_0_1.png"))
    np.testing.assert_array_equal(image, np.asarray(Image.open(root / "images" / "Cat_breed_0_1.jpg")))
    assert (mask[stored == 1] == 0).all()
    assert (mask[stored == 2] == 1).all()
    assert (mask[stored == 3] == (IGNORED if border == "ignore" else 2)).all()
    batch = next(source.test_batches(batch_size=4))
    assert torch.equal(batch.labels[0].unique(), torch.tensor([0, 1, IGNORED if border == "ignore" else 2]).unique())


def test_wrong_trimaps(tmp_path: Path) -> None:
    root = write_pets(tmp_path / "one", breeds=2)
    with pytest.raises(LrfdynError, match="border: expected ignore or class, got 'ignored'"):
        create_data("oxford_pets_trimaps", root, NONE, border="ignored")
    trimap = root / "annotations" / "trimaps" / "Cat_breed_1_2.png"
    Image.fromarray(np.full((32, 40), 4, np.uint8)).save(trimap)
    with pytest.raises(LrfdynError, match=r"the mask \S+Cat_breed_1_2.png has the value 4, expected 0..3"):
        create_data("oxford_pets_trimaps", root, NONE).check_test_pairs()
    trimap.unlink()
    with pytest.raises(LrfdynError, match=r"cannot read the mask \S+Cat_breed_1_2.png \(FileNotFoundError"):
        create_data("oxford_pets_trimaps", root, NONE).check_test_pairs()
    (root / "annotations" / "trimaps").rename(root / "elsewhere")
    with pytest.raises(LrfdynError, match=r"root: no such folder \S+trimaps"):
        create_data("oxford_pets_trimaps", root, NONE)


def test_a_run_on_packed_trimaps_names_the_classes(tmp_path: Path) -> None:
    root = write_pets(tmp_path / "data", breeds=8)
    source = create_data("oxford_pets_trimaps", root, NONE)
    pack_shards(source, tmp_path / "shards", name="oxford_pets_trimaps", workers=0)
    data = {"name": "mask_shards", "options": {"num_classes": None}, "image_size": 32}
    config = tiny_config(tmp_path / "shards", data=data, schedule={"epochs": 1}, run={"batch_size": 8})
    summary = run_training(config, tmp_path / "run", recipe="pets")
    assert 0 <= summary["miou"] <= 100
    lines = (tmp_path / "run" / "classes.csv").read_text().splitlines()
    assert [line.partition(",")[0] for line in lines] == ["class", "pet", "background"]


def test_a_picture_of_one_class_has_a_mask_too(tmp_path: Path) -> None:
    """The order of the files decides, whatever the sizes."""
    for i, size in enumerate(((30, 20), (20, 30))):
        for split in ("training", "validation"):
            write_pair(tmp_path / "data", split, f"p{i}", np.zeros((*size, 3), np.uint8), np.full(size, i, np.uint8))
    source = create_data("ade20k", tmp_path / "data", NONE, num_classes=2)
    pack_shards(source, tmp_path / "out", name="ade20k", short_side=10, workers=0)
    shards = create_data("mask_shards", tmp_path / "out", NONE)
    assert [np.unique(shards.picture("test", i)[1]).tolist() for i in (0, 1)] == [[IGNORED], [0]]
    assert [shards.picture("test", i)[1].shape for i in (0, 1)] == [(15, 10), (10, 15)]
