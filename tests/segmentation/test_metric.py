"""mIoU against an independent computation, and inference on images of any size."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from lrfdyn.errors import LrfdynError
from lrfdyn.segmentation import inference
from lrfdyn.segmentation.drawing import class_names, palette
from lrfdyn.segmentation.inference import pad_to_stride, segment, window_starts
from lrfdyn.segmentation.metric import build_confusion, class_rows, scores
from lrfdyn.segmentation.pairs import IGNORED
from tests.segmentation.make import CLASSES, tiny_model


def by_sets(predictions: list[np.ndarray], truths: list[np.ndarray], classes: int) -> dict[str, float]:
    """From the sets of pixels of every class, without a confusion matrix."""
    predicted = np.concatenate([p.ravel() for p in predictions])
    true = np.concatenate([t.ravel() for t in truths])
    predicted, true = predicted[true != IGNORED], true[true != IGNORED]
    ious, accuracies = [], []
    for c in range(classes):
        a, b = set(np.flatnonzero(predicted == c)), set(np.flatnonzero(true == c))
        if a | b:
            ious.append(len(a & b) / len(a | b))
        if b:
            accuracies.append(len(a & b) / len(b))
    return {
        "miou": 100 * np.mean(ious),
        "mean_accuracy": 100 * np.mean(accuracies),
        "pixel_accuracy": 100 * np.mean(predicted == true),
    }


@pytest.mark.parametrize("seed", range(4))
def test_scores_equal_an_independent_computation(seed):
    draw = np.random.default_rng(seed)
    classes = 7
    confusion = build_confusion(classes)
    predictions, truths = [], []
    for _ in range(5):
        shape = tuple(draw.integers(5, 30, 2))
        truth = draw.integers(0, classes - 2, shape)  # two classes never occur, one of them is predicted
        guess = np.where(draw.random(shape) < 0.6, truth, draw.integers(0, classes - 1, shape))
        truth = np.where(draw.random(shape) < 0.2, IGNORED, truth)
        confusion.update(torch.from_numpy(guess), torch.from_numpy(truth))
        predictions.append(guess)
        truths.append(truth)
    matrix = confusion.compute().double()
    expected = by_sets(predictions, truths, classes)
    assert scores(matrix) == pytest.approx(expected, rel=1e-12)
    rows = class_rows(matrix, [f"c{i}" for i in range(classes)])
    assert rows[-1] == {"class": "c6", "iou": None, "accuracy": None, "pixels": 0}
    assert rows[-2]["iou"] == 0
    assert rows[-2]["accuracy"] is None
    assert sum(row["pixels"] for row in rows) == sum((t != IGNORED).sum() for t in truths)


def test_names_and_colours():
    names, colours = class_names(), palette()
    assert len(names) == len(set(names)) == 150
    assert names[:3] == ["wall", "building", "sky"]
    assert colours.shape == (256, 3)
    assert tuple(colours[0]) == (120, 120, 120)
    assert tuple(colours[149]) == (92, 0, 255)
    assert tuple(colours[IGNORED]) == (0, 0, 0)
    assert len({tuple(c) for c in palette(20)[:20]}) == 20


def test_padding():
    padded = pad_to_stride(torch.ones(1, 3, 33, 48), 16)
    assert padded.shape == (1, 3, 48, 48)
    assert padded[..., :33, :].eq(1).all()
    assert padded[..., 33:, :].eq(0).all()


@pytest.mark.parametrize(("length", "window"), [(100, 32), (32, 32), (20, 32), (33, 32), (64, 32)])
def test_windows_cover_everything(length, window):
    starts = window_starts(length, window)
    seen = {i for start in starts for i in range(start, min(length, start + window))}
    assert seen == set(range(length))
    assert all(0 <= start <= max(0, length - window) for start in starts)
    assert all(b - a <= window * 2 / 3 + 1 for a, b in pairwise(starts))


@torch.inference_mode()
def test_segment_is_the_model_where_nothing_is_to_do():
    model = tiny_model().eval()
    images = torch.randn(2, 3, 32, 48)
    assert torch.equal(segment(model, images), model(images))
    assert segment(model, images, (50, 70)).shape == (2, CLASSES, 50, 70)
    assert torch.allclose(segment(model, images, window=64), model(images), atol=1e-6)
    windows = segment(model, images[..., :32], window=32)
    assert torch.allclose(windows, model(images[..., :32]), atol=1e-6)


@torch.inference_mode()
def test_mean_of_windows():
    model = tiny_model().eval()
    images = torch.randn(1, 3, 32, 48)  # windows at 0, 16 (the last ends with the picture)
    assert window_starts(48, 32) == [0, 16]
    left, right = model(images[..., :32]), model(images[..., 16:])
    scores = segment(model, images, window=32)
    assert torch.allclose(scores[..., :16], left[..., :16], atol=1e-6)
    assert torch.allclose(scores[..., 16:32], (left[..., 16:] + right[..., :16]) / 2, atol=1e-6)
    assert torch.allclose(scores[..., 32:], right[..., 16:], atol=1e-6)


@torch.inference_mode()
def test_flip_makes_it_symmetric():
    model = tiny_model().eval()
    images = torch.randn(1, 3, 35, 50)
    scores = segment(model, images, flip=True)
    assert torch.allclose(scores.flip(-1), segment(model, images.flip(-1), flip=True), atol=1e-5)
    assert torch.allclose(scores.exp().sum(1), torch.ones(1, 35, 50), atol=1e-5)


@pytest.mark.parametrize("most", [1, 700, 10**6])
def test_best_class_in_parts_is_that_of_the_whole(monkeypatch, most):
    monkeypatch.setattr(inference, "MOST_SCORES", most)
    scores = torch.randn(2, 11, 6, 7)
    whole = torch.nn.functional.interpolate(scores, size=(13, 20), mode="bilinear").argmax(1)
    assert torch.equal(inference.best_class(scores, (13, 20)), whole)
    assert torch.equal(inference.best_class(scores, (6, 7)), scores.argmax(1))


def test_too_small_a_window():
    with pytest.raises(LrfdynError, match="window: expected at least the stride 16, got 8"):
        segment(tiny_model(), torch.randn(1, 3, 32, 32), window=8)
