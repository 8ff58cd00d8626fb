"""Whole models on the kernels, against the same models on the plain operations, in value, gradients and statistics."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch
import torch.nn.utils.prune

from lrfdyn import create_attention, create_model
from lrfdyn.attention import AttentionHost
from lrfdyn.attention.base import lif_conv
from lrfdyn.attention.lrf_dyn import LRFDyn
from lrfdyn.attention.ssa import VSA
from lrfdyn.convert import fold_batch_norm
from lrfdyn.errors import LrfdynError
from lrfdyn.models.qkformer import PooledConv
from lrfdyn.models.sdt_v2 import RepConvBN, SeparableConv
from lrfdyn.nn.layers import ConvBN, MembraneConv, MembraneMLP, SpikingConv
from lrfdyn.nn.neurons import LIF
from lrfdyn.ops import dispatch
from lrfdyn.ops.bits import step_bits_of
from lrfdyn.ops.dispatch import plain_operations
from lrfdyn.ops.lif import Dynamics, lif
from tests.models.host_checks import cancelled, randomize, small_model
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
    layer = create_attention(kind.partition("-")[0], 16, 2, (2, 3), host, **READINGS[kind])
    randomize(layer).to(DEVICE)
    compare_with_plain(layer, (torch.rand(2, 2, 16, 2, 3, device=DEVICE) < 0.5).float())


# Small ones: every step of a kernel takes long in the interpreter.
STAGES = {"widths": (8, 8, 16, 8), "heads": 2, "depths": (1, 1, 1, 1, 1)}
HOSTS = {
    "qkformer_imagenet": {"dim": 16, "depth": 4, "heads": 2},
    "qkformer_cifar": {"dim": 16, "depth": 3, "heads": 2, "image_size": 16},
    "qkformer_legacy": {"dim": 16, "depth": 3, "heads": 2, "image_size": 16, "legacy_neuron_axis": True},
    "sdt_v1": {"dim": 16, "depth": 1, "heads": 2},
    "sdt_v1_inner": {"dim": 16, "depth": 1, "heads": 2, "mlp_ratio": 1, "drop_path": 0.5},
    "sdt_v2": STAGES,
    "sdt_v3": {**STAGES, "attention": "lrf_ssa", "attention_options": {"dilations": (1,), "norm": True}},
}
KNOWN = {"qkformer_legacy": "qkformer_cifar", "sdt_v1_inner": "sdt_v1"}


@pytest.mark.parametrize("host", HOSTS)
def test_fused_host_equals_the_plain_one(host, kernels_everywhere):
    torch.manual_seed(0)
    model = small_model(KNOWN.get(host, host), **{"time_steps": 2, **HOSTS[host]})
    randomize(model)
    model.to(DEVICE, memory_format=torch.channels_last)
    side = HOSTS[host].get("image_size", 32)
    images = torch.randn(2, 3, side, side, device=DEVICE)
    compare_with_plain(model, images)
    model.eval()
    with torch.no_grad(), plain_operations():
        want = model(images)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), without_plain_norms():
            torch.testing.assert_close(model(images), want, rtol=1e-4, atol=1e-5)


@contextmanager
def without_plain_norms():
    """Inside this context a batch norm that is not in a kernel is an error."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(torch.nn.functional, "batch_norm")
        yield


