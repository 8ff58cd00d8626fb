"""The neuron kernels, alone and behind batch norm, against their definitions."""

from __future__ import annotations

from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch

from lrfdyn.errors import LrfdynError
from lrfdyn.ops.bits import step_bits_of
from lrfdyn.ops.bits_triton import unpack_steps
from lrfdyn.ops.bn_lif import Integer, Norm, bn_lif, bn_lif_reference
from lrfdyn.ops.lif import Dynamics, integer_spike, lif, lif_reference
from lrfdyn.ops.lif.triton import IntegerSpikeKernel
from lrfdyn.ops.spike_conv import spike_conv
from tests.ops.kernels import DEVICE, DTYPES, GPU, TOLERANCE, close, compare, rand, same_bits_twice, with_kernels

pytestmark = pytest.mark.gpu
lif_triton, bn_lif_triton = with_kernels(lif), with_kernels(bn_lif)

DYNAMICS = {
    "lif": Dynamics.lif(),
    "lif-0.5": Dynamics.lif(threshold=0.5),
    "if": Dynamics.integrate_and_fire(),
    "if-attached": Dynamics.integrate_and_fire(detach_reset=False),
    "ms": Dynamics.ms_lif(),
    "paper": Dynamics.paper_lif(v_reset=0.25),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", DYNAMICS)
def test_lif(name, dtype):
    d = DYNAMICS[name]
    x = 2 * rand(4, 3, 5, 7, dtype=dtype)
    compare(lambda x: lif_triton(x, d)[0], lambda x: lif_reference(x, d)[0], [x], TOLERANCE[dtype], binary=True)


@pytest.mark.parametrize("which", [0, 1], ids=["spikes", "state"])
@pytest.mark.parametrize("shape", [(1, 3), (1, 1), (8, 1025), (3, 2, 33)], ids=str)
def test_lif_with_states(shape, which):
    d = Dynamics.lif()
    inputs = [2 * rand(*shape), rand(*shape[1:], seed=1)]
    compare(
        lambda x, h: lif_triton(x, d, h, True)[which],
        lambda x, h: lif_reference(x, d, h)[which],
        inputs,
        1e-5,
        binary=which == 0,
    )


def test_lif_reads_any_layout_and_packs_the_spikes():
    x = 2 * rand(4, 2, 6, 3, 5).permute(0, 1, 4, 2, 3)
    spikes, _ = lif_triton(x, Dynamics.lif())
    assert torch.equal(spikes, lif_reference(x, Dynamics.lif())[0])
    assert torch.equal(unpack_steps(step_bits_of(spikes), 4, torch.float32), spikes)
    strided = torch.cat((x, x), -1)[..., ::2]
    assert torch.equal(lif_triton(strided, Dynamics.lif())[0], lif_reference(strided, Dynamics.lif())[0])


@pytest.mark.parametrize("steps", [8, 9, 12, 16, 17])
def test_a_byte_holds_the_spikes_of_eight_steps_and_of_no_more(steps):
    """Of more steps there are no bytes, and what reads the spikes keeps them whole."""
    d = Dynamics.integrate_and_fire()
    x = 2 * rand(steps, 1, 3, 3, 8).permute(0, 1, 4, 2, 3)
    weight = rand(4, 8, 1, 1, seed=1)

    def through(neuron):
        def call(x, weight):
            spikes = neuron(x, d)[0]
            assert (step_bits_of(spikes) is not None) == (neuron is lif_triton and steps <= 8)
            return spike_conv(spikes, weight, (1, 1), (0, 0), packed=step_bits_of(spikes))

        return call

    compare(through(lif_triton), through(lif_reference), [x, weight], 1e-5)
    # Behind a norm, whether the steps are given or repeated, and whether a pool follows.
    for given, repeats, pool in ((x, 1, False), (x, 1, True), (x[:1], steps, True)):
        kept = norm_of(8, torch.float32, False)(torch.ones(8, device=x.device), rand(8, seed=2))
        spikes, expected = (
            function(given, kept, d, repeats=repeats, pool=pool) for function in (bn_lif_triton, bn_lif_reference)
        )
        assert torch.equal(spikes, expected)
        assert 0.05 < spikes.mean() < 0.95
        bits = step_bits_of(spikes)
        assert (bits is not None) == (steps <= 8)
        if bits is not None:
            assert torch.equal(unpack_steps(bits, steps, torch.float32), spikes)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [0.25, 1.0])
