"""ADE20K's layout: what is read, what a crop is, what is wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lrfdyn.data import Augmentation, create_data
from lrfdyn.errors import LrfdynError
from lrfdyn.segmentation import data as ade20k
from lrfdyn.segmentation.crops import Pictures, photometric, random_crops, shift_colour
from lrfdyn.segmentation.data import find_pairs
from lrfdyn.segmentation.pairs import IGNORED, read_mask, read_pair
from tests.data.make import assert_equal, joined, keys
from tests.segmentation.make import CLASSES, shapes, turned_pair, write_pair, write_shapes

AUGMENT = Augmentation(flip=0.5, scale=(0.5, 2.0), photometric=True)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_shapes(tmp_path_factory.mktemp("shapes"), train=12, validation=7)


def data(root: Path, augment: Augmentation = AUGMENT, **options):
    return create_data("ade20k", root, augment, **{"image_size": 32, "num_classes": CLASSES, **options})


def train(source, **options):
    return list(source.train_batches(**{"epoch": 1, "seed": 2, "batch_size": 4, **options}))


def test_masks_begin_at_zero(root):
    pair = find_pairs(root, "training")[0]
    stored = np.asarray(Image.open(pair.mask))
    mask = read_mask(pair, CLASSES)
    assert (mask[stored == 0] == IGNORED).all()
    assert (mask[stored > 0] == stored[stored > 0] - 1).all()
    assert (stored == 0).any()


def test_resident_and_streamed_are_the_same(root):
    resident = train(data(root, resident=True))
    assert_equal(train(data(root)), resident)
    assert_equal(train(data(root, workers=2)), resident)
    assert len(resident) == 3
    assert resident[0].images.shape == (4, 3, 32, 32)
    assert resident[0].labels.shape == (4, 32, 32)


def test_processes_split_the_batch(root):
    source = data(root, resident=True)
    parts = [train(source, batch_size=2, rank=rank, world_size=2) for rank in (0, 1)]
    assert_equal(joined(parts), train(source))


def test_epochs_differ_and_repeat(root):
    source = data(root, resident=True)
    assert_equal(train(source, start_step=1), train(source)[1:])
    assert not torch.equal(train(source)[0].images, train(source, epoch=3)[0].images)


def packed(*sizes: tuple[int, int]) -> Pictures:
    return Pictures.pack([(image, mask - 1) for image, mask in (shapes(i, *size) for i, size in enumerate(sizes))])


def test_crop_without_augmentation_is_the_picture():
    pictures = packed((32, 32), (20, 20))
    levels, mask, inside = random_crops(pictures, np.array([0]), Augmentation(), keys(1), 32)
    image, label = shapes(0, 32, 32)
    assert torch.equal(levels[0].permute(1, 2, 0), torch.from_numpy(image).float())
    assert torch.equal(mask[0], torch.from_numpy((label - 1).astype(np.int64)))
    assert inside.all()


def test_scaled_crop_is_torch_s_resize():
    """Twice as large, bilinear, against torch; the window is the top left one of the resized picture or any other."""
    pictures = packed((16, 16))
    levels, mask, _ = random_crops(pictures, np.array([0]), Augmentation(scale=(2.0, 2.0)), keys(1, seed=5), 16)
    image, label = shapes(0, 16, 16)
    whole = torch.nn.functional.interpolate(
        torch.from_numpy(image).permute(2, 0, 1)[None].float(), scale_factor=2, mode="bilinear"
    )[0]
    large = torch.from_numpy((label - 1).astype(np.int64)).repeat_interleave(2, 0).repeat_interleave(2, 1)
    places = [
        (top, left)
        for top in range(17)
        for left in range(17)
        if torch.allclose(whole[:, top : top + 16, left : left + 16], levels[0], atol=1e-3)
    ]
    assert len(places) == 1
    top, left = places[0]
    assert torch.equal(large[top : top + 16, left : left + 16], mask[0])


def test_flip_mirrors_image_and_mask():
    pictures = packed((32, 32))
    plain = random_crops(pictures, np.array([0]), Augmentation(), keys(1), 32)
    turned = random_crops(pictures, np.array([0]), Augmentation(flip=1.0), keys(1), 32)
    for a, b in zip(plain, turned, strict=True):
        assert torch.equal(a.flip(-1), b)


def test_flipped_pictures_are_padded_at_the_same_sides():
    pictures = packed((24, 20))
    plain, turned = (
        random_crops(pictures, np.array([0]), Augmentation(flip=flip, scale=(0.5, 0.5)), keys(1), 32)
        for flip in (0.0, 1.0)
    )
    assert torch.equal(plain[2], turned[2])
    (width,) = set(plain[2].sum(-1).unique().tolist()) - {0}
    assert width == 16
    for a, b in zip(plain, turned, strict=True):
        assert torch.equal(a[..., :width].flip(-1), b[..., :width])
    assert turned[1][..., width:].eq(IGNORED).all()


def test_small_pictures_are_padded(root):
    source = data(root, replace(AUGMENT, scale=(0.5, 0.5), flip=0.0), resident=True)
    batch = train(source)[0]
    assert batch.images[:, :, 20:].eq(0).all()
    assert batch.labels[:, 20:].eq(IGNORED).all()
    assert batch.images[:, :, :16, :16].ne(0).any(1).float().mean() > 0.9


def test_photometric():
    levels = torch.rand(64, 3, 8, 8) * 255
    out = photometric(levels, keys(64))
    assert out.min() >= 0
    assert out.max() <= 255
    same = (out - levels).abs().amax((1, 2, 3)) < 1e-2
    assert 0 < same.sum() < 16  # one in sixteen has nothing on
    grey = torch.full((1, 3, 2, 2), 99.0)
    one, zero = torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 1, 1)
    assert torch.allclose(shift_colour(grey, 1.5 * one, one), grey)
    assert torch.allclose(shift_colour(levels, one, zero), levels, atol=1e-3)
    red = torch.tensor([200.0, 50, 50]).view(1, 3, 1, 1)
    assert torch.allclose(shift_colour(red, one, 2 * one).flatten(), torch.tensor([50.0, 200, 50]), atol=1e-3)


def test_validation_shows_every_image_once_and_whole(root):
    source = data(root)
    seen = [
        [(b.images.shape, b.labels.shape, b.count) for b in source.test_batches(batch_size=2, rank=r, world_size=3)]
        for r in range(3)
    ]
    assert len({len(part) for part in seen}) == 1, "the processes would wait for each other"
    assert sum(count for part in seen for *_, count in part) == source.test_images == 7
    sizes = {image[-2:] for part in seen for image, *_ in part}
    assert sizes == {(36, 40), (40, 47), (44, 40), (36, 47), (40, 40), (44, 47)}
    assert all(image[-2:] == labels[-2:] for part in seen for image, labels, _ in part)
    batch = next(data(root, test_size=20).test_batches(batch_size=1))
    assert min(batch.images.shape[-2:]) == 20
    assert batch.labels.shape[-2:] == (36, 40)


def test_padded_images_of_several_sizes_come_together(root):
    source = data(root)
    (batch,) = source.test_batches(batch_size=8, multiple=16)  # 36 to 44 by 40 to 47 pixels: all are padded to 48
    assert batch.images.shape == (7, 3, 44, 47)
    for single in source.test_batches(batch_size=1):
        height, width = single.labels.shape[-2:]
        at = [i for i in range(7) if torch.equal(batch.labels[i, :height, :width], single.labels[0])]
        assert len(at) == 1
        image, labels = batch.images[at[0]].clone(), batch.labels[at[0]].clone()
        assert torch.equal(image[:, :height, :width], single.images[0])
        image[:, :height, :width], labels[:height, :width] = 0, IGNORED
        assert image.eq(0).all()
        assert labels.eq(IGNORED).all()
    for other in ({"test_size": 20}, {"window": 32}, {"flip": True}):
        apart = list(data(root, **other).test_batches(batch_size=8, multiple=16))
        assert len(apart) == 6, "padding would be seen"


def test_a_test_does_not_decode_the_training_pictures(root, monkeypatch):
    read = []
    monkeypatch.setattr(ade20k, "read_pair", lambda pair, *rest: read.append(pair) or read_pair(pair, *rest))
    source = data(root, resident=True)
    assert sum(batch.count for batch in source.test_batches(batch_size=4)) == 7
    assert {pair.image.parent.name for pair in read} == {"validation"}
    train(source)
    train(source)
    assert len(read) == 7 + 12, "each of them once"


def test_turned_by_exif_is_read_as_stored(tmp_path):
    """Masks are drawn on the stored pixels."""
    write_shapes(tmp_path, train=2, validation=2)
    image, mask = turned_pair(tmp_path, "validation", "scene_000")
    pixels, labels = read_pair(find_pairs(tmp_path, "validation")[0], CLASSES)
    assert pixels.shape[:2] == labels.shape == mask.shape
    assert np.abs(pixels.astype(int) - image).mean() < 20, "noise in a JPEG"


def test_levels_of_16_bits_are_scaled(tmp_path):
    image, mask = shapes(3, 36, 40)
    grey = image[..., 0]
    for kind, name, pixels in (("images", "deep", grey.astype(np.uint16) * 257), ("annotations", "deep", mask)):
        (tmp_path / kind / "training").mkdir(parents=True)
        Image.fromarray(pixels).save(tmp_path / kind / "training" / f"{name}.png")
    pixels, _ = read_pair(find_pairs(tmp_path, "training")[0], CLASSES)
    assert np.array_equal(pixels, np.repeat(grey[..., None], 3, 2))


def test_folder_above_is_found(root, tmp_path):
    (tmp_path / "ADEChallengeData2016").symlink_to(root)
    assert data(tmp_path).train_images == 12


def broken(root: Path, kind: str) -> None:
    image, mask = shapes(3, 36, 40)
    if kind == "value":
        write_pair(root, "training", "bad", image, np.full_like(mask, 200))
    elif kind == "mask":
        write_pair(root, "training", "bad", image, mask)
        (root / "annotations" / "training" / "bad.png").unlink()
    elif kind == "size":
        write_pair(root, "training", "bad", image, mask[:-1])
    elif kind == "damaged":
        write_pair(root, "training", "bad", image, mask)
        (root / "images" / "training" / "bad.jpg").write_bytes(b"nothing")
    elif kind == "colour":
        write_pair(root, "training", "bad", image, np.repeat(mask[..., None], 3, 2))
    elif kind == "empty":
        for path in (root / "images" / "validation").iterdir():
            path.unlink()


@pytest.mark.parametrize("resident", [True, False], ids=["resident", "streamed"])
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("value", r"the mask .*bad\.png has the value 200, expected 0\.\.3"),
        ("mask", r"the image .*bad\.jpg has no mask .*bad\.png"),
        ("size", r"the mask .*bad\.png is 40x35 pixels, its image 40x36"),
        ("damaged", r"cannot read the image .*bad\.jpg"),
        ("colour", r"the mask .*bad\.png is not of 8-bit numbers \(mode RGB\)"),
        ("empty", r"images/validation has no images"),
    ],
)
def test_bad_files_are_named(tmp_path, kind, message, resident):
    write_shapes(tmp_path, train=3, validation=2)
    broken(tmp_path, kind)
    with pytest.raises(LrfdynError, match=message) as caught:
        train(data(tmp_path, resident=resident))
    assert len(str(caught.value).splitlines()) == 1


def test_a_bad_file_in_a_worker_process(tmp_path):
    write_shapes(tmp_path, train=3, validation=2)
    broken(tmp_path, "value")
    with pytest.raises(LrfdynError, match=r"^data: the mask .*bad\.png has the value 200"):
        train(data(tmp_path, workers=2))


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("test_size", "big", "an integer >= 1"),
        ("window", 32.5, "an integer >= 1"),
        ("workers", "two", "an integer >= 0"),
        ("workers", -1, "an integer >= 0"),
        ("num_classes", True, "an integer >= 2"),
        ("num_classes", 1, "an integer >= 2"),
        ("flip", "maybe", "true or false"),
        ("resident", 1, "true or false"),
    ],
)
def test_wrong_options_are_named(root, option, value, expected):
    with pytest.raises(LrfdynError, match=f"^{option}: expected {expected}, got {value!r}$"):
        data(root, **{option: value})


def test_wrong_root(tmp_path):
    with pytest.raises(LrfdynError, match=r"root: no such folder .*images/training"):
        data(tmp_path)
    with pytest.raises(LrfdynError, match="root: ade20k needs the folder"):
        create_data("ade20k", None, AUGMENT)
    with pytest.raises(LrfdynError, match="data: option of ade20k: unknown name 'sise'"):
        create_data("ade20k", tmp_path, AUGMENT, sise=3)


def test_test_mask_that_cannot_be_read_is_named(tmp_path):
    source = create_data("ade20k", write_shapes(tmp_path, 2, 2), Augmentation(), image_size=32, num_classes=CLASSES)
    pair = find_pairs(tmp_path, "validation")[1]
    pair.mask.write_bytes(b"nothing")
    with pytest.raises(LrfdynError, match=f"data: cannot read the mask {pair.mask}"):
        list(source.test_batches(batch_size=1))
