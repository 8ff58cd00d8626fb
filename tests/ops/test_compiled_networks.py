"""Networks with the kernels in them under `torch.compile`, `torch.export`, checkpointing and dispatch modes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from lrfdyn import create_attention, create_model
from lrfdyn.attention.lrf_dyn import Dendrites
from lrfdyn.nn.layers import SpikingConv
from lrfdyn.nn.neurons import LIF
from lrfdyn.ops import causal_spike_attention, dendrite, lrf, spike_attention
from lrfdyn.ops.bits import TRACED_BITS, pack_channels, step_bits_of, unpack_channels
from lrfdyn.ops.bn_lif import Norm, bn_lif, bn_lif_reference
from lrfdyn.ops.dispatch import plain_operations
from lrfdyn.ops.lif import Dynamics, integer_spike, lif, lif_reference
from lrfdyn.ops.lrf.reference import lrf_reference
from lrfdyn.ops.spike_attention import spike_attention_reference
from lrfdyn.ops.spike_conv import spike_conv
from tests.models.host_checks import randomize, small_model
from tests.ops.kernels import DEVICE, close, compare, currents, leaf, modes, rand, real_modes, spikes, tokens

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels_everywhere")]
OPERATORS = torch.ops.lrfdyn
LIF_NEURON, IF_NEURON = Dynamics.lif(), Dynamics.integrate_and_fire(detach_reset=False)
bits_in_graphs = pytest.mark.skipif(not TRACED_BITS, reason="in graphs of this PyTorch kernels keep spikes")


def compiled(function, graphs=None):
    """Without a break in the graph; `graphs` takes what the tracer saw."""

    def backend(graph, inputs):
        if graphs is not None:
            graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    return torch.compile(function, backend=backend, fullgraph=True)


def names(graphs):
    """The operators of a graph, by name."""
    (graph,) = graphs
    targets = (str(node.target) for node in graph.graph.nodes if node.op == "call_function")
    return [target.split(".")[1] for target in targets if target.startswith("lrfdyn.")]


def normed(function, neuron=LIF_NEURON, **options):
    def call(x, weight, bias, *others):
        one = torch.ones_like(weight)
        given = dict(zip(("residual",), others, strict=False))
        norm = Norm(weight, bias, 0 * one.detach(), one.detach().clone(), True)
        return function(x, norm, neuron, **given, **options)

    return call


def convolution(x, weight):
    return torch.conv2d(x.flatten(0, 1), weight, None, 1, 1).unflatten(0, x.shape[:2])


# Operator, what runs, its definition, inputs, whether spikes come out.
OPERATIONS = {
    "lif": (lambda x, h: lif(x, IF_NEURON, h, True)[0], lambda x, h: lif_reference(x, IF_NEURON, h)[0],
            lambda: [2 * rand(3, 2, 8, 3, 4), rand(2, 8, 3, 4, seed=1)], True),
    "lif-state": (lambda x, h: lif(x, IF_NEURON, h, True)[1], lambda x, h: lif_reference(x, IF_NEURON, h)[1],
                  lambda: [2 * rand(3, 2, 5), rand(2, 5, seed=1)], False),
    "integer_spike": (integer_spike, integer_spike, lambda: [4 * rand(3, 7)], False),
    "bn_lif": (normed(bn_lif), normed(bn_lif_reference), lambda: [currents(3, 2, 8, 5, 4), rand(8), rand(8, seed=1)],
               True),
    "bn_lif-pool": (normed(bn_lif, pool=True), normed(bn_lif_reference, pool=True),
                    lambda: [currents(3, 2, 8, 5, 4), rand(8), rand(8, seed=1)], True),
    "bn_lif-residual": (normed(bn_lif), normed(bn_lif_reference),
                        lambda: [currents(3, 2, 8, 5, 4), rand(8), rand(8, seed=1), currents(3, 2, 8, 5, 4)], False),
    "bn_lif-first": (normed(bn_lif, pool_first=True), normed(bn_lif_reference, pool_first=True),
                     lambda: [currents(3, 2, 8, 5, 4), rand(8), rand(8, seed=1)], True),
    "bn_lif-none": (normed(bn_lif, None), normed(bn_lif_reference, None),
                    lambda: [currents(3, 2, 8, 5, 4), rand(8), rand(8, seed=1), currents(3, 2, 8, 5, 4)], False),
    "dendrite": (lambda u, *m: dendrite(u, *m)[0], lambda u, *m: dendrite(u, *m, form="scan")[0],
                 lambda: [spikes(2, 5, 8), *modes(8, 2)], False),
    "lrf": (lambda x, w: lrf(x, w, (1, 3), x), lambda x, w: x + lrf_reference(x, w, (1, 3)),
            lambda: [rand(2, 8, 3, 4), rand(2, 8, 3, 3)], False),
    "spike_attention": (lambda *x: spike_attention(*x, 0.5), lambda *x: spike_attention_reference(*x, 0.5),
                        lambda: [tokens(2, 5, 2, 16, seed=i) for i in range(3)], False),
    "spike_attention-causal": (lambda *x: causal_spike_attention(*x, 0.5)[0],
                               lambda *x: spike_attention_reference(*x, 0.5, True),
                               lambda: [tokens(2, 5, 2, 16, seed=i) for i in range(3)], False),
    "spike_conv": (lambda x, w: spike_conv(x, w, padding=(1, 1)), convolution,
                   lambda: [currents(3, 2, 8, 3, 4), rand(6, 8, 3, 3)], False),
}  # fmt: skip


@pytest.mark.parametrize("case", OPERATIONS)
def test_a_compiled_operation_is_its_definition(case):
    operation, definition, inputs, binary = OPERATIONS[case]
    graphs = []

    def plainly(*inputs):
        with plain_operations():
            return definition(*inputs)

    compare(compiled(operation, graphs), plainly, inputs(), 1e-5, binary=binary)
    assert case.partition("-")[0] in names(graphs)


def test_channels_are_packed_inside_a_graph():
    x, graphs = spikes(2, 3, 20), []
    there_and_back = compiled(lambda x: unpack_channels(pack_channels(x), 20, torch.float32), graphs)
    assert torch.equal(there_and_back(x), x)
    assert names(graphs) == ["pack_channels", "unpack_channels"]


SMALL = {"dim": 32, "depth": 1, "heads": 2, "image_size": 16, "num_classes": 5, "time_steps": 3}
MIXING = {
    "ssa": {"spike_attention", "lif"},
    "lrf_ssa": {"spike_attention", "lrf", "lif"},
    "lrf_dyn": {"dendrite", "lrf"},
    "causal_ssa": {"spike_attention", "lif"},
    "sdsa": {"lif"},
}


def same_training_step(one, other, x, exact=True):
    """Two networks with the same weights give the same output, gradients and statistics. Plain norms (not `exact`) are
    computed in another way inside a graph."""
    outputs = [one(x), other(x)]
    for y in outputs:
        y.square().sum().backward()
    close(*outputs, 1e-5, "output")
    parameters = dict(other.named_parameters())
    for name, p in one.named_parameters():
        close(p.grad, parameters[name.removeprefix("_orig_mod.")].grad, 1e-5, f"gradient of {name}")
    buffers = dict(other.named_buffers())
    for name, b in one.named_buffers():
        expected = buffers[name.removeprefix("_orig_mod.")]
        if exact:
            assert torch.equal(b, expected), name
        else:
            close(b, expected, 1e-6, name)


@pytest.mark.parametrize("attention", ["lrf_ssa", "lrf_dyn"])
def test_a_compiled_network_takes_the_kernels(attention):
    torch.manual_seed(0)
    model = create_model("spikformer_4_384", attention=attention, **SMALL).to(DEVICE)
    other, graphs = copy.deepcopy(model), []
    same_training_step(compiled(model, graphs), other, rand(2, 3, 16, 16))
    found = names(graphs)
    assert set(found) >= MIXING[attention] | {"batch_statistics", "bn_lif", "spike_conv"}
    assert not any("conv2d" in str(node.target) or "batch_norm" in str(node.target) for node in graphs[0].graph.nodes)


@pytest.mark.parametrize("attention", ["ssa", "causal_ssa", "sdsa"])
def test_a_compiled_attention_takes_the_kernels(attention):
    """The rest of their networks is that of the two above."""
    torch.manual_seed(0)
    layer = create_attention(attention, dim=32, heads=2, grid=(3, 4)).to(DEVICE)
    other, graphs = copy.deepcopy(layer), []
    same_training_step(compiled(layer, graphs), other, spikes(3, 2, 32, 3, 4))
    assert set(names(graphs)) >= MIXING[attention] | {"batch_statistics", "bn_lif", "spike_conv"}
    assert not any("conv2d" in str(node.target) or "batch_norm" in str(node.target) for node in graphs[0].graph.nodes)


# Host, part of it, channels that it takes, and how many norms it has.
PARTS = {
    "pool-first": ("qkformer_imagenet", {"dim": 16}, "stages.0.embedding", 2, 3),
    "chain": ("sdt_v3", {"widths": (8, 8, 8, 8)}, "stages.1", 4, 6),
    "rep-convs": ("sdt_v2", {"widths": (8, 8, 8, 8)}, "stages.4", 8, 15),
}


@pytest.mark.parametrize("case", PARTS)
def test_a_compiled_part_of_a_host_has_no_plain_norm(case):
    torch.manual_seed(0)
    host, options, path, channels, norms = PARTS[case]
    part = randomize(small_model(host, **options).get_submodule(path)).to(DEVICE)
    other, graphs = copy.deepcopy(part), []
    same_training_step(compiled(part, graphs), other, currents(2, 2, channels, 4, 4).detach())
    assert names(graphs).count("bn_lif") == names(graphs).count("batch_statistics") == norms
    assert not any("batch_norm" in str(node.target) for node in graphs[0].graph.nodes)


def arguments(graphs, operator, name):
    """An argument of every call of an operator in a graph."""
    (graph,) = graphs
    overload = getattr(OPERATORS, operator).default
    at = [argument.name for argument in overload._schema.arguments].index(name)
    return [node.args[at] for node in graph.graph.nodes if node.target is overload]


@bits_in_graphs
def test_bits_are_results_and_arguments():
    """A byte of eight steps is kept by the next layer, and no layer is asked for it by name."""
    torch.manual_seed(0)
    net = nn.Sequential(SpikingConv(3, 8, LIF()), SpikingConv(8, 8, LIF(), 3), SpikingConv(8, 4, LIF())).to(DEVICE)
    graphs = []
    y = compiled(net, graphs)(currents(3, 2, 3, 4, 4))
    first, *later = arguments(graphs, "spike_conv", "packed")
    assert first is None
    assert all(bits is not None for bits in later)
    assert type(y) is torch.Tensor
    with torch.no_grad():
        graphs.clear()
        compiled(net, graphs)(currents(3, 2, 3, 4, 4))
        assert arguments(graphs, "spike_conv", "packed") == [None] * 3


@bits_in_graphs
def test_bits_of_an_attention_are_arguments():
    torch.manual_seed(0)
    layer, graphs = create_attention("lrf_ssa", dim=32, heads=2, grid=(3, 4), dilations=(1,)).to(DEVICE), []
    compiled(layer, graphs)(leaf(spikes(3, 2, 32, 3, 4)))
    for operator, name in (("spike_attention", "q_bits"), ("spike_attention", "v_bits"), ("lrf", "packed")):
        assert all(bits is not None for bits in arguments(graphs, operator, name)), name
    assert arguments(graphs, "spike_conv", "packed")[-1] is not None


@pytest.mark.parametrize("through", ["itself", "a view"])
def test_bits_of_spikes_that_were_changed_are_not_taken(through):
    torch.manual_seed(0)

    class Changed(nn.Module):
        def __init__(self):
            super().__init__()
            self.neuron, self.layer = LIF(), SpikingConv(8, 4, LIF())

        def forward(self, x):
            hidden = self.neuron(x)
            (hidden if through == "itself" else hidden[1:]).mul_(0.5)
            return self.layer(hidden)

    net, graphs = Changed().to(DEVICE), []
    same_training_step(compiled(net, graphs), copy.deepcopy(net), currents(3, 2, 8, 4, 4).detach())
    assert arguments(graphs, "spike_conv", "packed") == [None]


def test_bits_do_not_leave_a_graph():
    """Between two of them nobody watches for changes."""
    layer = SpikingConv(3, 8, LIF()).to(DEVICE)
    y = compiled(layer)(currents(3, 2, 3, 4, 4))
    assert type(y) is torch.Tensor
    assert step_bits_of(y) is None
    graphs = []
    torch._dynamo.reset()
    compiled(SpikingConv(8, 4, LIF()).to(DEVICE), graphs)(y).sum().backward()
    assert arguments(graphs, "spike_conv", "packed") == [None]


class OwnNetwork(nn.Module):
    """As a user writes one around an attention of this package."""

    def __init__(self, attention):
        super().__init__()
        self.patches = nn.Conv2d(3, 32, 4, 4, bias=False)  # in front of a norm its gradient is rounding
        self.norm, self.neuron = nn.BatchNorm2d(32), LIF()
        self.attn = create_attention(attention, dim=32, heads=2, grid=(4, 4))
        self.head = nn.Linear(32, 5)

    def forward(self, x):
        x = self.norm(self.patches(x)).expand(3, -1, -1, -1, -1)
        x = self.neuron(x)
        return self.head((x + self.attn(x)).mean((0, 3, 4)))


@pytest.mark.parametrize("attention", ["lrf_dyn", "lrf_ssa"])
def test_a_network_of_ones_own_compiles_and_gets_the_kernels(attention):
    torch.manual_seed(0)
    net = OwnNetwork(attention).to(DEVICE)
    other, graphs = copy.deepcopy(net), []
    same_training_step(compiled(net, graphs), other, rand(2, 3, 16, 16), exact=False)
    assert set(names(graphs)) >= MIXING[attention] | {"bn_lif", "spike_conv", "lif"}


def test_plain_operations_hold_inside_a_compiled_network():
    net, graphs, x = OwnNetwork("lrf_dyn").to(DEVICE).eval(), [], rand(1, 3, 16, 16)
    call = compiled(net, graphs)
    with plain_operations(), torch.no_grad():
        call(x)
    assert names(graphs) == []
    graphs.clear()
    with torch.no_grad():
        call(x)  # what is traced for one is not taken for the other
    assert "dendrite" in names(graphs)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_network_has_the_operators(strict):
    torch.manual_seed(0)
    net, x = OwnNetwork("lrf_dyn").to(DEVICE).eval(), rand(2, 3, 16, 16)
    program = torch.export.export(net, (x,), strict=strict)
    assert any(node.target is OPERATORS.dendrite.default for node in program.graph.nodes)
    with torch.no_grad():
        close(program.module()(x), net(x), 1e-5, "output")
    with plain_operations():
        program = torch.export.export(net, (x,), strict=strict)
    assert not any("lrfdyn" in str(node.target) for node in program.graph.nodes)


class Checkpointed(nn.Module):
    def __init__(self, layer, reentrant):
        super().__init__()
        self.layer, self.reentrant = layer, reentrant

    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize(("kind", "mode"), [*((kind, "eager") for kind in (*MIXING, "vsa")), ("lrf_ssa", "compiled")])
def test_activation_checkpoints_give_the_same_gradients(kind, mode):
    torch.manual_seed(0)
    options = {"dilations": (1,)} if kind.startswith("lrf") else {}
    layer = create_attention(kind, dim=32, heads=2, grid=(3, 4), **options).to(DEVICE)
    for norm in (m for m in layer.modules() if isinstance(m, nn.BatchNorm2d)):
        norm.momentum = 0.0  # a checkpoint runs them twice

    def gradients(network):
        layer.zero_grad()
        x = leaf(spikes(3, 2, 32, 3, 4))
        (network(x) - 0.4).square().sum().backward()
        return [x.grad, *(p.grad.clone() for p in layer.parameters())]

    if mode == "compiled":
        expected, *others = (gradients(compiled(net)) for net in (layer, Checkpointed(layer, False)))
    else:
        expected, *others = map(gradients, (layer, Checkpointed(layer, False), Checkpointed(layer, True)))
    assert expected[0].any()
    for found in others:
        for i, pair in enumerate(zip(found, expected, strict=True)):
            close(*pair, 1e-6, f"gradient {i}")


def test_fake_tensors_pass_through_a_network():
    """Shapes of a training step without its memory, as planners and estimates ask for them."""
    with FakeTensorMode():
        net = OwnNetwork("lrf_ssa")
        loss = net(torch.empty(2, 3, 16, 16)).sum()
        loss.backward()
        assert all(p.grad.shape == p.shape for p in net.parameters())


def test_dendrites_compile_in_other_types():
    torch.manual_seed(0)
    layer, graphs = Dendrites(8, 4, 4).to(DEVICE), []
    x = leaf(spikes(3, 2, 8, 3, 4, dtype=torch.bfloat16))
    call = compiled(layer, graphs)
    with torch.autocast(DEVICE, torch.bfloat16):
        y, expected = call(x), layer(x)
    assert y.dtype == expected.dtype == torch.bfloat16
    close(y, expected, 1e-6, "output")
    assert names(graphs) == ["dendrite"]


def counted(network, x):
    from torch.utils.flop_counter import FlopCounterMode

    import lrfdyn.ops.flops  # noqa: F401

    with FlopCounterMode(display=False) as counter:
        network(x).square().sum().backward()
    return {str(name): count for name, count in counter.get_flop_counts()["Global"].items()}


def test_flops_of_convolutions_and_stencils_are_those_of_the_definitions():
    weight, x = leaf(rand(6, 8, 3, 3)), currents(3, 2, 8, 4, 4)
    found = counted(lambda x: spike_conv(x, weight, padding=(1, 1)), x)
    plain = counted(lambda x: convolution(x, weight), x)
    assert list(found) == ["lrfdyn.spike_conv", "lrfdyn.spike_conv_backward"]
    assert list(found.values()) == list(plain.values())
    weight, x = leaf(rand(2, 8, 3, 3)), leaf(rand(2, 8, 3, 4))
    assert list(counted(lambda x: lrf(x, weight, (1, 3)), x).values()) == [2 * 18 * 8 * 24, 4 * 18 * 8 * 24]


def test_flops_of_a_network_are_those_of_the_definitions():
    """The counter watches modules, which then compute their parts one by one."""
    net, x = (
        nn.Sequential(SpikingConv(3, 8, LIF(), 3, stride=2), SpikingConv(8, 4, LIF())).to(DEVICE),
        rand(3, 2, 3, 4, 4),
    )
    found = counted(net, x)
    with plain_operations():
        assert found == counted(net, x)


def test_flops_of_mixing():
    q, k, v = (tokens(2, 5, 3, size) for size in (16, 16, 8))
    product = 2 * 2 * 3 * 5 * 16 * 8
    assert list(counted(lambda q: spike_attention(q, k, v, 1.0), q).values()) == [2 * product, 5 * product]
    two = modes(2, 8, 3)
    each = 2 * 2 * 5 * 8 * 2 * 3
    assert list(counted(lambda u: dendrite(u, *two)[0], leaf(spikes(2, 5, 8))).values()) == [6 * each, 14 * each]
    real = real_modes(8, 3)
    assert list(counted(lambda u: dendrite(u, *real)[0], leaf(spikes(2, 5, 8))).values()) == [4 * each / 2, 5 * each]
