"""The integer spike: rounding, its gradient, and its equality with binary steps."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from lrfdyn.errors import LrfdynError
from lrfdyn.ops.lif import integer_spike
from tests.conftest import LAYOUTS, arrange, binary_steps, random, shape_id


def test_halves_round_to_even():
    x = torch.tensor([-1.0, -0.5, 0.0, 0.5, 0.51, 1.5, 2.5, 3.5, 4.0, 4.5, 9.0])
    assert integer_spike(x, normalize=False).tolist() == [0, 0, 0, 0, 1, 2, 2, 4, 4, 4, 4]
    assert integer_spike(x).tolist() == [0, 0, 0, 0, 0.25, 0.5, 0.5, 1, 1, 1, 1]


@pytest.mark.parametrize("levels", [1, 2, 4, 8], ids="D{}".format)
@pytest.mark.parametrize("normalize", [True, False])
def test_gradient_inside_the_range_ends_included(levels, normalize):
    inside, outside = [0.0, 0.3, levels / 2, levels - 0.01, levels], [-1e-6, -3.0, levels + 1e-5, levels + 7.0]
    x = torch.tensor([*inside, *outside], dtype=torch.float64, requires_grad=True)
    incoming = random(x.numel())
    (grad,) = torch.autograd.grad(integer_spike(x, levels, normalize), x, incoming)
    slope = 1 / levels if normalize else 1.0
    expected = incoming * torch.tensor([slope] * len(inside) + [0.0] * len(outside), dtype=torch.float64)
    assert torch.equal(grad, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(1,), (3, 1, 5), (2, 3, 4, 5)], ids=shape_id)
def test_any_layout(shape, layout):
    x = 3 * random(*shape)
    y = arrange(x, layout).detach().requires_grad_()
    spikes = integer_spike(y)
    assert torch.equal(spikes.detach(), x.clamp(0, 4).round() / 4)
    (grad,) = torch.autograd.grad(spikes.sum(), y)
    assert torch.equal(grad, ((x >= 0) & (x <= 4)) / 4)


def test_nothing_is_prepared_for_a_gradient_that_nobody_asks_for():
    class Comparisons(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += func.overloadpacket in (torch.ops.aten.ge, torch.ops.aten.le)
            return func(*args, **(kwargs or {}))

    x = torch.randn(5)
    for asks, expected in ((False, 0), (True, 2)):
        with Comparisons() as seen:
            integer_spike(x.requires_grad_(asks))
        assert seen.count == expected
    with torch.no_grad(), Comparisons() as seen:
        integer_spike(x.requires_grad_(False) * 2)
    assert seen.count == 0


@given(st.integers(1, 9), st.integers(0, 999))
def test_binary_steps_have_the_integer_spike_as_their_mean(levels, seed):
    spikes = integer_spike(levels * random(3, 5, seed=seed), levels)
    steps = binary_steps(spikes, levels)
    assert steps.shape == (levels, 3, 5)
    assert set(steps.unique().tolist()) <= {0.0, 1.0}
    assert torch.equal(steps.sum(0), (spikes * levels).round())
    torch.testing.assert_close(steps.mean(0), spikes, rtol=0, atol=1e-15)


def dyadic(*shape: int, seed: int) -> torch.Tensor:
    """Multiples of 2^-12: sums and means over 4 steps are exact, so equality can be exact."""
    return torch.round(random(*shape, seed=seed) * 2**12) / 2**12


def linear(x):
    return F.linear(x, dyadic(7, 5, seed=2), dyadic(7, seed=3))


def conv(x):
    return F.conv2d(x, dyadic(6, 5, 3, 3, seed=2), dyadic(6, seed=3), padding=1, stride=2)


@pytest.mark.parametrize(("layer", "shape"), [(linear, (3, 5)), (linear, (1, 5)), (conv, (2, 5, 7, 6))])
@pytest.mark.parametrize("levels", [1, 2, 4, 8], ids="D{}".format)
def test_one_integer_spike_is_that_many_binary_steps(layer, shape, levels):
    spikes = integer_spike(levels * random(*shape).abs(), levels)
    steps = binary_steps(spikes, levels)
    assert torch.equal(layer(spikes), torch.stack([layer(step) for step in steps]).mean(0))


def test_bad_input_names_the_argument():
    with pytest.raises(LrfdynError, match=r"^levels: .* got 0"):
        integer_spike(torch.zeros(2), levels=0)
