"""Inference that stops when it is sure: what the steps before give, and no step more than that."""

from __future__ import annotations

import pytest
import torch

from lrfdyn.analysis import exit_curve
from lrfdyn.deploy import EarlyExit, TimeStream
from lrfdyn.errors import LrfdynError
from tests.models.host_checks import lively, small_model

HOSTS = ["spikformer_cifar", "qkformer_cifar", "sdt_v1", "sdt_v2", "sew_resnet", "ms_resnet"]


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("film", [False, True])
def test_images_leave_with_the_logits_so_far(host, film):
    torch.manual_seed(0)
    size = 64 if "resnet" in host else 32
    frames = torch.randn(3, 6, 3, size, size, dtype=torch.float64)
    model = lively(small_model(host, time_steps=3).double(), frames)
    images = frames if film else frames[0]
    with torch.no_grad():
        steps = model.forward_steps(images)
    so_far = steps.cumsum(0) / torch.arange(1, 4)[:, None, None]
    confidence = so_far.softmax(-1).amax(-1)
    threshold = float(confidence[:2].median())  # some leave early, some do not
    seen = []
    layer = next(module for module in model.modules() if isinstance(module, torch.nn.Conv2d))
    early = EarlyExit(model, threshold)
    conv = next(module for module in early.stream.network.modules() if isinstance(module, type(layer)))
    conv.register_forward_hook(lambda _conv, inputs, _out: seen.append(len(inputs[0])))
    logits, taken = early(images)
    (row,) = exit_curve(steps, torch.zeros(6, dtype=torch.long), (threshold,))
    assert [int((taken == step).sum()) for step in (1, 2, 3)] == row["exits"]
    assert len(set(taken.tolist())) > 1
    torch.testing.assert_close(logits, so_far[taken - 1, torch.arange(6)], rtol=0, atol=1e-12)
    assert sum(seen) == int(taken.sum()), "no step more than it takes"
    again, _ = early(images)
    assert torch.equal(again, logits)


def test_thresholds_at_the_ends():
    torch.manual_seed(0)
    images = torch.randn(2, 3, 16, 16)
    model = lively(small_model("spikformer_cifar", time_steps=3), images)
    assert EarlyExit(model, 0.0)(images)[1].tolist() == [1, 1]
    logits, steps = EarlyExit(model, 1.0)(images)
    assert steps.tolist() == [3, 3]
    with torch.no_grad():
        torch.testing.assert_close(logits, model(images), rtol=0, atol=1e-5)


def test_bad_arguments():
    model = small_model("spikformer_cifar").eval()
    with pytest.raises(LrfdynError, match="threshold: expected a number from 0 to 1"):
        EarlyExit(model, 1.5)
    with pytest.raises(LrfdynError, match="model: with legacy_neuron_axis=True"):
        EarlyExit(small_model("qkformer_cifar", legacy_neuron_axis=True).eval(), 0.5)


def test_a_stream_keeps_some_of_its_batch():
    torch.manual_seed(0)
    frames = torch.randn(3, 4, 3, 32, 32, dtype=torch.float64)
    model = lively(small_model("sdt_v1").double(), frames)
    stream, chosen = TimeStream(model), torch.tensor([True, False, False, True])
    with pytest.raises(LrfdynError, match="chosen: the stream has seen no frame yet"):
        stream.keep(chosen)
    stream.step(frames[0])
    whole = stream.nbytes
    for wrong in (chosen[:3], chosen.long(), [True] * 4):
        with pytest.raises(LrfdynError, match=r"chosen: expected a mask \[4\]"):
            stream.keep(wrong)
    stream.keep(chosen)
    assert stream.nbytes == whole // 2
    for frame in frames[1:]:
        logits = stream.step(frame[chosen])
    with torch.no_grad():
        torch.testing.assert_close(logits, model(frames[:, chosen]), rtol=0, atol=1e-12)