def test_integer_spike(scale, dtype):
    x = 4 * rand(3, 5, 77, dtype=dtype)
    compare(
        lambda x: IntegerSpikeKernel.apply(x, 4, scale),
        lambda x: integer_spike(x, 4, scale != 1),
        [x],
        TOLERANCE[dtype],
    )
    halves = torch.tensor([0.5, 1.5, 2.5, 3.5, -1.0, 9.0], device=x.device)
    assert torch.equal(IntegerSpikeKernel.apply(halves, 4, scale), integer_spike(halves, 4, scale != 1))


def norm_of(channels, dtype, training):
    """A norm whose buffers are fresh, for the parameters that the comparison differentiates."""

    def make(weight, bias):
        mean = torch.linspace(-1, 1, channels, dtype=dtype).to(weight.device)
        var = torch.linspace(0.5, 2, channels, dtype=dtype).to(weight.device)
        return Norm(weight, bias, mean, var, training)

    return make


# time, batch, channels, height, width, repeats, pool, residual, training
CASES = {
    "T4-B2-C48-5x8": (4, 2, 48, 5, 8, 1, None, False, True),
    "T4-B1-C40-3x7-residual": (4, 1, 40, 3, 7, 1, None, True, True),
    "T1-B3-C16-5x5": (1, 3, 16, 5, 5, 1, None, False, True),
    "repeated-C20-5x7": (1, 1, 20, 5, 7, 4, None, False, True),
    "repeated-C20-5x7-residual": (1, 1, 20, 5, 7, 3, None, True, True),
    "pool-C32-6x7": (4, 2, 32, 6, 7, 1, "pool", False, True),
    "pool-repeated-C32-5x5": (1, 2, 32, 5, 5, 4, "pool", False, True),
    "pool-T5-C8-5x4": (5, 1, 8, 5, 4, 1, "pool", False, True),
    "pool-repeated-T8-C8-4x3": (1, 2, 8, 4, 3, 8, "pool", False, True),
    "eval-C16-5x7": (3, 2, 16, 5, 7, 1, None, False, False),
    "eval-C40-5x7-residual": (3, 2, 40, 5, 7, 1, None, True, False),
    "first-C32-6x7": (4, 2, 32, 6, 7, 1, "pool_first", False, True),
    "first-T1-B1-C20-5x3": (1, 1, 20, 5, 3, 1, "pool_first", False, True),
    "first-repeated-C32-5x5": (1, 2, 32, 5, 5, 4, "pool_first", False, True),
    "first-T5-C136-5x4-residual": (5, 1, 136, 5, 4, 1, "pool_first", True, True),
    "first-T8-C8-1x6": (8, 2, 8, 1, 6, 1, "pool_first", False, True),
    "first-eval-C16-7x8": (3, 2, 16, 7, 8, 1, "pool_first", False, False),
}
if GPU:
    CASES |= {
        "T4-B16-C384-8x8": (4, 16, 384, 8, 8, 1, None, True, True),
        "pool-B8-C192-32x32": (4, 8, 192, 32, 32, 1, "pool", False, True),
        "first-B8-C128-56x56": (4, 8, 128, 56, 56, 1, "pool_first", False, True),
        "repeated-B8-C48-32x32": (1, 8, 48, 32, 32, 4, None, False, True),
        "first-repeated-B8-C64-112x112": (1, 8, 64, 112, 112, 4, "pool_first", False, True),
    }
NEURONS = {"lif": Dynamics.lif(), "integer": Integer(), "none": None}


def norm_weight(channels):
    """Of both signs, since a negative one turns the order in a pool around."""
    return (1 + rand(channels, seed=1).abs()) * (1 - 2 * (torch.arange(channels, device=DEVICE) % 3 == 0).float())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("neuron", NEURONS.values(), ids=NEURONS)
