"""Spiking neurons: the definition against scalar arithmetic, the fused form against the definition."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lrfdyn.errors import LrfdynError
from lrfdyn.ops.lif import Dynamics, lif, lif_fused, lif_reference
from lrfdyn.ops.lif.reference import SURROGATES
from tests.conftest import LAYOUTS, arrange, assert_same, random, run, shape_id


def logistic_slope(x: float) -> float:
    return 4 / (1 + math.exp(-4 * x)) * (1 - 1 / (1 + math.exp(-4 * x)))


def arctangent_slope(x: float) -> float:
    return 1 / (1 + (math.pi * x) ** 2)


def window(x: float) -> float:
    return float(-0.5 < x < 0.5)


# The neurons as the field writes them: charge, decay after no spike, reset value, threshold, strict, slope.
# The charges are linear, so the same function carries the tangents.
NEURONS = {
    "lif": (Dynamics.lif(), lambda h, i: h + (i - h) / 2, 1, 0, 1, False, logistic_slope),
    "lif-attention": (Dynamics.lif(threshold=0.5), lambda h, i: h + (i - h) / 2, 1, 0, 0.5, False, logistic_slope),
    "lif-reset": (Dynamics.lif(v_reset=-0.25), lambda h, i: h + (i - h) / 2, 1, -0.25, 1, False, logistic_slope),
    "paper": (Dynamics.paper_lif(), lambda h, i: h + i, 0.5, 0, 1, False, logistic_slope),
    "if": (Dynamics.integrate_and_fire(), lambda h, i: h + i, 1, 0, 1, False, arctangent_slope),
    "ms": (Dynamics.ms_lif(), lambda h, i: h + i, 0.25, 0, 0.5, True, window),
}


def scalar_neuron(name: str, currents: list[float], h: float, detach_reset: bool) -> tuple[list[float], float, list]:
    """Spikes, the last membrane, and the derivative of both by each current and by the first membrane.

    Derivatives go forward in time with the values, so they share nothing with backpropagation.
    """
    _, charge, decay, v_reset, threshold, strict, slope = NEURONS[name]
    directions = len(currents) + 1
    dh = [0.0] * (directions - 1) + [1.0]
    spikes, tangents = [], []
    for t, current in enumerate(currents):
        u = charge(h, current)
        du = [charge(dh[j], float(j == t)) for j in range(directions)]
        s = float(u > threshold if strict else u >= threshold)
        ds = [slope(u - threshold) * d for d in du]
        dr = [0.0] * directions if detach_reset else ds
        h = v_reset * s + decay * u * (1 - s)
        dh = [v_reset * dr[j] + decay * (du[j] * (1 - s) - u * dr[j]) for j in range(directions)]
        spikes.append(s)
        tangents.append(ds)
    return spikes, h, [*tangents, dh]


@pytest.mark.parametrize("detach_reset", [True, False], ids=["detached", "attached"])
@pytest.mark.parametrize("form", [lif_reference, lif_fused])
@pytest.mark.parametrize("name", NEURONS)
@pytest.mark.parametrize("steps", [1, 2, 5], ids="T{}".format)
def test_neuron_is_the_scalar_loop(name, form, detach_reset, steps):
    dynamics = replace(NEURONS[name][0], detach_reset=detach_reset)
    for seed in range(6):
        x = (1.5 * random(steps, seed=seed)).requires_grad_()
        h = (0.3 * random(1, seed=100 + seed)).requires_grad_()
        spikes, state = form(x.unsqueeze(1), dynamics, h)
        expected, last, tangents = scalar_neuron(name, x.tolist(), h.item(), detach_reset)
        assert spikes.flatten().tolist() == expected
        assert state.item() == pytest.approx(last, abs=1e-12)
        for output, tangent in zip([*spikes.flatten(), state.squeeze()], tangents, strict=True):
            grads = torch.autograd.grad(output, [x, h], retain_graph=True)
            assert torch.cat(grads).tolist() == pytest.approx(tangent, abs=1e-12)


@pytest.mark.parametrize("form", [lif_reference, lif_fused])
@pytest.mark.parametrize("detach_reset", [True, False], ids=["detached", "attached"])
def test_two_steps_by_hand(form, detach_reset):
    # U = 0.5 (below), then 0.25 + 0.75 = 1 (exactly the threshold: fires). Loss = S1 + 2 S2 + 3 H2.
    x = torch.tensor([1.0, 1.5], dtype=torch.float64, requires_grad=True)
    spikes, state = form(x, Dynamics.lif(detach_reset=detach_reset))
    assert spikes.tolist() == [0, 1]
    assert state.item() == 0
    (grad,) = torch.autograd.grad(spikes[0] + 2 * spikes[1] + 3 * state, x)
    g1 = 0.419974341614028  # 4 s (1 - s) at s = sigmoid(-2); at the threshold itself the slope is 1
    if detach_reset:
        # dU2 = 2 (H2 was reset and passes nothing), dU1 = g1 + 0.5 * 2; the gain halves both.
        assert grad.tolist() == pytest.approx([(g1 + 1) / 2, 1], abs=1e-12)
    else:
        # dH2/dU2 = 0 - U2 * 1 = -1, so dU2 = 2 - 3; dH1/dU1 = 1 - 0.5 g1.
        assert grad.tolist() == pytest.approx([(g1 - 0.5 * (1 - 0.5 * g1)) / 2, -0.5], abs=1e-12)


@pytest.mark.parametrize("form", [lif_reference, lif_fused])
@pytest.mark.parametrize(("strict", "expected"), [(False, [1, 1, 0]), (True, [0, 1, 0])])
def test_exactly_at_the_threshold(form, strict, expected):
    x = torch.tensor([[0.5, 0.5 + 2**-20, 0.5 - 2**-20]])
    spikes, _ = form(x, Dynamics.ms_lif(strict=strict))
    assert spikes[0].tolist() == expected


@pytest.mark.parametrize("name", NEURONS)
def test_forms_agree_bit_for_bit_on_quarters(name):
    # Currents in quarters meet the thresholds exactly many times, and leave no rounding to hide behind.
    x = torch.randint(-4, 9, (5, 400), generator=torch.Generator().manual_seed(0)).double() / 4
    dynamics = NEURONS[name][0]
    spikes, state = lif_reference(x, dynamics)
    fused_spikes, fused_state = lif_fused(x, dynamics)
    assert torch.equal(spikes, fused_spikes)
    assert torch.equal(state, fused_state)
    for i in range(0, 400, 10):
        expected, last, _ = scalar_neuron(name, x[:, i].tolist(), 0.0, True)
        assert spikes[:, i].tolist() == expected
        assert state[i].item() == last


dynamics_strategy = st.builds(
    Dynamics,
    leak=st.floats(0, 1),
    gain=st.floats(0.2, 1.5),
    decay=st.floats(0, 1),
    threshold=st.floats(0.2, 1.2),
    v_reset=st.sampled_from([0.0, -0.3, 0.2]),
    strict=st.booleans(),
    surrogate=st.sampled_from(sorted(SURROGATES)),
    alpha=st.floats(0.5, 5),
    detach_reset=st.booleans(),
)
SHAPES = [(1,), (1, 1), (1, 3, 5), (4, 1, 1), (5, 2, 3, 7), (3, 1, 4, 3, 3)]


def check_fused(shape, dynamics, layout, with_state, seed=0):
    x = arrange(2 * random(*shape, seed=seed), layout)
    h = arrange(random(*shape[1:], seed=seed + 1), layout) if with_state else None
    assert_same(lambda x, h: lif_fused(x, dynamics, h), lambda x, h: lif_reference(x, dynamics, h), [x, h])
    # With no gradient to keep potentials for, memory is reused.
    for a, b in zip(lif_fused(x, dynamics, h), lif_reference(x, dynamics, h), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    # One output alone leaves the gradient of the other at zero.
    assert_same(lambda x, h: lif_fused(x, dynamics, h)[0], lambda x, h: lif_reference(x, dynamics, h)[0], [x, h])
    assert_same(lambda x, h: lif_fused(x, dynamics, h)[1], lambda x, h: lif_reference(x, dynamics, h)[1], [x, h])


@pytest.mark.parametrize("with_state", [False, True], ids=["rest", "state"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
def test_fused_is_the_definition(shape, layout, with_state):
    for name in ("lif-reset", "ms"):
        check_fused(shape, NEURONS[name][0], layout, with_state)


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=5),
    dynamics_strategy,
    st.sampled_from(LAYOUTS),
    st.booleans(),
    st.integers(0, 999),
)
def test_fused_is_the_definition_for_any_neuron(shape, dynamics, layout, with_state, seed):
    check_fused(tuple(shape), dynamics, layout, with_state, seed)


def test_one_current_shown_at_every_step():
    # A static image reaches the neuron expanded over time: no step may write into another.
    x = random(1, 7, seed=3).expand(4, 7)
    spikes, state = lif_fused(x, Dynamics.lif())
    expected, expected_state = lif_reference(x, Dynamics.lif())
    assert torch.equal(spikes, expected)
    assert torch.equal(state, expected_state)


@pytest.mark.parametrize("detach_reset", [True, False], ids=["detached", "attached"])
@pytest.mark.parametrize("name", NEURONS)
@pytest.mark.parametrize("split", [(1, 1), (1, 4), (3, 2)], ids="T{0[0]}+T{0[1]}".format)
def test_state_carries_over_a_split(name, split, detach_reset):
    dynamics = replace(NEURONS[name][0], detach_reset=detach_reset)

    def in_parts(x, h):
        first, h = lif(x[: split[0]], dynamics, h, output_final_state=True)
        second, h = lif(x[split[0] :], dynamics, h, output_final_state=True)
        return torch.cat([first, second]), h

    x, h = 1.5 * random(sum(split), 2, 5), 0.5 * random(2, 5, seed=1)
    assert_same(in_parts, lambda x, h: lif(x, dynamics, h, output_final_state=True), [x, h], tolerance=1e-14)


def test_without_arguments_it_is_lif():
    assert Dynamics() == Dynamics.lif()


def test_state_only_where_asked():
    x = random(2, 3)
    assert lif(x, Dynamics.lif())[1] is None
    zero = torch.zeros(3, dtype=x.dtype)
    for a, b in zip(lif(x, Dynamics.lif(), zero, True), lif_reference(x, Dynamics.lif()), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("tau", [1.0, 2.0, 3.5])
def test_tau(tau):
    x, h = random(1, 9), random(9, seed=1)
    _, state = lif(x, Dynamics.lif(tau, threshold=100.0), h, output_final_state=True)
    torch.testing.assert_close(state, h + (x[0] - h) / tau)


@pytest.mark.parametrize("name", SURROGATES)
@pytest.mark.parametrize("alpha", [0.5, 1.0, 2.0, 4.0])
def test_surrogates_are_slopes_of_a_step(name, alpha):
    # Each stands for the derivative of a step from 0 to 1: even, largest in the middle, of area one.
    x = torch.linspace(-400, 400, 800_001, dtype=torch.float64)
    y = SURROGATES[name](x, alpha)
    torch.testing.assert_close(y, y.flip(0), rtol=0, atol=1e-12)
    assert y.argmax() in range(400_000 - 1000, 400_001)
    assert torch.trapezoid(y, x).item() == pytest.approx(1, abs=5e-3)


def test_gradient_does_not_change_what_came_in():
    x, grad = random(3, 4).requires_grad_(), random(3, 4, seed=1)
    before = grad.clone()
    lif(x, Dynamics.lif())[0].backward(grad)
    assert torch.equal(grad, before)


def test_float32_stays_float32():
    (spikes, state), (grad,) = run(lambda x: lif(x, Dynamics.lif(), None, True), [random(3, 4, dtype=torch.float32)])
    assert {t.dtype for t in (spikes, state, grad)} == {torch.float32}


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: Dynamics(alpha=0.0), "alpha"),
        (lambda: Dynamics.lif(tau=0.5), "tau"),
        (lambda: Dynamics(surrogate="tanh"), "surrogate"),
        (lambda: lif(torch.tensor(1.0), Dynamics()), "x"),
        (lambda: lif(torch.zeros(0, 3), Dynamics()), "x"),
        (lambda: lif(torch.zeros(2, 3), Dynamics(), torch.zeros(4)), "initial_state"),
        (lambda: lif(torch.zeros(2, 3), Dynamics(), torch.zeros(1)), "initial_state"),
    ],
    ids=["alpha", "tau", "surrogate", "x-scalar", "x-T0", "state-4", "state-1"],
)
def test_bad_input_names_the_argument(call, argument):
    with pytest.raises(LrfdynError, match=rf"^{argument}: "):
        call()


@pytest.mark.parametrize(("name", "near"), [("sigmod", "sigmoid"), ("arctan", "atan"), ("rectangular", "rectangle")])
def test_unknown_surrogate_lists_near_matches(name, near):
    with pytest.raises(LrfdynError, match=rf"'{name}'; did you mean .*{near}"):
        Dynamics(surrogate=name)
