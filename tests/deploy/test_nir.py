"""A NIR file is the model, spike for spike: in our own reader, and in those of SpikingJelly and snnTorch."""

from __future__ import annotations

import json
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lrfdyn.attention.lrf_dyn import COUPLINGS, Dendrites
from lrfdyn.cli import main
from lrfdyn.deploy import Predictor
from lrfdyn.deploy.export.formats import METADATA_KEY
from lrfdyn.deploy.export.nir_file import NirNeuron, NirRunner, write_nir
from lrfdyn.deploy.export.nir_graph import TIME_STEP, Graph, nir_graph, scan_weight
from lrfdyn.deploy.export.write import export_model
from lrfdyn.errors import LrfdynError
from lrfdyn.nn.neurons import SpikingNeuron
from lrfdyn.ops.dendrite import dendrite
from lrfdyn.ops.lif import Dynamics, lif_reference
from tests.conftest import assert_close, random
from tests.deploy.small import side, small

nir = pytest.importorskip("nir")


@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("grid", [(1, 1), (1, 5), (3, 2), (4, 7), (6, 1)], ids=str)
@pytest.mark.parametrize("coupling", COUPLINGS)
def test_the_scan_is_one_convolution(coupling, grid, directions):
    torch.manual_seed(0)
    layer = Dendrites(3, 6, 5, directions, coupling).double()
    u = random(2, 3, *grid)
    weight = scan_weight(layer, grid)
    assert weight.shape == (3, 1, 2 * grid[0] - 1, 2 * grid[1] - 1)
    found = F.conv2d(u, weight, padding=(grid[0] - 1, grid[1] - 1), groups=3)
    expected, _ = dendrite(u.flatten(2).mT, *layer.modes(grid[1]), form="step")
    assert_close(found.flatten(2).mT, expected.detach(), 1e-9, "potentials")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("dynamics", "exact"),
    [
        (Dynamics.lif(), True),
        (Dynamics.lif(threshold=0.5), True),
        (Dynamics.lif(tau=3.0), False),
        (Dynamics.paper_lif(), True),
        (Dynamics.ms_lif(), True),
        (Dynamics.integrate_and_fire(), True),
    ],
    ids=["lif", "half", "tau3", "paper", "ms", "if"],
)
def test_neurons_fire_at_their_threshold(dynamics, exact, dtype):
    x = random(6, 500, 1, 1).to(dtype)
    if exact:  # potentials that have few bits meet the threshold often
        x = (8 * x).round() / 8
        at = (x[0] * dynamics.gain == dynamics.threshold).sum()
        assert at > 0
    graph = Graph(nir, "", (500, 1, 1), dtype, dense=False)
    (name,) = graph.fire("neuron", ["input"], dynamics)
    neuron = NirNeuron(graph.nodes[name], TIME_STEP)
    found = torch.stack([neuron(current) for current in x])
    assert 0 < found.mean() < 1
    assert torch.equal(found, lif_reference(x, dynamics)[0])


def awake(host, kind=None, **options):
    """A model whose last neuron fires too."""
    model = small(host, kind, **options)
    if host == "sdt_v1":
        with torch.no_grad():
            model.blocks[-1].mlp.fc2.bn.bias += 1.5
    return model


def written(model, size, path, dense=False):
    facts = {"time_steps": model.time_steps, "time_step_s": TIME_STEP, "dense": dense}
    write_nir(model, torch.zeros(2, model.in_channels, *size), path, facts)
    return path


@torch.no_grad()
def spikes_and_logits(model, images):
    """The spikes `[T, B, ...]` of every neuron by name, and logits that differ between the images."""
    seen = {}
    neurons = {name: module for name, module in model.named_modules() if isinstance(module, SpikingNeuron)}
    hooks = [
        neuron.register_forward_hook(lambda _module, _given, out, name=name: seen.__setitem__(name, out))
        for name, neuron in neurons.items()
    ]
    logits = model(images)
    for hook in hooks:
        hook.remove()
    assert seen.keys() == neurons.keys()
    assert len(images) == 1 or logits.std(0).max() > 1e-3
    return seen, logits


DIRECTIONS = {"directions": 2, "dilations": ()}
CASES = [
    ("spikformer", "lrf_dyn", {}, torch.float32),
    ("spikformer", "lrf_dyn", {}, torch.float64),
    ("spikformer", "lrf_dyn_same", {}, torch.float64),
    ("spikformer", "lrf_dyn", {"attention_options": DIRECTIONS}, torch.float64),
    ("sdt_v1", "lrf_dyn", {"pooling": (False, True, True, False)}, torch.float64),
    ("sdt_v2", "lrf_dyn", {"time_steps": 2}, torch.float64),
    ("sew_resnet", None, {}, torch.float32),
    ("ms_resnet", None, {}, torch.float64),
]