@pytest.mark.parametrize("case", CASES)
def test_bn_lif(case, neuron, dtype):
    time, batch, channels, height, width, repeats, pool, residual, training = CASES[case]
    if pool == "pool" and isinstance(neuron, Integer):
        pytest.skip("integer spikes are pooled by the plain operation")
    x = (3 * rand(time, batch, height, width, channels) + 5).to(dtype).permute(0, 1, 4, 2, 3)
    grid = ((height + 1) // 2, (width + 1) // 2) if pool else (height, width)
    inputs = [
        x,
        norm_weight(channels),
        rand(channels, seed=2).abs(),
        2 * rand(time * repeats, batch, channels, *grid, seed=3, dtype=dtype) if residual else None,
    ]
    offset, first = rand(channels, seed=4), pool == "pool_first" or (pool is not None and neuron is None)
    kept = {}

    def run(function, name, dtype):
        make = norm_of(channels, dtype, training)

        def call(x, weight, bias, residual):
            norm = kept[name] = make(weight, bias)
            options = {"offset": offset.to(dtype), "repeats": repeats, "residual": residual}
            if function is bn_lif_reference:
                # The gradient of PyTorch's batch norm on a CPU is wrong where one image of one step is channels-last
                # and the gradient that comes is not.
                x = x.contiguous()
            return function(x, norm, neuron, **options, **({pool: True} if pool else {}))

        return call

    compare(
        run(bn_lif_triton, "ours", torch.float32),
        run(bn_lif_reference, "theirs", torch.float64),
        inputs,
        TOLERANCE[dtype] * (2 if first else 1),  # the gradient between pool and norm is rounded too
        binary=not residual and neuron is not None,
    )
    close(kept["ours"].running_mean, kept["theirs"].running_mean, 1e-5, "running mean")
    close(kept["ours"].running_var, kept["theirs"].running_var, 1e-5, "running variance")


@pytest.mark.parametrize("steps", [1, 9, 16])
def test_potentials_have_any_number_of_steps(steps):
    """No bits are kept of them."""
    x = rand(steps, 2, 3, 5, 8).permute(0, 1, 4, 2, 3)
    for pool in (False, True):

        def run(function, dtype, pool=pool):
            make = norm_of(8, dtype, True)
            return lambda x, w, b: function(x, make(w, b), None, pool_first=pool)

        inputs = [x, norm_weight(8), rand(8, seed=2)]
        with watched_kernels() as launched:
            out = compare(run(bn_lif_triton, torch.float32), run(bn_lif_reference, torch.float64), inputs, 1e-5)
        assert launched
        assert step_bits_of(out) is None


@contextmanager
def watched_kernels():
    """What the statistics of norms were computed of by kernels."""
    from lrfdyn.ops.bn_lif import triton

    launched, launch = [], triton.launch_statistics
    with patch.object(triton, "launch_statistics", lambda x, *rest: launched.append(x) or launch(x, *rest)):
        yield launched


def test_of_equal_potentials_the_first_is_the_maximum():
    """Of a norm that scales by nothing all are equal; what is no number is handed on, as by the library."""
    x = rand(2, 1, 5, 5, 6).round().permute(0, 1, 4, 2, 3)  # many are the same
    weight = torch.tensor([1.0, -1.0, 0.0, 2.0, -2.0, 0.0], device=DEVICE)
    inputs = [x, weight, rand(6, seed=2)]

    def run(function, dtype, training=True):
        make = norm_of(6, dtype, training)
        return lambda x, w, b: function(x, make(w, b), None, pool_first=True)

    compare(run(bn_lif_triton, torch.float32), run(bn_lif_reference, torch.float64), inputs, 1e-5)
    with torch.no_grad():
        x[0, 0, 0, 1, 1] = float("nan")
        got, expected = (run(f, torch.float32, False)(*inputs) for f in (bn_lif_triton, bn_lif_reference))
    assert expected.isnan().any()
    assert torch.equal(got.isnan(), expected.isnan())


def test_one_pool_at_most():
    one = torch.ones(8, device=DEVICE)
    norm = norm_of(8, torch.float32, True)(one, 0 * one)
    with pytest.raises(LrfdynError, match="pool_first"):
        bn_lif(rand(1, 1, 8, 4, 4), norm, None, pool=True, pool_first=True)
    with pytest.raises(LrfdynError, match=r"residual: .*pooled"):
        bn_lif(rand(1, 1, 8, 4, 4), norm, Dynamics.lif(), pool=True, residual=rand(1, 1, 8, 2, 2))
    pooled, residual = bn_lif(rand(1, 1, 8, 4, 4), norm, None, pool=True), rand(1, 1, 8, 2, 2)
    added = bn_lif(rand(1, 1, 8, 4, 4), norm, None, pool=True, residual=residual)
    assert torch.equal(added, residual + pooled)


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("norm.weight", lambda given: given["norm"].update(weight=torch.ones(4))),
        ("norm.bias", lambda given: given["norm"].update(bias=torch.ones(1))),
        ("norm.running_mean", lambda given: given["norm"].update(running_mean=torch.ones(9))),
        ("norm.running_var", lambda given: given["norm"].update(running_var=torch.ones(8, 1))),
        ("offset", lambda given: given.update(offset=torch.ones(4))),
        ("repeats", lambda given: given.update(repeats=0)),
        ("x", lambda given: given.update(x=torch.ones(1, 1, 8, 1, 1))),
    ],
)
def test_what_does_not_fit_the_channels_is_refused(argument, change):
    """The plain norm refuses it too; a kernel would read and write what belongs to others."""
    norm = {name: torch.ones(8) for name in ("weight", "bias", "running_mean", "running_var")}
    given = {"x": torch.zeros(1, 2, 8, 4, 4), "norm": norm}
    change(given)
    norm = Norm(**given.pop("norm"), training=True)
    with pytest.raises(LrfdynError, match=rf"^{argument}: expected .*, got"):
        bn_lif(given.pop("x"), norm, Dynamics.lif(), **given)


