"""Attention swapped in models that SpikingJelly built."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lrfdyn
from lrfdyn.attention import Attention
from lrfdyn.convert.spikingjelly import FlatAttention, dynamics_of, is_spikingjelly
from tests.conftest import random

REASON = "SpikingJelly 2 with its models is not importable"
spikformer = pytest.importorskip("spikingjelly.activation_based.model.spikformer", reason=REASON, exc_type=ImportError)
qkformer = pytest.importorskip("spikingjelly.activation_based.model.qkformer", reason=REASON, exc_type=ImportError)
from spikingjelly.activation_based import functional, neuron, surrogate  # noqa: E402
from spikingjelly.activation_based.layer import SpikingSelfAttention  # noqa: E402

TOLERANCE = {"rtol": 0, "atol": 1e-10}


def busy(model: nn.Module) -> nn.Module:
    """In float64, with batch norms that keep the neurons firing."""
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            nn.init.normal_(module.weight, 2.5, 0.2)
            nn.init.normal_(module.bias, 0, 0.5)
            nn.init.normal_(module.running_mean, 0, 0.05)
            nn.init.uniform_(module.running_var, 0.5, 1)
        elif isinstance(module, nn.Conv1d | nn.Conv2d):
            nn.init.kaiming_normal_(module.weight)
    return model.double()


class Block(nn.Module):
    """What SpikingJelly's blocks do around their attention."""

    def __init__(self, attn: nn.Module) -> None:
        super().__init__()
        self.attn = attn

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(x.flatten(3)).reshape(x.shape)


def make_spikformer() -> nn.Module:
    size = {"img_size_h": 32, "img_size_w": 16, "patch_size": 4}
    return busy(spikformer.Spikformer(T=2, num_classes=5, embed_dims=32, num_heads=4, depths=2, **size))


def make_qkformer() -> nn.Module:
    return busy(qkformer.QKFormer(T=2, num_classes=5, embed_dims=32, num_heads=(2, 2, 4), depths=(1, 1, 2)))


MODELS = {"spikformer": (make_spikformer, (32, 16)), "qkformer": (make_qkformer, (64, 48))}


