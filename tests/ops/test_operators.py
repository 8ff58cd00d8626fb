"""The kernels as registered operators: schema, fake form, gradient, and their forms in a traced graph."""

from __future__ import annotations

import pytest
import torch

from lrfdyn.ops.bn_lif import Integer, Norm
from lrfdyn.ops.bn_lif.operator import neuron_numbers, neuron_of
from lrfdyn.ops.lif import Dynamics
from tests.ops.kernels import DEVICE, currents, leaf, modes, rand, real_modes, spikes, tokens

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels_everywhere")]
OPERATORS = torch.ops.lrfdyn
LIF_NEURON = Dynamics.lif()
NEURON = neuron_numbers(LIF_NEURON)


def step_bits(batch, channels, height, width):
    values = torch.randint(2**3, (batch, height, width, channels), dtype=torch.uint8)
    return values.to(DEVICE).permute(0, 3, 1, 2)


def plain(tensors):
    """Without gradients, as a backward pass has them."""
    return tuple(None if x is None else x.detach() for x in tensors)


def of_norm(channels=8, training=True):
    one = torch.ones(channels, device=DEVICE)
    return Norm(leaf(one), leaf(one / 2), 0 * one, one.clone(), training)


def bn_lif_arguments(
    neuron=LIF_NEURON, pool=False, first=False, residual=False, offset=False, repeats=1, training=True
):  # fmt: skip
    x, norm = currents(3 if repeats == 1 else 1, 2, 8, 5, 4), of_norm()
    stats = torch.stack((norm.running_mean, norm.running_var, norm.running_var)).detach()
    given = leaf(rand(x.shape[0] * repeats, 2, 8, *((3, 2) if first else (5, 4)), seed=3)) if residual else None
    bias = leaf(rand(8, seed=4)) if offset else None
    numbers = neuron_numbers(neuron)
    return x, stats, norm.weight, norm.bias, bias, given, *numbers, repeats, pool, first, True, training


def bn_lif_backward(neuron=LIF_NEURON, **options):
    """The backward pass of a forward one with these options, from what that one keeps."""
    x, stats, weight, bias, *_, repeats, pool, first, _, training = given = bn_lif_arguments(neuron, **options)
    with torch.no_grad():
        out, _, codes, maxima = OPERATORS.bn_lif(*given)
    kept = (codes if pool or first else None, maxima if first else None)
    arguments = (x, stats, weight, bias, *kept, rand(*out.shape, seed=8), *neuron_numbers(neuron), repeats, training)
    return OPERATORS.bn_lif_backward, tuple(a.detach() if isinstance(a, torch.Tensor) else a for a in arguments)


def attention_bits():
    return [torch.randint(2, (1, 5, 2, 16), dtype=torch.uint8).to(DEVICE).transpose(1, 2) for _ in range(3)]


