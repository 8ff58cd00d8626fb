"""Transforms of `torch.func`: batches, derivatives and ensembles of operations, attentions and hosts."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.func import (
    functional_call,
    grad,
    hessian,
    jacrev,
    jvp,
    replace_all_batch_norm_modules_,
    stack_module_state,
    vmap,
)

from lrfdyn.errors import LrfdynError
from lrfdyn.ops import causal_spike_attention, dendrite, dendrite_step, dispatch, integer_spike, lif, lrf
from lrfdyn.ops import spike_attention as attention
from lrfdyn.ops.bits import split_spikes
from lrfdyn.ops.bn_lif import Integer, Norm, bn_lif
from lrfdyn.ops.dispatch import use_triton
from lrfdyn.ops.lif import Dynamics, lif_reference
from lrfdyn.ops.lif.reference import SMOOTH_STEPS, SURROGATES
from lrfdyn.ops.spike_conv import spike_conv
from tests.attention.small import DIM, KINDS, build, hosts, images, kind_id
from tests.conftest import assert_close, random
from tests.models.host_checks import HOSTS, digits_model, lively, randomize, small_model

NEURONS = {
    "lif": Dynamics.lif(),
    "if": Dynamics.integrate_and_fire(detach_reset=False),
    "ms": Dynamics.ms_lif(v_reset=0.25),
}


def normed(x, weight, bias, residual=None, *, neuron=NEURONS["lif"], **options):
    norm = Norm(weight, bias, 0 * weight.detach(), 1 + 0 * weight.detach(), False)
    return bn_lif(x, norm, neuron, residual=residual, **options)


X, C = (3, 2, 4, 5, 3), (4,)
MODES = [(4, 2), (4, 2), (4, 2, 2)]
# What runs, and the shapes of its inputs.
OPERATIONS = {
    **{f"lif-{name}": (partial(lif, dynamics=d), [(3, 2, 5)]) for name, d in NEURONS.items()},
    "lif-states": (lambda x, h: lif(x, NEURONS["ms"], h, True), [(3, 2, 5), (2, 5)]),
    "integer_spike": (integer_spike, [(3, 7)]),
    "bn_lif": (normed, [X, C, C]),
    "bn_lif-pool": (partial(normed, pool=True), [X, C, C]),
    "bn_lif-first": (partial(normed, pool_first=True, neuron=Integer()), [X, C, C]),
    "bn_lif-none": (partial(normed, neuron=None), [X, C, C, X]),
    "dendrite": (dendrite, [(2, 20, 4), *MODES]),
    "dendrite-both": (dendrite, [(2, 20, 4), *((2, *shape) for shape in MODES)]),
    "dendrite-real": (lambda u, decay, weight: dendrite(u, decay, None, weight), [(2, 20, 4), (4, 2, 2), (4, 2, 2)]),
    "dendrite-fft": (partial(dendrite, form="fft"), [(2, 20, 4), *MODES]),
    "dendrite-state": (
        lambda *x: dendrite(*x[:4], initial_state=x[4], output_final_state=True),
        [(2, 20, 4), *MODES, (2, 4, 2, 2)],
    ),
    "dendrite_step": (dendrite_step, [(2, 4), *MODES, (2, 4, 2, 2)]),
    "lrf": (lambda x, weight: lrf(x, weight, (1, 3), x), [(2, 4, 5, 3), (2, 4, 3, 3)]),
    "spike_attention": (partial(attention, scale=0.5, fork=True), [(2, 2, 9, 4)] * 3),
    "spike_attention-tall": (partial(attention, scale=0.5), [(2, 2, 3, 4)] * 3),
    "causal_spike_attention": (
        partial(causal_spike_attention, scale=0.5, chunk=4, output_final_state=True),
        [(2, 2, 9, 4)] * 3,
    ),
    "spike_conv": (partial(spike_conv, stride=(2, 2), padding=(1, 1)), [X, (6, 4, 3, 3)]),
    "spike_conv-1x1": (partial(spike_conv, fork=True), [X, (6, 4, 1, 1)]),
    "split_spikes": (lambda x: split_spikes(x, [1, 3]), [X]),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations(name):
    operation, shapes = OPERATIONS[name]
    samples = [[1.5 * random(*shape, seed=10 * n + i).abs() for i, shape in enumerate(shapes)] for n in range(2)]
    samples[0][0] -= 1  # tokens and currents, not decays

    def values(*inputs):
        outputs = operation(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return torch.cat([y.flatten() for y in outputs if y is not None])

    weights = random(*values(*samples[0]).shape, seed=99)
    every = tuple(range(len(shapes)))

    def loss(*inputs):
        return (values(*inputs) * weights).sum()

    expected = []
    for sample in samples:
        leaves = [x.clone().requires_grad_() for x in sample]
        y = values(*leaves)
        expected.append((y.detach(), *torch.autograd.grad((y * weights).sum(), leaves)))
    expected = [torch.stack(parts) for parts in zip(*expected, strict=True)]
    assert all(part.abs().sum() > 0 for part in expected)
    stacked = [torch.stack(parts) for parts in zip(*samples, strict=True)]
    assert_close(vmap(values)(*stacked), expected[0], 1e-12, "values")
    last = [x.movedim(0, -1) for x in stacked]
    assert_close(vmap(values, -1, 1)(*last).T, expected[0], 1e-12, "values along the last axis")
    for i, (got, want) in enumerate(zip(vmap(grad(loss, every))(*stacked), expected[1:], strict=True)):
        assert_close(got, want, 1e-9, f"gradient of input {i}")
    for i, (got, want) in enumerate(zip(vmap(jacrev(loss, every))(*stacked), expected[1:], strict=True)):
        assert_close(got, want, 1e-9, f"Jacobian of input {i}")
    tangents = [random(*x.shape, seed=50 + i) for i, x in enumerate(stacked)]
    _, along = vmap(lambda x, t: jvp(loss, x, t))(tuple(stacked), tuple(tangents))
    products = [(g * t).flatten(1).sum(1) for g, t in zip(expected[1:], tangents, strict=True)]
    assert_close(along, sum(products), 1e-9, "derivative along the tangents")
    one = torch.stack([values(stacked[0][n], *samples[0][1:]) for n in range(2)])
    got = vmap(values, (0, *[None] * (len(every) - 1)))(stacked[0], *samples[0][1:])
    assert_close(got, one, 1e-12, "values of one batched input")


@pytest.mark.parametrize("name", SURROGATES)
def test_a_surrogate_is_the_derivative_of_its_step(name):
    """At the edges of the rectangle and far away too; the step adds exactly 0."""
    x = torch.tensor([-torch.inf, -9.0, -0.5, -0.25, 0.0, 0.25, 0.3, 0.5, 9.0, torch.inf], dtype=torch.float64)
    slope = vmap(grad(lambda x: SMOOTH_STEPS[name](x, 2.0)))(x)
    assert_close(slope, SURROGATES[name](x, 2.0), 1e-12, "slope")
    d = Dynamics(leak=0.0, gain=1.0, threshold=0.25, surrogate=name, alpha=2.0)
    assert torch.equal(vmap(lambda x: lif(x.reshape(1), d)[0])(x), lif(x.reshape(1, -1), d)[0].T)


@pytest.mark.parametrize("name", NEURONS)
def test_second_derivatives_are_those_of_the_definition(name):
    x, d, weights = 1.5 * random(3, 2), NEURONS[name], random(3, 2, seed=1)

    def loss(x, form=lif):
        return (form(x, d)[0] * weights).sum().sin()

    expected = torch.autograd.functional.hessian(partial(loss, form=lif_reference), x)
    assert expected.abs().sum() > 0
    assert_close(hessian(loss)(x), expected, 1e-9, "second derivative")


def test_a_compiled_transform():
    weight = random(5, 5)

    def loss(weight, x):
        return integer_spike(4 * lif(x @ weight, NEURONS["lif"])[0] - x).square().sum()

    x, each = random(4, 3, 5), vmap(grad(loss), (None, 1))
    compiled = torch.compile(each, backend="aot_eager", fullgraph=True)
    assert_close(compiled(weight, x), each(weight, x), 1e-12, "gradients")


def test_no_kernel_runs_inside_a_transform(monkeypatch):
    monkeypatch.setattr(dispatch, "_on_kernel_device", lambda tensor: True)
    monkeypatch.setattr(dispatch, "triton_present", lambda: True)
    seen = []

    def look(x):
        seen.append(use_triton(x))
        return x.sum()

    for transform in (vmap(look), grad(look), lambda x: jvp(look, (x,), (x,))):
        transform(torch.zeros(3))
    assert seen == [False] * 3
    look(torch.zeros(3))
    assert seen[-1]


# --- modules


def state_of(module):
    return [{name: x.detach() for name, x in named()} for named in (module.named_parameters, module.named_buffers)]


def assert_gradients_of_each_sample(module, x, axis=0):
    """Those of `vmap` over `grad` are those of one backward pass for each sample, along an `axis` of `x`."""
    parameters, buffers = state_of(module)

    def loss(parameters, sample):
        y = functional_call(module, (parameters, buffers), (sample.unsqueeze(axis),))
        return (y - 0.4).square().sum()

    found = vmap(grad(loss), (None, axis))(parameters, x)
    names, leaves = zip(*module.named_parameters(), strict=True)
    moved = set()
    for i, sample in enumerate(x.unbind(axis)):
        y = module(sample.unsqueeze(axis))
        expected = torch.autograd.grad((y - 0.4).square().sum(), leaves)
        for name, gradient in zip(names, expected, strict=True):
            assert_close(found[name][i], gradient, 1e-9, f"sample {i}, {name}")
            moved.update([name] if gradient.any() else [])
    assert len(moved) > len(names) / 3


@pytest.mark.parametrize(("kind", "options"), [*KINDS, ("sdsa", {})], ids=kind_id)
@hosts
def test_attentions(kind, options, host):
    layer, x = build(kind, host, **options).eval(), images(2, 3, DIM, (3, 5))
    assert_gradients_of_each_sample(layer, x, axis=1)
    x.requires_grad_()
    y = layer(x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    value, along = jvp(layer, (x.detach(),), (images(2, 3, DIM, (3, 5), seed=5),))
    assert torch.equal(value, y)
    assert_close(along.sum(), (gradient * images(2, 3, DIM, (3, 5), seed=5)).sum(), 1e-9, "derivative")


@pytest.mark.parametrize("host", HOSTS)
def test_hosts(host):
    """Norms without gain: through deep stages gradients would grow so far that nothing but rounding is left of them."""
    torch.manual_seed(0)
    model = small_model(host).double().eval()
    for norm in (m for m in model.modules() if isinstance(m, nn.BatchNorm2d)):
        nn.init.normal_(norm.bias, mean=0.3, std=0.5)
    size = model.config.get("image_size", 32)
    assert_gradients_of_each_sample(model, random(2, model.in_channels, size, size))


def test_an_ensemble():
    """Its logits, and the gradients of every member, each on images of its own."""
    x = random(3, 2, 1, 8, 8)
    members = [lively(digits_model().double(), each) for each in x]
    stacked, base = stack_module_state(members), copy.deepcopy(members[0]).to("meta")

    def logits(parameters, buffers, x):
        return functional_call(base, (parameters, buffers), (x,))

    found = vmap(logits, (0, 0, None))(*stacked, x[0])
    assert_close(found, torch.stack([member(x[0]) for member in members]), 1e-9, "logits")
    gradients = vmap(grad(lambda *given: logits(*given).square().sum()))(*stacked, x)
    for i, member in enumerate(members):
        member(x[i]).square().sum().backward()
        for name, parameter in member.named_parameters():
            assert_close(gradients[name][i], parameter.grad, 1e-9, f"member {i}, {name}")


# --- batch norms in training


def test_running_statistics_are_refused_and_norms_without_them_train():
    model, x = randomize(digits_model().double()).train(), random(2, 1, 8, 8)
    with pytest.raises(RuntimeError):  # PyTorch's own words
        assert_gradients_of_each_sample(model, x)
    replace_all_batch_norm_modules_(model)
    assert_gradients_of_each_sample(model, x)
    parameters, buffers = state_of(model)
    found = grad(lambda p: functional_call(model, (p, buffers), (x,)).square().sum())(parameters)
    model(x).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert_close(found[name], parameter.grad, 1e-9, name)


def test_borders_need_running_statistics():
    """Those of SDT-V2's convolutions."""
    model = replace_all_batch_norm_modules_(small_model("sdt_v2"))
    with pytest.raises(LrfdynError, match=r"^bn: expected running statistics"):
        model(torch.randn(2, 3, 32, 32))