def step(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Output and input gradient."""
    x = x.clone().requires_grad_()
    y = model(x)
    (gradient,) = torch.autograd.grad((y * random(*y.shape, seed=1)).sum(), x, retain_graph=True)
    (y * random(*y.shape, seed=1)).sum().backward()
    functional.reset_net(model)
    return y.detach(), gradient


def spikes(*shape: int) -> Tensor:
    return (random(*shape) > 0).double()


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize(
    ("node", "options"),
    [
        (None, {}),
        ("LIFNode", {"decay_input": False, "v_threshold": 1.5, "detach_reset": True}),
        ("LIFNode", {"tau": 1.5, "v_threshold": 0.7, "surrogate_function": surrogate.ATan(3.0)}),
        ("IFNode", {"v_threshold": 1.5, "detach_reset": True}),
        ("IFNode", {"surrogate_function": surrogate.Rect(0.5)}),
    ],
    ids=["default", "undecayed", "tau-atan", "if", "if-rect"],
)
def test_ssa_is_their_layer(node, options, mode):
    """Value, input gradient, gradients of all weights, and running statistics."""
    kind = {} if node is None else {"spiking_neuron": getattr(neuron, node)}
    theirs = Block(busy(SpikingSelfAttention(32, 4, **kind, **options))).train(mode == "train")
    ours = copy.deepcopy(theirs)
    report = lrfdyn.swap_attention(ours, "ssa", grid=(5, 7))
    assert report.layers == ("attn.attention",)
    assert not report.new
    assert not any(is_spikingjelly(module) for module in ours.modules())
    for repeat in range(2):  # ours keeps no state that a reset would have to clear
        x = spikes(3, 2, 32, 5, 7) + repeat
        (y, gradient), (expected, expected_gradient) = step(ours, x), step(theirs, x)
        assert (expected - x).mean() > 0.01, "silent"
        torch.testing.assert_close(y, expected, **TOLERANCE)
        torch.testing.assert_close(gradient, expected_gradient, **TOLERANCE)
    a, b = ours.attn.attention, theirs.attn
    for part, index in (("conv", 0), ("bn", 1)):
        for name, _ in b.qkv_conv_bn[index].named_parameters():
            mine = torch.cat([getattr(getattr(getattr(a, x), part), name).grad for x in "qkv"])
            torch.testing.assert_close(mine.squeeze(), getattr(b.qkv_conv_bn[index], name).grad.squeeze(), **TOLERANCE)
            mine = getattr(getattr(a.proj, part), name).grad.squeeze()
            torch.testing.assert_close(mine, getattr(b.proj_conv_bn[index], name).grad.squeeze(), **TOLERANCE)
    for name in ("running_mean", "running_var"):
        mine = torch.cat([getattr(getattr(a, x).bn, name) for x in "qkv"])
        torch.testing.assert_close(mine, getattr(b.qkv_conv_bn[1], name), **TOLERANCE)
    assert a.v.bn.num_batches_tracked == b.qkv_conv_bn[1].num_batches_tracked


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("name", MODELS)
def test_ssa_in_their_models(name, mode):
    make, size = MODELS[name]
    theirs = make().train(mode == "train")
    ours = copy.deepcopy(theirs)
    functional.reset_net(ours)  # they remember which modules to reset
    assert len(lrfdyn.swap_attention(ours, "ssa").layers) == 2
    for got, expected in zip(step(ours, random(2, 3, *size)), step(theirs, random(2, 3, *size)), strict=True):
        torch.testing.assert_close(got, expected, **TOLERANCE)


@pytest.mark.parametrize(
    ("kind", "options"),
    [("lrf_ssa", {}), ("lrf_dyn", {}), ("lrf_dyn", {"token": "qkv"}), ("causal_ssa", {}), ("vsa", {}), ("sdsa", {})],
)
@pytest.mark.parametrize("name", MODELS)
def test_swapped_models_train(name, kind, options):
    make, size = MODELS[name]
    model = make().float().train()
    lrfdyn.swap_attention(model, kind, **options)
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    assert {type(layer) for layer in layers} == {lrfdyn.ATTENTIONS[kind]}
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    x, target = random(4, 3, *size, dtype=torch.float32), torch.arange(4)
    losses = []
    for _ in range(10):
        y = model(x)
        loss = nn.functional.cross_entropy(y.mean(0) if y.dim() == 3 else y, target)
        optimizer.zero_grad()
        loss.backward()
        functional.reset_net(model)
        losses.append(loss.item())
        for parameter_name, parameter in model.named_parameters():
            assert parameter.grad is not None, parameter_name
            assert parameter.grad.isfinite().all(), parameter_name
        optimizer.step()
    assert all(layer.v.conv.weight.grad.any() for layer in layers), "nothing arrives at the attention"
    assert losses[-1] < 0.9 * losses[0], losses


def test_rows_and_columns_come_from_the_block_around():
    model = make_qkformer().eval()
    lrfdyn.swap_attention(model, "lrf_dyn")
    layers = [module for module in model.modules() if isinstance(module, FlatAttention)]
    assert {layer.attention.grid for layer in layers} == {(14, 14)}  # the model does not state one
    copied = copy.deepcopy(model)
    for size in ((128, 32), (64, 64)):  # 16 tokens each
        copied(random(1, 3, *size))
        functional.reset_net(copied)
        grids = {m.seen_grid for m in copied.modules() if isinstance(m, FlatAttention)}
        assert grids == {(size[0] // 16, size[1] // 16)}
    assert {layer.seen_grid for layer in layers} == {None}

    model = make_spikformer()
    lrfdyn.swap_attention(model, "lrf_dyn")
    assert model.blocks[0].attn.attention.grid == (8, 4)
    other = make_spikformer()
    lrfdyn.swap_attention(other, "lrf_dyn", grid=(4, 8))
    assert other.blocks[0].attn.attention.grid == (4, 8)


def test_tokens_that_fit_no_grid_are_refused():
    attention = SpikingSelfAttention(16, 4)
    model = nn.Sequential(attention)  # nothing around it knows the grid
    lrfdyn.swap_attention(model, "lrf_ssa", grid=(2, 8))
    assert model(torch.zeros(2, 1, 16, 16)).shape == (2, 1, 16, 16)
    with pytest.raises(lrfdyn.LrfdynError, match=r"grid \(2, 8\), got 12 tokens; pass `grid`"):
        model(torch.zeros(2, 1, 16, 12))
    with pytest.raises(lrfdyn.LrfdynError, match=r"expected \[T, B, C, N\]"):
        model(torch.zeros(2, 1, 16, 2, 8))


def test_our_neurons_are_stateless_and_theirs_are_reset():
    model = make_spikformer().eval()
    functional.reset_net(model)
    lrfdyn.swap_attention(model, "lrf_dyn")
    x = random(2, 3, 32, 16)
    with torch.no_grad():
        first = model(x)
        carried = model(x)  # their stem still holds its membranes
        functional.reset_net(model)
        again = model(x)
    assert torch.equal(first, again)
    assert not torch.equal(first, carried)
    inside = [m for block in model.blocks for m in block.attn.modules()]
    assert not any(hasattr(module, "reset") or hasattr(module, "v_seq") for module in inside)


def test_swapped_twice_copied_and_pickled():
    model = make_spikformer().eval()
    lrfdyn.swap_attention(model, "lrf_dyn")
    report = lrfdyn.swap_attention(model, "lrf_ssa")
    assert report.layers == ("blocks.0.attn.attention", "blocks.1.attn.attention")
    assert all(len(block._forward_pre_hooks) == 1 for block in model.blocks)
    x = random(2, 3, 32, 16)
    with torch.no_grad():
        expected = model(x)
        functional.reset_net(model)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(other(x), expected)


def test_mode_dtype_and_frozen_weights_stay():
    model = make_spikformer().eval().to(torch.bfloat16)
    model.blocks[0].attn.qkv_conv_bn[0].weight.requires_grad_(False)
    model.blocks[1].attn.proj_conv_bn[1].train().eps = 0.5
    lrfdyn.swap_attention(model, "ssa")
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {f"blocks.0.attn.attention.{x}.conv.weight" for x in "qkv"}
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    norms = {name: m for name, m in model.named_modules() if isinstance(m, nn.BatchNorm2d) and ".attn." in name}
    assert [name for name, m in norms.items() if m.training] == ["blocks.1.attn.attention.proj.bn"]
    assert [name for name, m in norms.items() if m.eps == 0.5] == ["blocks.1.attn.attention.proj.bn"]


def attention(**options: Any) -> nn.Module:
    return SpikingSelfAttention(16, 4, **options)


def without_statistics() -> nn.Module:
    layer = attention()
    layer.proj_conv_bn[1] = nn.BatchNorm1d(16, track_running_stats=False)
    return layer


def of_another_version() -> nn.Module:
    layer = attention()
    del layer.qkv_conv_bn
    return layer


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: attention(v_reset=None), "v_reset=0.0, got None"),
        (lambda: attention(v_reset=0.5), "v_reset=0.0, got 0.5"),
        (lambda: attention(store_v_seq=True), "store_v_seq=False, got True"),
        (lambda: attention(surrogate_function=surrogate.Erf()), "surrogate Sigmoid, ATan, Rect, got Erf"),
        (lambda: attention(surrogate_function=surrogate.Sigmoid(spiking=False)), "expected a spiking surrogate"),
        (lambda: attention(spiking_neuron=neuron.ParametricLIFNode), "LIFNode or IFNode, got ParametricLIFNode"),
        (without_statistics, "batch norm with weights and running statistics"),
        (of_another_version, r"SpikingJelly 2.0's SpikingSelfAttention, which has \['qkv_conv_bn'\]"),
    ],
)
def test_what_we_have_no_name_for_is_refused(make, message):
    model = nn.Sequential(attention(), make())
    modules = list(model.modules())
    with pytest.raises(lrfdyn.LrfdynError, match=message):
        lrfdyn.swap_attention(model, "lrf_dyn")
    assert list(model.modules()) == modules


def test_a_layer_of_its_own_class_is_not_taken_for_theirs():
    class Other(SpikingSelfAttention):
        pass

    with pytest.raises(lrfdyn.LrfdynError, match="found none"):
        lrfdyn.swap_attention(nn.Sequential(Other(16, 4)), "lrf_dyn")
    with pytest.raises(lrfdyn.LrfdynError, match="pass the model around it"):
        lrfdyn.swap_attention(SpikingSelfAttention(16, 4), "lrf_dyn")


def test_default_neurons_are_the_hosts_own():
    assert dynamics_of(neuron.LIFNode(detach_reset=True)) == lrfdyn.nn.neurons.LIF().dynamics
    plain = neuron.IFNode(detach_reset=True, surrogate_function=surrogate.ATan(2.0))
    assert dynamics_of(plain) == lrfdyn.nn.neurons.IF().dynamics