def test_bn_lif_offset_has_no_gradient_in_training():
    x = rand(2, 2, 8, 4, 4)
    offset = torch.zeros(8, device=x.device, requires_grad=True)
    one = torch.ones(8, device=x.device)
    bn_lif_triton(x, Norm(one, one, one.clone(), one.clone(), True), Dynamics.lif(), offset=offset).sum().backward()
    assert torch.equal(offset.grad, torch.zeros_like(offset))


@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize("neuron", NEURONS.values(), ids=NEURONS)
def test_bn_lif_offset_has_a_gradient_in_evaluation(neuron, pool):
    """It shifts what the norm scales: weight / deviation times the gradient of the bias."""
    x = 2 * rand(3, 2, 4, 5, 8).permute(0, 1, 4, 2, 3)

    def run(function, dtype):
        make = norm_of(8, dtype, False)
        return lambda x, w, b, offset: function(x, make(w, b), neuron, offset=offset, pool_first=pool)

    compare(
        run(bn_lif_triton, torch.float32),
        run(bn_lif_reference, torch.float64),
        [x, 1 + rand(8, seed=1).abs(), rand(8, seed=2), rand(8, seed=4)],
        1e-5,
        binary=neuron is not None,
    )


def test_bn_lif_keeps_the_variance_of_channels_far_from_zero():
    x = (1000 + rand(4, 2, 4, 4, 16)).permute(0, 1, 4, 2, 3)
    one = torch.ones(16, device=x.device)
    norm = Norm(one, one, torch.zeros_like(one), torch.zeros_like(one), True, momentum=1.0)
    bn_lif_triton(x, norm, Dynamics.lif())
    close(norm.running_var, x.double().var((0, 1, 3, 4)), 1e-4, "variance")


@pytest.mark.parametrize("neuron", [Dynamics.lif(), None], ids=["lif", "none"])
@pytest.mark.parametrize("pool", [{}, {"pool": True}, {"pool_first": True}], ids=str)
def test_bn_lif_gives_the_same_bits_twice(pool, neuron):
    x = rand(4, 2, 6, 6, 24).permute(0, 1, 4, 2, 3).requires_grad_()
    weight = torch.ones(24, device=x.device, requires_grad=True)
    zero = torch.zeros(24, device=x.device)

    def run():
        norm = Norm(weight, zero.clone().requires_grad_(), zero.clone(), zero + 1, True)
        out = bn_lif_triton(x, norm, neuron, **pool)
        return out, *torch.autograd.grad(out, (x, weight), torch.ones_like(out)), norm.running_var

    same_bits_twice(run)


@pytest.mark.parametrize("pool", [{}, {"pool": True}, {"pool_first": True}], ids=str)
@pytest.mark.parametrize("steps", [4, 6])
def test_in_inference_mode_the_spikes_are_the_same_and_nothing_is_kept(pool, steps):
    x = rand(steps, 2, 5, 7, 24).permute(0, 1, 4, 2, 3)
    zero = torch.zeros(24, device=x.device)
    norm = Norm(zero + 2, zero, zero, zero + 1, False)
    expected = bn_lif_triton(x, norm, Dynamics.lif(), **pool)
    assert 0.05 < expected.mean() < 0.95
    assert step_bits_of(expected) is not None
    with torch.inference_mode():
        spikes = bn_lif_triton(x, norm, Dynamics.lif(), **pool)
        assert step_bits_of(spikes) is None
        assert step_bits_of(lif_triton(x, Dynamics.lif())[0]) is None
    assert torch.equal(spikes, expected)


@pytest.mark.parametrize(("kernel", "stride"), [(1, 1), (3, 1), (3, 2)])
@pytest.mark.parametrize("packed", [False, True])
def test_convolution_of_packed_spikes(kernel, stride, packed):
    x, _ = lif_triton(3 * rand(4, 2, 5, 5, 8).permute(0, 1, 4, 2, 3), Dynamics.lif())
    bits = step_bits_of(x) if packed else None
    weight = rand(6, 8, kernel, kernel, seed=1)
    padding = (kernel // 2,) * 2
    compare(
        lambda x, w: spike_conv(x, w, (stride,) * 2, padding, packed=bits),
        lambda x, w: torch.conv2d(x.flatten(0, 1), w, None, stride, padding).unflatten(0, x.shape[:2]),
        [x, weight],
        1e-5,
    )
