"""Whole models on the kernels, against the same models on the plain operations, in value, gradients and statistics."""

from __future__ import annotations

import pytest
import torch

from lrfdyn import create_model
from lrfdyn.ops import dispatch
from lrfdyn.ops.dispatch import plain_operations
from tests.ops.kernels import DEVICE

SMALL = {"dim": 32, "depth": 1, "heads": 2, "image_size": 16, "num_classes": 5, "time_steps": 3}
KINDS = {
    "ssa": {},
    "causal_ssa": {},
    "lrf_ssa": {"dilations": (1, 3)},
    "lrf_dyn": {"dilations": (1, 3)},
    "lrf_dyn-qkv": {"dilations": (1,), "token": "qkv"},
    "vsa": {},
}


@pytest.fixture
def kernels_everywhere(monkeypatch):
    """Kernels run in Triton's interpreter where there is no GPU."""
    monkeypatch.setattr(dispatch, "_on_kernel_device", lambda tensor: True)


def run(model, images):
    model.zero_grad()
    logits = model(images)
    logits.square().sum().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    return logits.detach(), grads, {name: b.clone() for name, b in model.named_buffers()}


@pytest.mark.parametrize("kind", KINDS)
def test_fused_model_equals_the_plain_one(kind, kernels_everywhere):
    torch.manual_seed(0)
    options = {"attention": kind.partition("-")[0], "attention_options": KINDS[kind]}
    model = create_model("spikformer_4_384", **SMALL, **options).to(DEVICE, memory_format=torch.channels_last)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    images = torch.randn(2, 3, 16, 16, device=DEVICE)
    with plain_operations():
        want = run(model, images)
    model.load_state_dict(before)
    got = run(model, images)
    torch.testing.assert_close(got[0], want[0], rtol=1e-4, atol=1e-5)
    for name, grad in want[1].items():
        # Of a bias in front of a norm the plain gradient is rounding noise around zero.
        scale = max(grad.abs().max().item(), 1e-3)
        torch.testing.assert_close(got[1][name] / scale, grad / scale, rtol=0, atol=2e-4, msg=name)
    for name, buffer in want[2].items():
        torch.testing.assert_close(got[2][name], buffer, rtol=1e-5, atol=1e-6, msg=name)


def test_gradients_of_intermediate_results_are_not_overwritten(kernels_everywhere):
    """Kernels reuse the memory of gradients that nobody else holds; a caller who asked for one holds it."""
    torch.manual_seed(0)
    model = create_model("spikformer_4_384", **SMALL, attention="lrf_dyn").to(DEVICE)
    images = torch.randn(2, 3, 16, 16, device=DEVICE)
    kept = {}
    for name, layer in (("fc1", model.blocks[0].mlp.fc2), ("block", model.blocks[0].mlp)):
        layer.register_forward_pre_hook(lambda _, inputs, name=name: kept.update({name: inputs[0]}))
    loss = model(images).square().sum()
    weight = model.stem.stages[0].conv.weight
    asked = torch.autograd.grad(loss, [kept["fc1"], kept["block"], weight], retain_graph=True)
    for gradient, tensor in zip(asked, (kept["fc1"], kept["block"], weight), strict=True):
        alone = torch.autograd.grad(loss, tensor, retain_graph=True)[0]
        assert torch.equal(gradient, alone)
    seen = []
    kept["fc1"].register_hook(lambda gradient: seen.append(gradient))
    loss.backward()
    assert torch.equal(seen[0], asked[0])