def compare_with_plain(model, images):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with plain_operations():
        want = run(model, images)
    model.load_state_dict(before)
    with without_plain_norms():
        got = run(model, images)
    torch.testing.assert_close(got[0], want[0], rtol=1e-4, atol=1e-5)
    largest, parameters = max(grad.abs().max().item() for grad in want[1].values()), dict(model.named_parameters())
    assert largest > 1e-3
    zero = cancelled(model)
    for name, grad in want[1].items():
        # Of a bias in front of a norm the plain gradient is rounding noise around zero.
        scale = largest if parameters[name] in zero else max(grad.abs().max().item(), 1e-3)
        torch.testing.assert_close(got[1][name] / scale, grad / scale, rtol=0, atol=2e-4, msg=name)
    for name, buffer in want[2].items():
        torch.testing.assert_close(got[2][name], buffer, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("host", ["qkformer_imagenet", "sdt_v1", "sdt_v2"])
def test_fused_host_holds_less_for_its_backward_pass(host, kernels_everywhere):
    model = randomize(small_model(host, **{"time_steps": 4, **HOSTS[host]}))
    model.to(DEVICE, memory_format=torch.channels_last)
    images = torch.randn(2, 3, 32, 32, device=DEVICE)

    def held():
        seen = {}
        keep = lambda x: seen.update({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()}) or x  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            logits = model(images)
        assert logits.requires_grad
        return sum(seen.values())

    with plain_operations():
        plain = held()
    assert held() < 0.65 * plain


@pytest.mark.parametrize("host", ["qkformer_imagenet", "sdt_v2", "sdt_v3"])
def test_a_host_with_folded_norms_is_fused_too(host, kernels_everywhere):
    torch.manual_seed(0)
    model = randomize(small_model(host, **{"time_steps": 2, **HOSTS[host]})).to(DEVICE).eval()
    images, folded = torch.randn(2, 3, 32, 32, device=DEVICE), fold_batch_norm(model)
    with torch.inference_mode(), plain_operations():
        want = model(images)
        torch.testing.assert_close(folded(images), want, rtol=1e-4, atol=1e-5)
    with torch.inference_mode():
        torch.testing.assert_close(folded(images), want, rtol=1e-4, atol=1e-5)


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


@pytest.mark.parametrize("part", ["conv", "neuron", "bn"])
def test_a_forward_of_its_own_is_called(part, kernels_everywhere):
    """As libraries set it on a module that they wrap in place."""
    layer, x = spiking_conv(), potentials()
    module = layer.get_submodule(part)
    module.forward = lambda y, forward=module.forward: forward(y) + y
    with plain_operations():
        want = layer(x)
    torch.testing.assert_close(layer(x), want)
    torch.testing.assert_close(SpikingConv.together([layer], x)[0][0], want)


@pytest.mark.parametrize("training", [False, True])
def test_a_norm_told_to_forget_its_statistics_leaves_them(training, kernels_everywhere):
    """`track_running_stats` may be changed at any time: in training the statistics then stay as they are."""
    layer, x = spiking_conv().train(training), potentials()
    layer.bn.track_running_stats = False
    before = {name: buffer.clone() for name, buffer in layer.bn.named_buffers()}
    with plain_operations():
        want = layer(x)
    torch.testing.assert_close(layer(x), want)
    for name, buffer in layer.bn.named_buffers():
        assert torch.equal(buffer, before[name]), name


@pytest.mark.parametrize("path", ["fc1", "fc1.bn", "fc1.conv", "fc2.neuron", "fc2", "fc2.bn", "fc2.conv"])
def test_hooks_see_what_they_watch_between_potentials(path, kernels_everywhere):
    torch.manual_seed(0)
    mlp, x = MembraneMLP(8, 16, LIF).to(DEVICE), potentials()
    with plain_operations():
        want = mlp(x, residual=x)
    seen = []
    mlp.get_submodule(path).register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    torch.testing.assert_close(mlp(x, residual=x), want)
    assert len(seen) == 1
    assert all(norm.num_batches_tracked == 2 for norm in (mlp.fc1.bn, mlp.fc2.bn))


def test_a_replaced_layer_of_potentials_is_computed_as_it_is(kernels_everywhere):
    """It takes nothing but what the layer that it stands for takes."""
    torch.manual_seed(0)
    mlp, x = MembraneMLP(8, 8, LIF).to(DEVICE), potentials()
    mlp.fc2 = torch.nn.Conv3d(2, 2, 1).to(DEVICE)
    with plain_operations():
        want = x + mlp.fc2(mlp.fc1(x))
    torch.testing.assert_close(mlp(x, residual=x), want)


@pytest.mark.parametrize(("host", "path"), [("qkformer_imagenet", "stages.2.blocks.0"), ("sdt_v1", "blocks.0")])
def test_a_branch_may_be_replaced_by_any_module(host, path):
    """One that does not know of a residual too, such as Identity in an ablation."""
    block, x = small_model(host, **HOSTS[host]).get_submodule(path), torch.randn(2, 1, 16, 2, 2)
    block.attn = block.mlp = torch.nn.Identity()
    expected = 2 * (x + block.neuron(x)) if host == "sdt_v1" else 4 * x
    assert torch.equal(block(x), expected)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(block, backend="eager", fullgraph=True)(x), expected)