# Operator and arguments; made when a test runs.
CALLS = {
    "lif": lambda: (OPERATORS.lif, (currents(3, 2, 8, 5, 4), None, *NEURON, False, True)),
    "lif-strided": lambda: (OPERATORS.lif, (leaf(rand(3, 2, 10)[..., ::2]), None, *NEURON, False, True)),
    "lif-states": lambda: (OPERATORS.lif, (leaf(rand(3, 2, 5)), leaf(rand(2, 5)), *NEURON, True, False)),
    "integer_spike": lambda: (OPERATORS.integer_spike, (currents(2, 2, 8, 3, 4), 4, 0.25)),
    "batch_statistics": lambda: (
        OPERATORS.batch_statistics,
        (rand(2, 2, 8, 3, 4), rand(8), rand(8), rand(8), rand(8), 0.1, 1e-5, 1),
    ),
    "running_statistics": lambda: (
        OPERATORS.running_statistics,
        (rand(2, 2, 8, 3, 4), rand(8), None, rand(8), rand(8).abs(), 1e-5),
    ),
    "bn_lif": lambda: (OPERATORS.bn_lif, bn_lif_arguments()),
    "bn_lif-pool": lambda: (OPERATORS.bn_lif, bn_lif_arguments(pool=True)),
    "bn_lif-residual": lambda: (OPERATORS.bn_lif, bn_lif_arguments(residual=True)),
    "bn_lif-offset": lambda: (OPERATORS.bn_lif, bn_lif_arguments(offset=True, training=False)),
    "bn_lif-repeated": lambda: (OPERATORS.bn_lif, bn_lif_arguments(repeats=3)),
    "bn_lif-integer": lambda: (OPERATORS.bn_lif, bn_lif_arguments(Integer())),
    "bn_lif-none": lambda: (OPERATORS.bn_lif, bn_lif_arguments(None, residual=True)),
    "bn_lif-none-repeated": lambda: (OPERATORS.bn_lif, bn_lif_arguments(None, repeats=3, residual=True)),
    "bn_lif-none-first": lambda: (OPERATORS.bn_lif, bn_lif_arguments(None, first=True)),
    "bn_lif-first": lambda: (OPERATORS.bn_lif, bn_lif_arguments(first=True)),
    "bn_lif-first-repeated": lambda: (OPERATORS.bn_lif, bn_lif_arguments(first=True, repeats=3, residual=True)),
    "bn_lif-first-integer": lambda: (OPERATORS.bn_lif, bn_lif_arguments(Integer(), first=True, training=False)),
    "dendrite": lambda: (
        OPERATORS.dendrite,
        (leaf(spikes(2, 5, 8)), *modes(8, 2), torch.float32, None, None, False),
    ),
    "dendrite-both": lambda: (
        OPERATORS.dendrite,
        (leaf(spikes(2, 5, 8)), *modes(2, 8, 1), torch.bfloat16, None, None, False),
    ),
    "dendrite-real": lambda: (
        OPERATORS.dendrite,
        (leaf(spikes(2, 5, 8)), *real_modes(8, 1), torch.float32, None, None, False),
    ),
    "dendrite-state": lambda: (
        OPERATORS.dendrite,
        (rand(2, 5, 8), *(m.detach() for m in modes(8, 1)), torch.float32, None, rand(2, 8, 1, 2), True),
    ),
    "dendrite-packed": lambda: (
        OPERATORS.dendrite,
        (leaf(spikes(3, 5, 8)), *modes(8, 1), torch.float32, step_bits(1, 8, 1, 5)[:, :, 0].mT, None, False),
    ),
    "lrf": lambda: (OPERATORS.lrf, (currents(1, 2, 8, 3, 4)[0], leaf(rand(2, 8, 3, 3)), (1, 3), None, True, None)),
    "lrf-residual": lambda: (
        OPERATORS.lrf,
        (leaf(rand(2, 8, 3, 4)), leaf(rand(1, 8, 3, 3)), (1,), leaf(rand(2, 8, 3, 4, seed=1)), False, None),
    ),
    "lrf-packed": lambda: (
        OPERATORS.lrf,
        (leaf(spikes(3, 8, 3, 4)), leaf(rand(1, 8, 3, 3)), (1,), None, False, step_bits(1, 8, 3, 4)),
    ),
    "spike_attention": lambda: (
        OPERATORS.spike_attention,
        (*(tokens(2, 5, 2, 16, seed=i) for i in range(3)), 0.5, False, None, None, None),
    ),
    "spike_attention-causal": lambda: (
        OPERATORS.spike_attention,
        (*(tokens(1, 5, 2, size, seed=size) for size in (16, 16, 8)), 0.5, True, None, None, None),
    ),
    "spike_attention-packed": lambda: (
        OPERATORS.spike_attention,
        (*(tokens(2, 5, 2, 16, seed=i) for i in range(3)), 0.5, False, *attention_bits()),
    ),
    "spike_conv": lambda: (
        OPERATORS.spike_conv,
        (currents(3, 2, 8, 3, 4), None, leaf(rand(6, 8, 1, 1)), (1, 1), (0, 0), 1),
    ),
    "spike_conv-3x3": lambda: (
        OPERATORS.spike_conv,
        (leaf(rand(3, 2, 8, 3, 4)), None, leaf(rand(6, 8, 3, 3)), (2, 2), (1, 1), 1),
    ),
    "spike_conv-packed": lambda: (
        OPERATORS.spike_conv,
        (currents(3, 2, 8, 3, 4), step_bits(2, 8, 3, 4), leaf(rand(6, 8, 1, 1)), (1, 1), (0, 0), 1),
    ),
    "spike_conv-3x3-packed": lambda: (
        OPERATORS.spike_conv,
        (currents(3, 2, 8, 3, 4), step_bits(2, 8, 3, 4), rand(6, 8, 3, 3), (1, 1), (1, 1), 1),
    ),
    "lif_backward": lambda: (OPERATORS.lif_backward, (rand(3, 2, 8, 5, 4), None, rand(3, 2, 8, 5, 4), None, *NEURON)),
    "lif_backward-states": lambda: (
        OPERATORS.lif_backward,
        (rand(3, 2, 5), rand(2, 5), rand(3, 2, 5, seed=1), rand(2, 5, seed=2), *NEURON),
    ),
    "lif_backward-strided": lambda: (
        OPERATORS.lif_backward,
        (rand(3, 2, 10)[..., ::2], None, currents(3, 1, 5, 2, 1).detach()[:, 0, ..., 0].mT, None, *NEURON),
    ),
    "integer_spike_backward": lambda: (
        OPERATORS.integer_spike_backward,
        (rand(2, 2, 8, 3, 4), currents(2, 2, 8, 3, 4).detach(), 4, 0.25),
    ),
    "bn_lif_backward": bn_lif_backward,
    "bn_lif_backward-pool": lambda: bn_lif_backward(pool=True),
    "bn_lif_backward-repeated": lambda: bn_lif_backward(repeats=3, training=False),
    "bn_lif_backward-integer": lambda: bn_lif_backward(Integer()),
    "bn_lif_backward-none": lambda: bn_lif_backward(None),
    "bn_lif_backward-none-first": lambda: bn_lif_backward(None, first=True),
    "bn_lif_backward-first": lambda: bn_lif_backward(first=True),
    "bn_lif_backward-first-repeated": lambda: bn_lif_backward(first=True, repeats=3),
    "dendrite_backward": lambda: (
        OPERATORS.dendrite_backward,
        (spikes(2, 5, 8), *plain(modes(8, 2)), rand(2, 5, 8), False, torch.float32),
    ),
    "dendrite_backward-both": lambda: (
        OPERATORS.dendrite_backward,
        (spikes(2, 5, 8), *plain(modes(2, 8, 1)), rand(2, 5, 8), False, torch.bfloat16),
    ),
    "dendrite_backward-real": lambda: (
        OPERATORS.dendrite_backward,
        (spikes(2, 5, 8), *plain(real_modes(8, 1)), rand(2, 5, 8), False, torch.float32),
    ),
    "dendrite_backward-packed": lambda: (
        OPERATORS.dendrite_backward,
        (step_bits(1, 8, 1, 5)[:, :, 0].mT, *plain(modes(8, 1)), rand(3, 5, 8), True, torch.float32),
    ),
    "lrf_backward": lambda: (
        OPERATORS.lrf_backward,
        (rand(2, 8, 3, 4), rand(2, 8, 3, 3), rand(2, 8, 3, 4, seed=1), (1, 3), True, False, torch.float32),
    ),
    "lrf_backward-packed": lambda: (
        OPERATORS.lrf_backward,
        (step_bits(1, 8, 3, 4), rand(1, 8, 3, 3), rand(3, 8, 3, 4), (1,), False, True, torch.bfloat16),
    ),
    "spike_attention_backward": lambda: (
        OPERATORS.spike_attention_backward,
        (*plain(tokens(2, 5, 2, 16, seed=i) for i in range(3)), rand(2, 2, 5, 16), 0.5, False, False),
    ),
    "spike_attention_backward-causal": lambda: (
        OPERATORS.spike_attention_backward,
        (*plain(tokens(1, 5, 2, size, seed=size) for size in (16, 16, 8)), rand(1, 2, 5, 8), 0.5, True, False),
    ),
    "spike_attention_backward-packed": lambda: (
        OPERATORS.spike_attention_backward,
        (*attention_bits(), rand(2, 2, 5, 16), 0.5, False, True),
    ),
    "spike_conv_backward": lambda: (
        OPERATORS.spike_conv_backward,
        (rand(3, 2, 8, 3, 4), rand(6, 8, 1, 1), rand(3, 2, 6, 3, 4), (1, 1), (0, 0), 1, False, True, True),
    ),
    "spike_conv_backward-3x3-input": lambda: (
        OPERATORS.spike_conv_backward,
        (rand(3, 2, 8, 3, 4), rand(6, 8, 3, 3), rand(3, 2, 6, 2, 2), (2, 2), (1, 1), 1, False, True, False),
    ),
    "spike_conv_backward-packed": lambda: (
        OPERATORS.spike_conv_backward,
        (step_bits(2, 8, 3, 4), rand(6, 8, 1, 1), rand(3, 2, 6, 3, 4), (1, 1), (0, 0), 1, True, True, True),
    ),
    "spike_conv_backward-grouped-weight": lambda: (
        OPERATORS.spike_conv_backward,
        (step_bits(2, 8, 3, 4), rand(8, 1, 3, 3), rand(3, 2, 8, 3, 4), (1, 1), (1, 1), 8, True, False, True),
    ),
    "pack_channels": lambda: (OPERATORS.pack_channels, (spikes(2, 3, 12),)),
    "unpack_channels": lambda: (
        OPERATORS.unpack_channels,
        (step_bits(2, 2, 3, 1)[..., 0].contiguous(), 20, torch.float32),
    ),
    "unchanged_bits": lambda: (OPERATORS.unchanged_bits, (spikes(3, 2, 4), step_bits(2, 4, 1, 1)[..., 0, 0])),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_registration_holds(name):
    """Schema, fake form (shapes, strides, types), gradient, and a traced call with shapes of any size."""
    operator, arguments = CALLS[name]()
    assert operator._qualified_op_name == f"lrfdyn::{name.partition('-')[0]}"
    torch.library.opcheck(operator.default, arguments)


def test_every_operator_is_checked():
    named = (name.partition("::") for name in torch._C._dispatch_get_all_op_names())
    known = {name.partition(".")[0] for namespace, _, name in named if namespace == "lrfdyn"}
    assert known == {name.partition("-")[0] for name in CALLS}


NEURONS = [Dynamics.lif(), Dynamics.ms_lif(), Dynamics.paper_lif(v_reset=0.25), Integer(2, 1.0), None]


@pytest.mark.parametrize("neuron", NEURONS, ids=str)
def test_a_neuron_comes_back_from_its_numbers(neuron):
    assert neuron_of(*neuron_numbers(neuron)) == neuron
