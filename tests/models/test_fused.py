"""Whole models on the kernels, against the same models on the plain operations, in value, gradients and statistics."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.utils.prune

from lrfdyn import create_attention, create_model
from lrfdyn.attention import AttentionHost
from lrfdyn.attention.base import lif_conv
from lrfdyn.errors import LrfdynError
from lrfdyn.nn.layers import SpikingConv
from lrfdyn.nn.neurons import LIF
from lrfdyn.ops import dispatch
from lrfdyn.ops.bits import step_bits_of
from lrfdyn.ops.dispatch import plain_operations
from lrfdyn.ops.lif import Dynamics, lif
from tests.ops.kernels import DEVICE

pytestmark = pytest.mark.gpu
SMALL = {"dim": 32, "depth": 1, "heads": 2, "image_size": 16, "num_classes": 5, "time_steps": 3}
KINDS = {
    "ssa": {},
    "causal_ssa": {},
    "lrf_ssa": {"dilations": (1, 3)},
    "lrf_dyn": {"dilations": (1, 3)},
    "lrf_dyn-qkv": {"dilations": (1,), "token": "qkv"},
    "lrf_dyn-both": {"dilations": (1,), "dendrites": 2, "directions": 2},
    "vsa": {},
}
# Each in one layer, since a model takes long in the interpreter.
READINGS = {
    "ssa-frozen": {"train_qk": False},
    "lrf_ssa-norm": {"dilations": (1, 3), "norm": True, "scale_lrf": True},
    "lrf_dyn-same": {"dilations": (1,), "coupling": "same"},
}


@pytest.fixture
def kernels_everywhere(monkeypatch):
    """Kernels run in Triton's interpreter where there is no GPU."""
    monkeypatch.setattr(dispatch, "_on_kernel_device", lambda tensor: True)


def run(model, images):
    model.zero_grad()
    logits = model(images)
    logits.square().sum().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    return logits.detach(), grads, {name: b.clone() for name, b in model.named_buffers()}


@pytest.mark.parametrize("kind", KINDS)
def test_fused_model_equals_the_plain_one(kind, kernels_everywhere):
    torch.manual_seed(0)
    options = {"attention": kind.partition("-")[0], "attention_options": KINDS[kind]}
    model = create_model("spikformer_4_384", **SMALL, **options).to(DEVICE, memory_format=torch.channels_last)
    compare_with_plain(model, torch.randn(2, 3, 16, 16, device=DEVICE))


@pytest.mark.parametrize("kind", READINGS)
def test_fused_layer_equals_the_plain_one(kind, kernels_everywhere):
    torch.manual_seed(0)
    host = AttentionHost(lif_conv, lif_conv)  # without biases
    layer = create_attention(kind.partition("-")[0], 16, 2, (2, 3), host, **READINGS[kind]).to(DEVICE)
    compare_with_plain(layer, (torch.rand(2, 2, 16, 2, 3, device=DEVICE) < 0.5).float())


def compare_with_plain(model, images):
    before = {name: value.clone() for name, value in model.state_dict().items()}
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
    model = create_model("spikformer_4_384", **{**SMALL, "image_size": 8}, attention="lrf_dyn").to(DEVICE)
    images = torch.randn(2, 3, 8, 8, device=DEVICE)
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
    kept["fc1"].register_hook(lambda gradient: seen.extend([gradient, gradient.detach()]))
    kept["block"].register_hook(lambda gradient: seen.append(gradient.detach()))
    loss.backward()
    for gradient, expected in zip(seen, (asked[0], asked[0], asked[1]), strict=True):
        assert torch.equal(gradient, expected)


def spiking_conv(**options):
    torch.manual_seed(0)
    return SpikingConv(8, 8, LIF(threshold=0.3), **options).to(DEVICE)


def potentials(steps=2):
    return 2 * torch.randn(steps, 2, 8, 4, 4, generator=torch.Generator().manual_seed(1)).to(DEVICE)


@pytest.mark.parametrize("attribute", ["conv", "neuron", "bn"])
def test_hooks_see_what_they_watch(attribute, kernels_everywhere):
    layer = spiking_conv()
    calls = []
    getattr(layer, attribute).register_forward_hook(lambda *_: calls.append("part"))
    SpikingConv.together([layer], potentials())
    layer(potentials())
    assert calls == ["part"] * 2
    calls.clear()
    other = spiking_conv()
    other.register_forward_hook(lambda *_: calls.append("whole"))
    SpikingConv.together([other], potentials())
    assert calls == ["whole"]


def test_a_pruned_convolution_trains_on(kernels_everywhere):
    layer = spiking_conv()
    torch.nn.utils.prune.l1_unstructured(layer.conv, "weight", 0.5)
    for _ in range(2):  # the pruned weight is computed anew by a hook before every call
        layer(potentials()).sum().backward()
    assert layer.conv.weight_orig.grad is not None


@pytest.mark.parametrize("change", [{"dilation": (2, 2)}, {"padding_mode": "reflect"}])
def test_a_replaced_convolution_is_computed_as_it_is(change, kernels_everywhere):
    layer = spiking_conv(kernel=3)
    layer.conv = torch.nn.Conv2d(8, 8, 3, padding=1, **change).to(DEVICE)
    x = potentials()
    got = layer.eval()(x)
    with plain_operations():
        assert torch.equal(got, layer(x))


def test_spikes_changed_in_place_lose_their_bits(kernels_everywhere):
    """A layer keeps the spikes that it saw, not the bits of what they were before."""
    layer = spiking_conv()
    with torch.no_grad():
        spikes = lif(potentials(), Dynamics.lif(threshold=0.1))[0]
        assert step_bits_of(spikes) is not None
        spikes[:, :, :4] = 0
    assert step_bits_of(spikes) is None
    layer(spikes).sum().backward()
    assert not layer.conv.weight.grad[:, :4].any()
    assert layer.conv.weight.grad[:, 4:].any()


def test_second_derivatives_are_refused(kernels_everywhere):
    x = potentials().requires_grad_()
    (gradient,) = torch.autograd.grad(lif(x, Dynamics.lif())[0].sum(), x)
    assert gradient.any()
    with pytest.raises(LrfdynError, match="create_graph"):
        torch.autograd.grad(lif(x, Dynamics.lif())[0].sum(), x, create_graph=True)


def test_a_shortcut_of_another_shape_is_refused(kernels_everywhere):
    with pytest.raises(LrfdynError, match="residual"):
        spiking_conv()(potentials(), residual=potentials(1))


def test_a_wider_shortcut_keeps_its_type(kernels_everywhere):
    shortcut = torch.full((2, 2, 8, 4, 4), 257.0, device=DEVICE)
    with torch.autocast(DEVICE, torch.float16):
        assert spiking_conv()(potentials(), residual=shortcut).dtype == torch.float32


def test_importing_needs_no_gradients():
    code = "import torch\nwith torch.inference_mode():\n    import lrfdyn.nn.layers"
    subprocess.run([sys.executable, "-c", code], check=True)
