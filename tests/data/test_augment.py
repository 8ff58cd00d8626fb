"""Each augmentation against its definition for one image."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lrfdyn import LrfdynError
from lrfdyn.data import Augmentation, hashed_random
from lrfdyn.data import augment as a
from tests.data.make import EVERYTHING, keys, levels


def test_crop_flip() -> None:
    images = levels(6, 3, 8, 12)
    offsets = np.array([[0, 0], [8, 8], [4, 4], [1, 7], [3, 0], [5, 2]])
    flipped = np.array([False, True, False, True, True, False])
    result = a.crop_flip(images, offsets, flipped, 4)
    for i, (row, column) in enumerate(offsets):
        window = F.pad(images[i], (4, 4, 4, 4))[:, row : row + 8, column : column + 12]
        assert torch.equal(result[i], window.flip(-1) if flipped[i] else window)
    assert torch.equal(result[2], images[2])


def test_flip_rate_and_crop_offsets() -> None:
    marked = torch.zeros(2000, 1, 8, 8)
    marked[:, :, :, 0] = 255  # the left column
    flip = Augmentation(flip=0.5)
    images = a.augment_images(marked, flip, keys(2000), (0.0,), (1.0,))
    assert abs(float(images[:, 0, 0, 7].mean()) - 0.5) < 0.04
    assert (images[:, 0, 0, 0] + images[:, 0, 0, 7] == 1).all()
    point = torch.zeros(2000, 1, 8, 8)
    point[:, :, 4, 4] = 255
    images = a.augment_images(point, Augmentation(crop="pad"), keys(2000), (0.0,), (1.0,))
    rows = images.sum((1, 3)).argmax(1)[images.sum((1, 2, 3)) > 0]
    assert set(rows.tolist()) == set(range(8))  # nine offsets, of which one moves the point out


def test_normalise() -> None:
    image = torch.tensor([0, 128, 255]).view(1, 3, 1, 1)
    result = a.normalise(image, (0.1, 0.2, 0.3), (0.5, 0.25, 0.2))
    assert result.flatten().tolist() == pytest.approx([-0.2, (128 / 255 - 0.2) * 4, 3.5])


def test_erase() -> None:
    images = torch.full((4, 3, 10, 12), 9.0)
    boxes = np.array([[0, 4, 2, 5], [0, 0, 0, 0], [3, 10, 0, 12], [5, 6, 11, 12]])
    noise_keys = np.arange(4)
    result = a.erase(images, boxes, noise_keys)
    noise = hashed_random.device_normal(torch.arange(4), 360).view(4, 3, 10, 12)
    for i, (top, bottom, left, right) in enumerate(boxes):
        expected = images[i].clone()
        expected[:, top:bottom, left:right] = noise[i, :, top:bottom, left:right]
        assert torch.equal(result[i], expected)
    assert (images == 9).all()
    flat = a.erase(images, boxes, None)
    assert torch.equal(flat == 0, result != 9)
    assert torch.equal(flat[flat != 0], result[result == 9])


def test_erased_parts_get_the_mean_colour() -> None:
    settings = a.Augmentation(erase=1.0, erase_fill="mean")
    images = a.augment_images(
        torch.full((8, 3, 16, 16), 255, dtype=torch.uint8), settings, keys(8), (0.5,) * 3, (0.25,) * 3
    )
    assert set(images.unique().tolist()) == {0.0, 2.0}


def test_erase_boxes() -> None:
    boxes = a.erase_boxes(keys(4000), 0.25, (0.02, 1 / 3), 32, 32)
    height, width = boxes[:, 1] - boxes[:, 0], boxes[:, 3] - boxes[:, 2]
    hit = height > 0
    assert abs(hit.mean() - 0.25) < 0.03
    assert (boxes >= 0).all()
    assert (boxes <= 32).all()
    share = (height * width)[hit] / 1024
    assert share.min() > 0.01
    assert share.max() < 0.36
    ratio = height[hit] / width[hit]
    assert ratio.min() > 0.2
    assert ratio.max() < 5


def test_erase_box_that_cannot_fit_leaves_the_image_alone() -> None:
    boxes = a.erase_boxes(keys(50), 1.0, (1.0, 1.0), 8, 8)
    assert (boxes[:, 1] - boxes[:, 0] == 0).all()


def test_mixup() -> None:
    images, targets = levels(4, 3, 8, 8).float(), torch.eye(4)
    mixed, mixed_targets = a.mix(images, targets, a.Mix(0.3))
    for i, partner in enumerate((1, 0, 3, 2)):
        assert torch.allclose(mixed[i], 0.3 * images[i] + 0.7 * images[partner])
        assert torch.allclose(mixed_targets[i], 0.3 * targets[i] + 0.7 * targets[partner])


def test_cutmix() -> None:
    images, targets = levels(4, 3, 8, 8).float(), torch.eye(4)
    before = images.clone()
    mixed, mixed_targets = a.mix(images, targets, a.Mix(1 - 15 / 64, (2, 5, 1, 6)))
    for i, partner in enumerate((1, 0, 3, 2)):
        expected = before[i].clone()
        expected[:, 2:5, 1:6] = before[partner, :, 2:5, 1:6]
        assert torch.equal(mixed[i], expected)
        assert mixed_targets[i, partner] == pytest.approx(15 / 64)
    assert torch.equal(images, before)


def test_draw_mix() -> None:
    both = Augmentation(mixup=0.8, cutmix=1.0, mix_probability=0.75)
    drawn = [a.draw_mix(both, 0, 0, step, 32, 32) for step in range(2000)]
    assert drawn[7] == a.draw_mix(both, 0, 0, 7, 32, 32)
    plain = [m for m in drawn if m.weight == 1 and m.box is None]
    assert abs(len(plain) / 2000 - 0.25) < 0.03
    cut = [m for m in drawn if m.box is not None]
    assert abs(len(cut) / (2000 - len(plain)) - 0.5) < 0.04
    for m in cut:
        assert m.box is not None
        top, bottom, left, right = m.box
        assert 0 <= top <= bottom <= 32
        assert 0 <= left <= right <= 32
        assert m.weight == pytest.approx(1 - (bottom - top) * (right - left) / 1024)
    weights = np.array([m.weight for m in drawn if m.weight < 1 and m.box is None])
    assert abs(weights.mean() - 0.5) < 0.03
    assert abs(weights.var() - 1 / (4 * (2 * 0.8 + 1))) < 0.01  # of Beta(0.8, 0.8)


def test_box_of_cutmix_has_the_share_that_was_drawn() -> None:
    """A distribution so narrow that every share is one half: the sides are its root, 22 of 32 pixels."""
    drawn = [a.draw_mix(Augmentation(cutmix=1e6), 0, 0, step, 32, 32) for step in range(100)]
    sides = {size for m in drawn if m.box for size in (m.box[1] - m.box[0], m.box[3] - m.box[2])}
    assert max(sides) == 22  # less where the border cuts it off
    assert min(sides) >= 11


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.8, 0.0), (0.0, 1.0)])
def test_one_kind_of_mixing_alone(mixup: float, cutmix: float) -> None:
    drawn = [a.draw_mix(Augmentation(mixup=mixup, cutmix=cutmix), 0, 0, step, 32, 32) for step in range(50)]
    assert all((m.box is None) == (cutmix == 0) for m in drawn)


def test_smooth_targets() -> None:
    targets = a.smooth_targets(torch.tensor([2, 0]), 4, 0.1)
    assert targets[0].tolist() == pytest.approx([0.025, 0.025, 0.925, 0.025])
    assert torch.equal(a.smooth_targets(torch.tensor([2, 0]), 4, 0.0), F.one_hot(torch.tensor([2, 0]), 4).float())


@pytest.mark.parametrize("channels", [1, 3])
def test_everything_together(channels: int) -> None:
    images = levels(16, channels, 32, 32)
    mean, deviation = (0.5,) * channels, (0.25,) * channels
    targets = a.smooth_targets(torch.arange(16) % 10, 10, 0.1)
    for step in range(4):
        out = a.augment_images(images, EVERYTHING, keys(16), mean, deviation)
        out, mixed = a.mix(out, targets, a.draw_mix(EVERYTHING, 0, 0, step, 32, 32))
        assert out.shape == images.shape
        assert out.dtype == mixed.dtype == torch.float32
        assert out.is_contiguous(memory_format=torch.channels_last)
        assert torch.isfinite(out).all()
        assert torch.allclose(mixed.sum(1), torch.ones(16))


@pytest.mark.parametrize(
    ("name", "value"),
    [("flip", 1.5), ("crop", "random"), ("mixup", -1), ("label_smoothing", 1.0), ("repeats", 0),
     ("rand_augment_magnitude", 11), ("crop_scale", (0.5, 0.1)), ("crop_scale", (0.5, 2)), ("erase_area", (0.1,)),
     ("erase_fill", "black"), ("rand_augment_operations", ()), ("rand_augment_operations", ("rotates",))],
)  # fmt: skip
def test_bad_settings_are_named(name: str, value: object) -> None:
    with pytest.raises(LrfdynError, match=f"^{name}: "):
        Augmentation(**{name: value})


def test_lists_from_a_configuration_file() -> None:
    assert Augmentation(crop_scale=[0.2, 1.0]) == Augmentation(crop_scale=(0.2, 1.0))
