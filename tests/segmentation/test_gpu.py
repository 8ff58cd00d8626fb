"""On a GPU: the same crops, and a captured step that trains as the plain one does."""

from __future__ import annotations

import pytest
import torch

from lrfdyn.data import Augmentation, create_data
from lrfdyn.files import read_json_lines
from lrfdyn.training.run import run_training
from tests.segmentation.make import CLASSES, tiny_config, tiny_model, write_shapes

pytestmark = pytest.mark.gpu(needed=True)


def test_crops_are_those_of_the_cpu(tmp_path):
    write_shapes(tmp_path)
    augment = Augmentation(flip=0.5, scale=(0.5, 2.0), photometric=True)
    source = create_data("ade20k", tmp_path, augment, image_size=32, num_classes=CLASSES, resident=True)
    (a, b) = (next(source.train_batches(epoch=0, seed=0, batch_size=8, device=d)) for d in ("cpu", "cuda"))
    assert torch.equal(a.labels, b.labels.cpu())
    assert torch.allclose(a.images, b.images.cpu(), atol=1e-3)


def test_enlarged_logits_are_those_of_a_test():
    model = tiny_model().cuda().eval()
    images = torch.randn(2, 3, 48, 32, device="cuda")
    with torch.no_grad():
        expected = model(images)
    trained = model(images)
    assert trained.requires_grad
    assert trained.is_contiguous()
    assert torch.allclose(trained, expected, atol=1e-3)


@pytest.mark.parametrize("kind", ["ssa", "lrf_ssa", "lrf_dyn"])
def test_captured_step_trains_as_the_plain_one(tmp_path, kind):
    write_shapes(tmp_path / "data")
    losses = []
    for graph in ("auto", "off"):
        config = tiny_config(
            tmp_path / "data",
            model={"attention": kind},
            run={"device": "cuda", "cuda_graph": graph, "log_steps": 1, "batch_size": 8},
        )
        summary = run_training(config, tmp_path / graph, recipe="x")
        assert 0 <= summary["miou"] <= 100
        losses.append([r["loss"] for r in read_json_lines(tmp_path / graph / "log.jsonl") if r["kind"] == "step"])
    # A rounding error at a threshold is a whole spike, so later steps drift apart.
    assert losses[0][:2] == pytest.approx(losses[1][:2], rel=1e-2)
    assert losses[0][-1] < losses[0][0]