@pytest.mark.parametrize(("host", "kind", "options", "dtype"), CASES)
def test_spike_for_spike(host, kind, options, dtype, tmp_path):
    model = awake(host, kind, **options).to(dtype)
    size = side(host, model)
    images = random(3, model.in_channels, *size).to(dtype)
    expected, logits = spikes_and_logits(model, images)
    runner = NirRunner(written(model, size, tmp_path / "model.nir"))
    steps = list(runner.steps(images))
    assert len(steps) == model.time_steps
    for name, spikes in expected.items():
        assert torch.equal(torch.stack([step[name] for step in steps]).reshape(spikes.shape), spikes), name
    assert_close(torch.from_numpy(runner(images.numpy())), logits, 1e-6, "logits")


def spikingjelly_reader(path):
    exchange = pytest.importorskip("spikingjelly.activation_based.nir_exchange")
    return exchange.import_from_nir(path, dt=TIME_STEP)


def snntorch_reader(path):
    return pytest.importorskip("snntorch.import_nir").import_from_nir(nir.read(path))


@pytest.mark.parametrize("read", [spikingjelly_reader, snntorch_reader])
@pytest.mark.parametrize(
    ("host", "options"),
    [("spikformer", {}), ("spikformer", {"directions": 2}), ("ms_resnet", None)],
)
def test_other_readers(host, options, read, tmp_path):
    """Both know convolutions without groups alone; snnTorch joins the images of a batch in front of the classifier."""
    pytest.importorskip("nirtorch")
    model = small(host) if options is None else small(host, "lrf_dyn", attention_options=options)
    size = side(host, model)
    images = random(1, model.in_channels, *size, dtype=torch.float32)
    expected, logits = spikes_and_logits(model, images)
    network = read(written(model, size, tmp_path / "model.nir", dense=True))
    seen = {name: [] for name in expected}

    def note(name, _module, _given, out):
        seen[name].append(out[0] if isinstance(out, tuple) else out)

    for name in expected:
        network.get_submodule(name.replace(".", "_")).register_forward_hook(partial(note, name))
    outputs, state = [], None
    with torch.no_grad():
        for _ in range(model.time_steps):
            output, state = network(images) if state is None else network(images, state)
            outputs.append(output)
    for name, spikes in expected.items():
        assert torch.equal(torch.stack(seen[name]), spikes), name
    assert_close(torch.stack(outputs).mean(0).reshape(logits.shape), logits, 1e-6, "logits")


def test_graph_in_the_types_of_nir(tmp_path):
    """Without groups nir's own check of types passes; nodes are named after modules, and shortcuts are edges."""
    model = small("spikformer", "lrf_dyn")
    graph = nir.read(written(model, model.input_size[1:], tmp_path / "dense.nir", dense=True))
    kinds = {type(node).__name__ for node in graph.nodes.values()}
    assert kinds == {"Input", "Conv2d", "LIF", "AvgPool2d", "Flatten", "Affine", "Output"}
    into = [source for source, to in graph.edges if to == "blocks.0.attn.fire"]
    assert into == ["blocks.0.attn.dendrites", "blocks.0.attn.lrf.dilation_3", "blocks.0.attn.lrf.dilation_5"]
    into = [source for source, to in graph.edges if to == "blocks.0.mlp.fc1.conv"]
    assert into == ["stem.stages.3.pool_neuron", "stem.rpe.neuron", "blocks.0.attn.proj.neuron"]
    grouped = NirRunner(written(model, model.input_size[1:], tmp_path / "grouped.nir"))
    scan = grouped.nodes["blocks.0.attn.dendrites"]
    assert (scan.weight.shape, int(scan.groups)) == ((16, 1, 7, 7), 16)
    images = random(2, *model.input_size, dtype=torch.float32).numpy()
    assert np.allclose(grouped(images), NirRunner(tmp_path / "dense.nir")(images), atol=1e-6)


@pytest.mark.parametrize("kind", ["ssa", "causal_ssa", "vsa", "lrf_ssa", "sdsa", "lrf_dyn_qkv"])
def test_products_of_signals_are_refused(kind):
    with pytest.raises(LrfdynError, match=r"blocks\.0\.attn \(\w+\) needs products of q, k, v, and no node of NIR"):
        nir_graph(small("spikformer", kind), (16, 16))


@pytest.mark.parametrize(
    ("host", "options", "message"),
    [
        ("sdt_v1", {}, r"the maximum of potentials .* in stem\.stages\.3 \(ConvBN\)"),
        ("sdt_v2", {"distillation": True}, r"the operation div in the network \(SDTV2\)"),
        ("sdt_v3", {}, r"neuron \(IntegerSpike\) is no neuron of NIR"),
        ("qkformer", {}, r"the split of an axis, as into heads, in stages\.0\.blocks\.0\.attn \(TokenAttention\)"),
    ],
)
def test_what_nir_has_no_node_for_is_refused(host, options, message):
    model = small(host, "lrf_dyn", **options)
    with pytest.raises(LrfdynError, match=message):
        nir_graph(model, side(host, model))


