"""The training step where nothing can be captured, and what it says about it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lrfdyn.training.step import TrainStep, capturable_adamw


def make(graph: bool = True, device: str = "cpu") -> tuple[torch.nn.Module, TrainStep]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)).to(device)
    return model, TrainStep(model, capturable_adamw(model, 1e-2), F.cross_entropy, graph=graph)


def test_without_a_gpu_the_step_is_eager_and_says_why():
    _, step = make()
    losses = [step(torch.eye(6), torch.tensor([0, 1, 2, 0, 1, 2])).item() for _ in range(20)]
    assert losses[-1] < losses[0]
    assert not step.captured
    assert step.why_not == "not on a GPU"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_captured_step_equals_the_eager_one_and_other_shapes_fall_back():
    x, y = torch.eye(6, device="cuda"), torch.tensor([0, 1, 2, 0, 1, 2], device="cuda")
    models = []
    for graph in (False, True):
        model, step = make(graph, "cuda")
        for _ in range(5):
            step(x, y)
        assert step.captured == graph
        step(x[:3], y[:3])
        assert not step.captured
        models.append(model)
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a, b)
