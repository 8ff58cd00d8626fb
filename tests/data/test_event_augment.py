"""The operations on event frames against their definition, pixel by pixel."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from lrfdyn import LrfdynError
from lrfdyn.data import Augmentation, DataSource, create_data
from lrfdyn.data import augment as a
from lrfdyn.data import event_augment as e
from lrfdyn.data.hashed_random import Keys
from tests.data.make import assert_equal, joined, keys

ALL = Augmentation(flip=0.5, event_operations=a.EVENT_OPERATIONS)


def counts(*shape: int) -> Tensor:
    return torch.poisson(torch.full(shape, 0.7), generator=torch.Generator().manual_seed(0))


def alone(chosen: np.ndarray) -> Keys:
    return Keys(0, 0, chosen, np.zeros_like(chosen))


def nearest(image: Tensor, matrix: Sequence[Sequence[float]]) -> Tensor:
    """torchvision's affine and rotate of one image `[C, H, W]`, from the pixel's centre to where it comes from: in
    pixels from the middle of the image, the nearest one, and nothing outside."""
    height, width = image.shape[-2:]
    result = torch.zeros_like(image)
    for row in range(height):
        for column in range(width):
            point = np.array([column + 0.5 - width / 2, row + 0.5 - height / 2, 1.0])
            x, y = np.rint(np.array(matrix) @ point + np.array([width / 2, height / 2]) - 0.5).astype(int)
            if 0 <= x < width and 0 <= y < height:
                result[:, row, column] = image[:, y, x]
    return result


def inverse(name: str, strength: float) -> list[list[float]]:
    """The inverse matrix of torchvision: `affine` with an angle of shear or a shift, `rotate` with an angle."""
    angle, shift = math.radians(30 * strength), int(5 * strength)
    return {
        "identity": [[1, 0, 0], [0, 1, 0]],
        "shear_x": [[1, math.tan(0.3 * strength), 0], [0, 1, 0]],
        "shift_x": [[1, 0, -shift], [0, 1, 0]],
        "shift_y": [[1, 0, 0], [0, 1, -shift]],
        "rotate": [[math.cos(angle), -math.sin(angle), 0], [math.sin(angle), math.cos(angle), 0]],
    }[name]  # type: ignore[return-value]


@pytest.mark.parametrize("name", a.EVENT_OPERATIONS[:-1])
@pytest.mark.parametrize("size", [(12, 17), (9, 8)], ids=lambda size: "x".join(map(str, size)))
def test_moving(name: str, size: tuple[int, int]) -> None:
    strength = np.array([-15, -7, -3, 1, 6, 12, 15]) / 15
    images, count = counts(len(strength), 6, *size), len(strength)
    moved = e.apply_operations(images, np.full(count, a.EVENT_OPERATIONS.index(name)), strength, keys(count))
    for before, after, how in zip(images, moved, strength, strict=True):
        assert torch.equal(after, nearest(before, inverse(name, how)))
    if name == "shift_x":  # to the right, and whole pixels
        assert torch.equal(moved[-1, :, :, 5:], images[-1, :, :, :-5])
        assert torch.equal(moved[3], images[3])


@pytest.mark.parametrize("side", [8, 34, 64, 128])
def test_no_strength_is_identity(side: int) -> None:
    images = counts(5, 4, side, side)
    assert torch.equal(e.apply_operations(images, np.arange(5), np.zeros(5), keys(5)), images)


def test_cut_out() -> None:
    """One square of 0.1 % to 11 % of the area, anywhere, that is emptied in all frames."""
    operation, frames = np.full(600, a.EVENT_OPERATIONS.index("cut_out")), torch.ones(600, 4, 32, 40)
    emptied = e.apply_operations(frames, operation, np.ones(600), keys(600)) == 0
    assert torch.equal(emptied, emptied[:, :1].expand_as(emptied))
    rows, columns = emptied[:, 0].any(2), emptied[:, 0].any(1)
    sides = rows.sum(1)
    assert torch.equal(sides, columns.sum(1))
    assert torch.equal(emptied[:, 0].sum((1, 2)), sides**2)
    assert (int(sides.min()), int(sides.max())) == (1, round(math.sqrt(0.11 * 32 * 40)))
    assert abs(float((sides**2).float().mean()) / (32 * 40) - 0.0555) < 0.003
    assert rows.any(0).all()
    assert columns.any(0).all()


def test_operations_and_strengths_are_drawn_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[np.ndarray, np.ndarray]] = []
    monkeypatch.setattr(e, "apply_operations", lambda x, *drawn: seen.append(drawn[:2]) or x)
    frames = torch.zeros(1, 12000, 2, 1, 1)
    e.augment_frames(frames, ALL, keys(12000))
    e.augment_frames(frames, Augmentation(event_operations=["rotate", "identity"]), keys(12000))
    (operation, strength), (of_two, _) = seen
    assert (abs(np.bincount(operation, minlength=6) / 12000 - 1 / 6) < 0.01).all()
    steps, number = np.unique(np.rint(strength * 15), return_counts=True)
    assert steps.tolist() == list(range(-15, 16))
    assert (abs(number / 12000 - 1 / 31) < 0.006).all()
    assert abs(np.corrcoef(operation, strength)[0, 1]) < 0.03
    shares = np.bincount(of_two, minlength=6) / 12000
    assert shares[[0, 4]] == pytest.approx(0.5, abs=0.02)
    assert shares[[0, 4]].sum() == 1
    shifts = np.unique(e.event_matrices(np.full(31, 2), np.arange(-15, 16) / 15, 8, 8)[:, 0, 2], return_counts=True)
    assert dict(zip(*shifts, strict=True)) == {-5: 1, 5: 1, 0: 5, **dict.fromkeys((-4, -3, -2, -1, 1, 2, 3, 4), 3)}


def test_all_frames_of_a_recording_alike() -> None:
    frames = counts(1, 24, 2, 16, 16).expand(3, -1, -1, -1, -1)
    result = e.augment_frames(frames, ALL, keys(24))
    assert torch.equal(result, result[:1].expand_as(result))
    assert (result[0] != frames[0]).flatten(1).any(1).float().mean() > 0.5
    assert torch.equal(result, result.round())
    signs = counts(2, 24, 1, 16, 16).expand(-1, -1, 2, -1, -1)
    result = e.augment_frames(signs, ALL, keys(24))
    assert torch.equal(result[:, :, 0], result[:, :, 1])


def test_a_recording_does_not_depend_on_its_batch() -> None:
    frames = counts(3, 24, 2, 16, 12)
    settings = Augmentation(crop="pad", crop_padding=2, flip=0.5, event_operations=a.EVENT_OPERATIONS)
    together = e.augment_frames(frames, settings, keys(24))
    assert together.is_contiguous()
    assert torch.equal(together, e.augment_frames(frames, settings, keys(24)))
    for chosen in (np.array([7]), np.array([23, 4, 11, 0, 5])):
        assert torch.equal(together[:, chosen], e.augment_frames(frames[:, chosen], settings, alone(chosen)))
    for other in (keys(24, seed=1), keys(24, epoch=1), Keys(0, 0, np.arange(24), np.ones(24, int))):
        assert not torch.equal(together, e.augment_frames(frames, settings, other))


def test_nothing_by_default_and_flip_first() -> None:
    frames = counts(2, 400, 2, 4, 6)
    assert torch.equal(e.augment_frames(frames, Augmentation(), keys(400)), frames)
    flipped = e.augment_frames(frames, Augmentation(flip=0.5), keys(400))
    mirrored = (flipped == frames.flip(-1)).all(0).flatten(1).all(1)
    assert torch.where(mirrored[:, None, None, None], frames.flip(-1), frames).equal(flipped)
    assert 0.4 < mirrored.float().mean() < 0.6
    moved = e.augment_frames(frames, ALL, keys(400))
    assert torch.equal(moved, e.augment_frames(flipped, Augmentation(event_operations=a.EVENT_OPERATIONS), keys(400)))


@pytest.mark.parametrize("how", [a.Mix(0.3), a.Mix(1 - 15 / 64, (2, 5, 1, 6)), a.Mix(1.0)], ids=str)
def test_mixed_frames_are_mixed_images(how: a.Mix) -> None:
    frames, targets = counts(3, 6, 2, 8, 8), torch.eye(6)
    mixed, mixed_targets = a.mix(frames, targets, how)
    for before, after in zip(frames, mixed, strict=True):
        image, image_targets = a.mix(before, targets, how)
        assert torch.equal(after, image)
        assert torch.equal(mixed_targets, image_targets)


class Frames(DataSource):
    """Frames in memory, as a source of recordings gives them."""

    unused_settings = e.UNUSED
    needs_root, num_classes, image_size, in_channels, train_images, test_images = False, 3, 8, 2, 16, 5

    def load(self, split: str, steps: Sequence[Keys], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        for step in steps:
            yield counts(4, 16, 2, 8, 8)[:, step.samples], torch.from_numpy(step.samples % 3)

    def augmented(self, levels: Tensor, keys: Keys) -> Tensor:
        return e.augment_frames(levels, self.augment, keys)

    def normalised(self, levels: Tensor) -> Tensor:
        return levels


def test_batches_of_frames() -> None:
    """Mixed in pairs along the second axis; a share of a batch is the part of the whole; small ones come together."""
    settings = Augmentation(
        flip=0.5, event_operations=a.EVENT_OPERATIONS, mixup=0.5, label_smoothing=0.1, mix_probability=0.9
    )
    source, arguments = Frames(None, settings), {"epoch": 1, "seed": 3}
    whole = list(source.train_batches(**arguments, batch_size=8))
    assert [tuple(b.images.shape) for b in whole] == [(4, 8, 2, 8, 8)] * 2
    parts = [list(source.train_batches(**arguments, batch_size=4, rank=rank, world_size=2)) for rank in (0, 1)]
    assert_equal(joined(parts), whole)
    assert_equal(list(source.train_batches(**arguments, batch_size=8, start_step=1)), whole[1:])
    source.images_at_once = 16
    assert_equal(list(source.train_batches(**arguments, batch_size=8)), whole)
    (first, last) = source.test_batches(batch_size=3)
    assert (first.count, last.count) == (3, 2)
    assert torch.equal(torch.cat((first.images, last.images), 1)[:, :5], counts(4, 16, 2, 8, 8)[:, :5])
    assert not last.images[:, 2].any()


def test_settings_are_for_images_or_for_recordings() -> None:
    with pytest.raises(LrfdynError, match=r"augmentation.event_operations: is not for images of digits"):
        create_data("digits", None, ALL)
    assert set(e.USED) | set(e.UNUSED) == set(vars(Augmentation()))
    assert {"erase", "rand_augment_layers", "photometric"} <= set(e.UNUSED)
    for value, problem in ((("identity", "turn"), "event_operations: unknown name 'turn'"), ((), "at least one name")):
        with pytest.raises(LrfdynError, match=problem):
            Augmentation(event_operations=value)