@pytest.mark.parametrize(
    ("operation", "name"),
    [
        (lambda x: torch.cat([x, x], 2), "operation cat"),
        (lambda x: x.chunk(2, 2)[0], "operation chunk"),
        (lambda x: x * torch.ones(()), "operation mul"),
        (lambda x: x + x, "this sum"),
        (lambda x: x + 1, "the sum with a constant"),
        (lambda x: x.mean(2), "the mean over C"),
    ],
)
def test_other_operations_are_refused(operation, name):
    graph = Graph(nir, "Host", (4, 2, 2), torch.float32, dense=False)
    signal = graph.signal((1, 1, 4, 2, 2), "TBCHW", ["input"])
    with pytest.raises(LrfdynError, match=rf"NIR has no node for .*{name} in the network \(Host\)"):
        operation(signal)


def test_a_reset_that_is_not_zero_is_refused():
    model = small("sew_resnet")
    model.neuron.dynamics = Dynamics.lif(v_reset=0.2)
    with pytest.raises(LrfdynError, match=r"a neuron with the reset 0\.2 that keeps 0\.5 .* in neuron \(IF\)"):
        nir_graph(model, (24, 24))


def test_command(tmp_path, capsys):
    model = small("spikformer", "lrf_dyn")
    model.class_names = tuple("abcde")
    model.save_pretrained(tmp_path / "model")
    out = tmp_path / "model.nir"
    assert main(["export", str(tmp_path / "model"), "--out", str(out), "--dense", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["format"], printed["images"], printed["within_tolerance"]) == ("nir", 16, 16)
    facts = NirRunner(out).facts
    assert (facts["dense"], facts["time_step_s"], facts["class_names"]) == (True, TIME_STEP, list("abcde"))
    assert [path.name for path in tmp_path.glob("*.nir*")] == ["model.nir"]
    predictor = Predictor.open(str(out))
    assert (predictor.runtime, predictor.class_names) == ("nir", tuple("abcde"))
    images = random(2, *model.input_size, dtype=torch.float32)
    assert_close(torch.from_numpy(predictor.run(images.numpy())), model(images).detach(), 1e-6, "logits")


def test_wrong_file_is_not_kept(tmp_path, monkeypatch):
    call = NirRunner.__call__
    monkeypatch.setattr(NirRunner, "__call__", lambda self, images: -call(self, images))
    with pytest.raises(LrfdynError, match="does not compute the model, so it was not kept"):
        export_model(small("spikformer", "lrf_dyn"), tmp_path / "model.nir")
    assert not list(tmp_path.iterdir())


def test_bad_files(tmp_path):
    path = tmp_path / "model.nir"
    path.write_bytes(b"no graph")
    with pytest.raises(LrfdynError, match=r"model\.nir is not a NIR file that can be run"):
        NirRunner(path)
    whole = written(small("sew_resnet"), (24, 24), tmp_path / "whole.nir").read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(LrfdynError, match=r"model\.nir is not a NIR file that can be run"):
        NirRunner(path)

    def edited(node, **metadata):
        nodes = {"input": nir.Input(np.array([2])), "node": node, "output": nir.Output(np.array([2]))}
        graph = nir.NIRGraph(nodes, [("input", "node"), ("node", "output")], type_check=False)
        graph.metadata = metadata
        nir.write(path, graph)
        return NirRunner(path)

    layer = nir.Affine(np.ones((2, 2), np.float32), np.ones(2, np.float32))
    with pytest.raises(LrfdynError, match=r"model\.nir was not exported by lrfdyn"):
        edited(layer)
    for facts in ("[]", '{"time_steps": 0}', '{"time_steps": 1, "time_step_s": "x"}', "{"):
        with pytest.raises(LrfdynError, match=r"model\.nir: its metadata 'lrfdyn' cannot be used"):
            edited(layer, **{METADATA_KEY: facts})
    facts = {METADATA_KEY: '{"time_steps": 1, "time_step_s": 1e-4}'}
    assert edited(layer, **facts)(np.ones((1, 2), np.float32)).tolist() == [[3, 3]]
    with pytest.raises(LrfdynError, match=r"model\.nir cannot be run"):
        edited(layer, **facts)(np.ones((1, 3), np.float32))
    same = nir.Conv2d((2, 2), np.ones((1, 1, 1, 1), np.float32), (1, 1), "same", (1, 1), 1, np.ones(1, np.float32))
    with pytest.raises(LrfdynError, match=r"model\.nir cannot be run"):
        edited(same, **facts)(np.ones((1, 1, 2, 2), np.float32))
    with pytest.raises(LrfdynError, match="a node of the kind Scale, which lrfdyn does not write"):
        edited(nir.Scale(np.ones(2, np.float32)), **facts)(np.ones((1, 2), np.float32))