class Wrapped(torch.nn.Module):
    """Knows nothing of the layer in it but that it takes a tensor."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)


LAST_LAYERS = {
    "stages.1.embedding.shortcut": "qkformer_imagenet",
    "stem.rpe": "sdt_v1",
    "blocks.0.attn.proj": "sdt_v1",
    "stages.0.blocks.0.separable": "sdt_v2",
    "stages.0.blocks.0.separable.contract": "sdt_v2",
    "stages.3.blocks.0.attn.proj": "sdt_v2",
}


@pytest.mark.parametrize("path", LAST_LAYERS)
def test_the_last_layer_of_a_branch_may_be_wrapped(path):
    host = LAST_LAYERS[path]
    model = randomize(small_model(host, **{"time_steps": 2, **HOSTS[host]})).eval()
    images = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        want = model(images)
        model.set_submodule(path, Wrapped(model.get_submodule(path)))
        assert torch.equal(model(images), want)


def test_a_watched_drop_path_is_called(kernels_everywhere):
    block = small_model("sdt_v3", **HOSTS["sdt_v3"]).to(DEVICE).stages[3].blocks[0]
    x, seen = torch.randn(1, 2, 16, 2, 2, device=DEVICE), []
    want = block(x)
    block.drop_path.register_forward_hook(lambda *_: seen.append("branch"))
    torch.testing.assert_close(block(x), want, rtol=1e-4, atol=1e-5)
    assert seen == ["branch"] * 3


@pytest.mark.parametrize("kind", [VSA, LRFDyn])
def test_a_subclass_may_mix_in_its_own_way(kind, kernels_everywhere):
    """Its norm may be anywhere then, and is not taken for the last step."""

    class Doubled(kind):
        def mix(self, *spikes):
            return 2 * super().mix(*spikes) + 1

    torch.manual_seed(0)
    layer = randomize(Doubled(16, 2, (2, 3), AttentionHost(lif_conv, lif_conv))).to(DEVICE).eval()
    spikes = [(torch.rand(2, 2, 16, 2, 3, device=DEVICE) < 0.5).float() for _ in layer.projections]
    got = layer.spikes(*spikes)
    assert torch.equal(got, layer.fire(layer.mix(*spikes)))
    assert got.any()
    with plain_operations():
        torch.testing.assert_close(got, layer.spikes(*spikes))


@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_pooled_convolutions_are_fused(pool, training, kernels_everywhere, monkeypatch):
    torch.manual_seed(0)
    layer, x = PooledConv(8, 12, pool).to(DEVICE).train(training), potentials()
    grid = (2, 2) if pool else (4, 4)
    residual = torch.randn(2, 2, 12, *grid, device=DEVICE)
    with plain_operations():
        want = layer(x), layer(x, residual=residual)
    monkeypatch.delattr(torch.nn.functional, "batch_norm")
    for got, expected in zip((layer(x), layer(x, residual=residual)), want, strict=True):
        torch.testing.assert_close(got, expected)
    assert step_bits_of(layer(x)) is not None


@pytest.mark.parametrize("layer", [SpikingConv, MembraneConv])
def test_pool_and_shortcut_together(layer, kernels_everywhere):
    torch.manual_seed(0)
    layer, x, shortcut = layer(8, 8, LIF(threshold=0.3)).to(DEVICE), potentials(), potentials()[..., ::2, ::2]
    with plain_operations():
        want = layer(x, residual=shortcut, pool=True)
    torch.testing.assert_close(layer(x, residual=shortcut, pool=True), want)


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


@pytest.mark.parametrize("layer", [ConvBN, MembraneConv, SpikingConv])
def test_a_convolution_may_be_replaced_by_several(layer, kernels_everywhere):
    """Nothing is asked of it but its output: it has no weight of its own."""
    torch.manual_seed(0)
    layer = layer(8, 8, *([] if layer is ConvBN else [LIF(threshold=0.3)])).to(DEVICE).eval()
    layer.conv = torch.nn.Sequential(torch.nn.Conv2d(8, 4, 1), torch.nn.Conv2d(4, 8, 1)).to(DEVICE)
    x = potentials()
    together = SpikingConv.together([layer], x)[0][0]
    with plain_operations():
        want = layer(x)
    torch.testing.assert_close(layer(x), want)
    torch.testing.assert_close(together, want)


@pytest.mark.parametrize("part", ["depthwise", "conv1"])
def test_the_bias_of_a_replaced_convolution_of_spikes_is_added(part, kernels_everywhere):
    torch.manual_seed(0)
    layer = (SeparableConv(8, 3, LIF) if part == "depthwise" else RepConvBN(8, 8)).to(DEVICE).eval()
    inner = layer if part == "depthwise" else layer.conv
    old = inner.get_submodule(part)
    kind = {"kernel_size": old.kernel_size, "padding": old.padding, "groups": old.groups}
    setattr(inner, part, torch.nn.Conv2d(old.in_channels, old.out_channels, **kind).to(DEVICE))
    torch.nn.init.ones_(inner.get_submodule(part).bias)
    x = potentials()
    with plain_operations():
        want = layer(x)
    torch.testing.assert_close(layer(x), want)


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
