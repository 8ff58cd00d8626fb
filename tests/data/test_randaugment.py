"""The operations against Pillow's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from lrfdyn.data import Augmentation
from lrfdyn.data import randaugment as r
from tests.data.make import keys, levels

Image = pytest.importorskip("PIL.Image")
ImageEnhance = pytest.importorskip("PIL.ImageEnhance")
ImageOps = pytest.importorskip("PIL.ImageOps")

FILL = (10, 20, 30)


def samples() -> Tensor:
    images = levels(8, 3, 32, 32)
    images[1] //= 3  # little contrast
    images[2] = 77  # a single level
    images[3, 0] = 5  # in one channel
    images[4] = torch.randint(256, (3, 32, 32), generator=torch.Generator().manual_seed(0))
    images[5] = images[5] // 128 * 255  # two levels
    return images


def pillow(images: Tensor, function) -> Tensor:
    results = [function(Image.fromarray(i.permute(1, 2, 0).numpy())) for i in images]
    return torch.stack([torch.from_numpy(np.array(i)).permute(2, 0, 1) for i in results]).float()


def column(value: float, count: int = 8) -> Tensor:
    return torch.full((count, 1, 1, 1), value)


def test_equalize() -> None:
    assert torch.equal(r.equalize(samples().float()), pillow(samples(), ImageOps.equalize))


def test_autocontrast() -> None:
    difference = r.autocontrast(samples().float()) - pillow(samples(), ImageOps.autocontrast)
    assert difference.abs().max() <= 1
    assert (difference != 0).float().mean() < 0.01


@pytest.mark.parametrize("threshold", [0, 1, 100, 128, 256])
def test_solarize(threshold: int) -> None:
    expected = pillow(samples(), lambda i: ImageOps.solarize(i, threshold))
    assert torch.equal(r.solarize(samples().float(), column(threshold)), expected)


@pytest.mark.parametrize("bits", [4, 5, 6, 7, 8])
def test_posterize(bits: int) -> None:
    expected = pillow(samples(), lambda i: ImageOps.posterize(i, bits))
    assert torch.equal(r.posterize(samples().float(), column(bits)), expected)


@pytest.mark.parametrize("factor", [0.1, 0.55, 1.0, 1.3, 1.9])
@pytest.mark.parametrize("name", ["color", "contrast", "brightness", "sharpness"])
def test_enhancement(name: str, factor: float) -> None:
    enhancer = getattr(ImageEnhance, name.capitalize())
    expected = pillow(samples(), lambda i: enhancer(i).enhance(factor))
    difference = (getattr(r, name)(samples().float(), column(factor)) - expected).abs()
    assert difference.max() <= 2
    assert difference.mean() < 0.2


def transformed(images: Tensor, name: str, strength: float) -> Tensor:
    count = len(images)
    operation = np.full(count, r.OPERATIONS.index(name))
    signs = np.full(count, np.sign(strength))
    return r.apply_layer(images.float(), operation, np.full(count, abs(strength)), signs, FILL)


@pytest.mark.parametrize("strength", [-0.7, 0.5, 1.0])
@pytest.mark.parametrize("name", ["rotate", "shear_x", "shear_y", "translate_x", "translate_y"])
def test_affine(name: str, strength: float) -> None:
    images = levels(8, 3, 24, 32)
    matrix = {
        "shear_x": (1, 0.3 * strength, 0, 0, 1, 0),
        "shear_y": (1, 0, 0, 0.3 * strength, 1, 0),
        "translate_x": (1, 0, 0.45 * 32 * strength, 0, 1, 0),
        "translate_y": (1, 0, 0, 0, 1, 0.45 * 24 * strength),
    }.get(name)

    def move(image):
        if matrix is None:
            return image.rotate(30 * strength, Image.Resampling.BILINEAR, fillcolor=FILL)
        return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR, fillcolor=FILL)

    difference = (transformed(images, name, strength) - pillow(images, move)).abs()
    # Points on the very border of the old image may fall on either side of it.
    assert (difference > 2).float().mean() < 0.005


@pytest.mark.parametrize("name", r.OPERATIONS)
def test_levels_stay_levels(name: str) -> None:
    for strength in (-1.0, 0.3, 1.0):
        out = transformed(samples(), name, strength)
        assert torch.equal(out, out.round())
        assert 0 <= out.min() <= out.max() <= 255


@pytest.mark.parametrize("name", sorted(set(r.OPERATIONS) - {"autocontrast", "equalize"}))
def test_no_strength_is_identity(name: str) -> None:
    assert torch.equal(transformed(samples(), name, 0.0), samples().float())


def test_every_image_gets_its_own_operation() -> None:
    count = 3 * len(r.OPERATIONS)
    images = levels(count, 3, 16, 16).float()
    operation = np.arange(count) % len(r.OPERATIONS)
    strength, sign = np.linspace(0.1, 1, count), np.where(np.arange(count) % 2, 1.0, -1.0)
    together = r.apply_layer(images, operation, strength, sign, FILL)
    for i in range(count):
        alone = r.apply_layer(images[i : i + 1], operation[[i]], strength[[i]], sign[[i]], FILL)
        assert torch.equal(together[i : i + 1], alone)


def test_operations_and_strengths_are_drawn_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(r, "apply_layer", lambda x, *drawn: seen.append(drawn) or x)
    settings = Augmentation(rand_augment_layers=2, rand_augment_probability=0.5, rand_augment_magnitude=5)
    r.rand_augment(torch.zeros(6000, 3, 1, 1), keys(6000), settings, FILL)
    assert len(seen) == 2
    operation, strength, sign, _ = seen[1]
    shares = np.bincount(operation, minlength=14) / 6000
    assert abs(shares[0] - (0.5 + 0.5 / 14)) < 0.02
    assert (abs(shares[1:] - 0.5 / 14) < 0.01).all()
    assert abs(strength.mean() - 0.5) < 0.01
    assert abs(strength.std() - 0.05) < 0.005
    assert abs(sign.mean()) < 0.05
    assert (seen[0][0] != operation).any()


def test_only_the_operations_that_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(r, "apply_layer", lambda x, *drawn: seen.append(drawn) or x)
    settings = Augmentation(rand_augment_layers=1, rand_augment_operations=("rotate", "equalize"))
    r.rand_augment(torch.zeros(4000, 3, 1, 1), keys(4000), settings, FILL)
    shares = np.bincount(seen[0][0], minlength=14) / 4000
    wanted = {
        r.OPERATIONS.index("identity"): 0.5,
        r.OPERATIONS.index("rotate"): 0.25,
        r.OPERATIONS.index("equalize"): 0.25,
    }
    assert all(abs(shares[i] - wanted.get(i, 0)) < 0.03 for i in range(14))
    assert set(np.nonzero(shares)[0]) == set(wanted)
