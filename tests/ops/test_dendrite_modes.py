"""The tridiagonal definition of dendrites, its modes, and the module that trains them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lrfdyn.attention.lrf_dyn import COUPLINGS, Dendrites
from lrfdyn.errors import LrfdynError
from lrfdyn.ops.dendrite import FORMS, dendrite, initial_dendrites, paired_modes
from lrfdyn.ops.dendrite.reference import (
    both_directions_reference,
    dendrite_reference,
    discretize,
    tridiagonal_matrix,
)
from tests.conftest import assert_close, assert_same, random, shape_id

forms = pytest.mark.parametrize("form", FORMS)


def modes_from_tridiagonal(tau, coupling, gamma, readout, sign=-1):
    """The modes of any tridiagonal A. All k eigenvalues are kept, with half their weight each, so that real and complex
    ones need no separate case."""
    a = tridiagonal_matrix(tau, coupling, sign)
    _, b_bar = discretize(a, gamma)
    eigenvalues, vectors = torch.linalg.eig(a)
    output = (readout.to(vectors.dtype).unsqueeze(-2) @ vectors).squeeze(-2)
    entry = torch.linalg.solve(vectors, b_bar.to(vectors.dtype).unsqueeze(-1)).squeeze(-1)
    return -eigenvalues.real, eigenvalues.imag, torch.view_as_real(output * entry / 2)


def tridiagonal(channels, dendrites, seed=0):
    tau = 0.5 + 5 * random(channels, dendrites, seed=seed).abs()
    rest = (random(channels, size, seed=seed + i) for i, size in enumerate((dendrites - 1, dendrites, dendrites), 1))
    return tau, *rest


def test_matrix_by_hand():
    a = tridiagonal_matrix(torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[3.0, 5.0]]))
    assert a.tolist() == [[[-1, 3, 0], [-3, -0.5, 5], [0, -5, -0.25]]]
    a = tridiagonal_matrix(torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[3.0, 5.0]]), 1)
    assert a.tolist() == [[[-1, 3, 0], [3, -0.5, 5], [0, 5, -0.25]]]


def test_zero_order_hold_is_the_integral_over_one_token():
    # Euler's method on ds/dn = A s + gamma with a step of 2^-24 token, as a power of the augmented matrix.
    tau, coupling, gamma, _ = tridiagonal(1, 4)
    a = tridiagonal_matrix(tau, coupling)
    augmented = torch.zeros(5, 5).double()
    augmented[:4, :4], augmented[:4, 4] = a[0], gamma[0]
    steps = 2**24
    flow = torch.linalg.matrix_power(torch.eye(5).double() + augmented / steps, steps)
    a_bar, b_bar = discretize(a, gamma)
    torch.testing.assert_close(a_bar[0], flow[:4, :4], rtol=0, atol=1e-6)
    torch.testing.assert_close(b_bar[0], flow[:4, 4], rtol=0, atol=1e-6)


def test_definition_by_hand():
    # One dendrite: s_n = e^{-1/2} s_{n-1} + 2 (1 - e^{-1/2}) g u_n
    tau, gamma, readout = (torch.tensor([[x]]).double() for x in (2.0, 3.0, 5.0))
    u, state = torch.tensor([[[1.0], [-2.0]]]).double(), torch.tensor([[[0.7]]]).double()
    soma, last = dendrite_reference(u, tau, torch.zeros(1, 0).double(), gamma, readout, state)
    p = math.exp(-0.5)
    s1 = p * 0.7 + 2 * (1 - p) * 3
    s2 = p * s1 - 2 * 2 * (1 - p) * 3
    assert soma.flatten().tolist() == pytest.approx([5 * s1, 5 * s2])
    assert last.item() == pytest.approx(s2)


@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1), (2, 9, 3, 2), (1, 20, 2, 5), (2, 80, 2, 8)], ids=lambda s: shape_id(s, "BNCk")
)
@forms
def test_modes_of_any_coupling_are_the_definition(form, shape):
    batch, n, channels, dendrites = shape

    def modal(u, *matrix):
        return dendrite(u, *modes_from_tridiagonal(*matrix), form=form)[0]

    inputs = [random(batch, n, channels, seed=7), *tridiagonal(channels, dendrites)]
    assert_same(modal, lambda *x: dendrite_reference(*x)[0], inputs)


@given(st.integers(1, 3), st.integers(1, 12), st.integers(1, 8), st.integers(0, 999))
def test_modes_of_any_coupling_are_the_definition_at_random(channels, n, dendrites, seed):
    u, matrix = random(2, n, channels, seed=seed), tridiagonal(channels, dendrites, seed)
    soma, _ = dendrite(u, *modes_from_tridiagonal(*matrix), form="step")
    assert_close(soma, dendrite_reference(u, *matrix)[0], 1e-9, "soma")


@pytest.mark.parametrize("shape", [(1, 1, 1, 2), (2, 9, 3, 4), (1, 80, 2, 8)], ids=lambda s: shape_id(s, "BNCk"))
@forms
@pytest.mark.parametrize("sign", [-1, 1], ids=["opposite", "same"])
def test_modes_of_pairs_are_the_definition(sign, form, shape):
    batch, n, channels, dendrites = shape
    pairs = dendrites // 2

    def matrix(tau, coupling, gamma, readout):
        row = torch.zeros(channels, dendrites - 1).double()
        row[:, ::2] = coupling
        return tau.repeat_interleave(2, 1), row, gamma, readout

    def modal(u, *pair):
        return dendrite(u, *paired_modes(*matrix(*pair), sign), form=form)[0]

    def definition(u, *pair):
        return dendrite_reference(u, *matrix(*pair), sign=sign)[0]

    tau, _, gamma, readout = tridiagonal(channels, dendrites)
    coupling = random(channels, pairs, seed=8)
    if sign > 0:  # weaker than the leak, or the sum of a pair would grow
        coupling = coupling.tanh() / (2 * tau[:, :pairs])
    assert_same(modal, definition, [random(batch, n, channels, seed=7), tau[:, :pairs], coupling, gamma, readout])


@pytest.mark.parametrize(("channels", "dendrites", "width"), [(1, 2, 1), (3, 4, 7), (5, 8, 14)])
def test_initial_dendrites(channels, dendrites, width):
    torch.manual_seed(0)
    matrix = initial_dendrites(channels, dendrites, width)
    u = random(2, 3 * width, channels)
    expected, _ = dendrite_reference(u, *matrix)
    for decompose in (paired_modes, modes_from_tridiagonal):
        decay, frequency, weight = decompose(*matrix)
        assert_close(dendrite(u, decay, frequency, weight)[0], expected, 1e-9, decompose.__name__)
    decay, frequency, _ = paired_modes(*matrix)
    # From one token to four rows (log-spaced), at whole turns per row up to the fastest that a row can show.
    tau = 1 / decay
    assert torch.allclose(tau[:, 0], torch.ones(channels).double())
    if dendrites > 2:
        assert torch.allclose(tau[:, -1], torch.full((channels,), 4.0 * width).double())
        ratio = tau[:, 1:] / tau[:, :-1]
        assert torch.allclose(ratio, ratio[:1, :1].expand_as(ratio))
    turns = frequency * width / (2 * math.pi)
    assert torch.allclose(turns, turns.round(), atol=1e-6)
    # Every mode starts with every number of turns that a row can show, if there are channels enough.
    for mode in turns.round().int().T:
        seen = set(mode.tolist())
        assert len(seen) == min(channels, width // 2 + 1)
        assert seen <= set(range(width // 2 + 1))


@pytest.mark.parametrize(("channels", "dendrites", "width"), [(1, 2, 1), (3, 4, 7), (5, 8, 14)])
def test_initial_dendrites_of_the_same_sign(channels, dendrites, width):
    torch.manual_seed(0)
    matrix = initial_dendrites(channels, dendrites, width, 1)
    u = random(2, 3 * width, channels)
    expected, _ = dendrite_reference(u, *matrix, sign=1)
    for decompose in (paired_modes, modes_from_tridiagonal):
        assert_close(dendrite(u, *decompose(*matrix, 1))[0], expected, 1e-9, decompose.__name__)
    decay, frequency, _ = paired_modes(*matrix, 1)
    assert frequency is None
    # k time constants from one token to four rows, log-spaced: the eigenvalues of a symmetric matrix.
    tau = 1 / decay.flatten(1)
    wanted = torch.logspace(0, math.log10(4 * width), dendrites).double()
    torch.testing.assert_close(tau, wanted.expand(channels, -1), rtol=1e-6, atol=0)
    eigenvalues = torch.linalg.eigvalsh(tridiagonal_matrix(*matrix[:2], 1))
    torch.testing.assert_close(eigenvalues, -decay.flatten(1))


def test_modes_start_with_equal_energy_whatever_the_sign():
    torch.manual_seed(0)
    for sign in (-1, 1):
        decay, frequency, weight = paired_modes(*initial_dendrites(4000, 8, 14, sign), sign)
        z = torch.exp(-decay)
        if frequency is None:
            energy = (4 * weight.square() / (1 - z**2)).mean(0).flatten()
            entry = ((1 - z) / decay)[0].flatten() ** 2
        else:
            energy = (2 * weight.square().sum(-1) / (1 - z**2)).mean(0)  # cross terms of an oscillator average out
            entry = (torch.exp(torch.complex(-decay, frequency)) - 1).abs().square() / (decay**2 + frequency**2)
            entry = entry.mean(0)
        torch.testing.assert_close(energy / entry, torch.full_like(energy, 1 / len(energy)), rtol=0.1, atol=0)


@given(
    st.lists(st.floats(1e-2, 1e3), min_size=2, max_size=8),
    st.lists(st.floats(-50, 50), min_size=7, max_size=7),
)
def test_opposite_coupling_is_always_stable(tau, coupling):
    # A + A^T = -2 diag(1/tau), so no real part exceeds the slowest leak.
    rows = [tau], [coupling[: len(tau) - 1]]
    a = tridiagonal_matrix(*(torch.tensor(row, dtype=torch.float64) for row in rows))
    real = torch.linalg.eigvals(a).real
    assert (real < 0).all()
    assert real.max() <= -1 / max(tau) + 1e-9
    assert real.min() >= -1 / min(tau) - 1e-9


@pytest.mark.parametrize("raw_decay", [-1e30, -100.0, 0.0, 100.0, 1e30, math.inf], ids="decay{:g}".format)
@pytest.mark.parametrize("frequency", [0.0, 1.0, -3.0, 1e6, None], ids="frequency{}".format)
@pytest.mark.parametrize("n", [16, 100], ids="N{}".format)
def test_stable_wherever_the_optimiser_goes(raw_decay, frequency, n):
    torch.manual_seed(0)
    coupling = "same" if frequency is None else "opposite"
    module = Dendrites(channels=3, dendrites=4, width=4, coupling=coupling)
    with torch.no_grad():
        module.raw_decay.fill_(raw_decay)
        if module.turns is not None:
            module.turns.fill_(frequency)
    image = random(2, 1, 3, n // 4, 4, dtype=torch.float32).requires_grad_()
    # Every mode is |w| exp(-alpha m) at most, both for its real and its imaginary part.
    bound = 2 * module.weight.abs().sum((1, 2)) * image.detach().abs().sum((3, 4))
    assert ((module(image).abs().amax((3, 4)) - bound) <= 1e-5 * bound).all()
    tokens = image.flatten(0, 1).flatten(2).mT
    for form in (*FORMS, "module"):
        y = module(image) if form == "module" else dendrite(tokens, *module.modes(4), form=form)[0]
        assert y.isfinite().all()
        grads = torch.autograd.grad(y.square().sum(), [image, *module.parameters()])
        assert all(g.isfinite().all() for g in grads), form


# --- the module's frequencies


def test_frequencies_follow_the_row():
    torch.manual_seed(0)
    module = Dendrites(channels=5, dendrites=8, width=8).double()
    decay, frequency, weight = module.modes(8)
    wide_decay, wide_frequency, wide_weight = module.modes(16)
    torch.testing.assert_close(frequency, module.turns * 2 * math.pi / 8)
    torch.testing.assert_close(wide_frequency, frequency / 2)
    assert torch.equal(wide_decay, decay)
    assert torch.equal(wide_weight, weight)
    with torch.no_grad():
        module.raw_decay.fill_(-100)  # hardly any leak, so the phase is all that is left
    # One row above is 8 tokens back on the narrow grid, 16 on the wide one: the same phase.
    narrow, wide = module.kernel((3, 8)), module.kernel((3, 16))
    assert narrow.shape == (24, 5)
    assert wide.shape == (48, 5)
    torch.testing.assert_close(wide[::2], narrow)
    # Whole turns per row at the start: every mode is back in phase.
    torch.testing.assert_close(wide[16], wide[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("coupling", COUPLINGS)
def test_module_starts_from_the_dendrites_and_runs_along_the_rows(coupling):
    torch.manual_seed(3)
    module = Dendrites(channels=3, dendrites=4, width=5, coupling=coupling).double()
    torch.manual_seed(3)
    sign = 1 if coupling == "same" else -1
    matrix = initial_dendrites(3, 4, 5, sign)
    x = random(2, 2, 3, 4, 5)
    soma = module(x)
    assert soma.shape == x.shape
    expected, _ = dendrite_reference(x.flatten(0, 1).flatten(2).mT, *matrix, sign=sign)
    # Parameters are kept in float32 until the module is made double.
    torch.testing.assert_close(soma.flatten(0, 1).flatten(2).mT, expected, rtol=1e-5, atol=1e-5)
    # A wider grid than the module was built for is evaluated with its own row length.
    x = random(1, 1, 3, 2, 9)
    decay, frequency, weight = module.modes(5)
    frequency = None if frequency is None else frequency * (5 / 9)
    expected, _ = dendrite(x[0].flatten(2).mT, decay, frequency, weight, form="step")
    torch.testing.assert_close(module(x)[0].flatten(2).mT, expected)


def test_two_directions_of_real_modes_start_from_dendrites_of_their_own():
    torch.manual_seed(3)
    module = Dendrites(3, 4, 5, directions=2, coupling="same").double()
    torch.manual_seed(3)
    x, sets = random(2, 2, 3, 4, 5), [initial_dendrites(3, 4, 5, 1) for _ in range(2)]
    expected = both_directions_reference(x.flatten(0, 1).flatten(2).mT, *sets, sign=1)
    torch.testing.assert_close(module(x).flatten(0, 1).flatten(2).mT, expected, rtol=1e-5, atol=1e-5)
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    assert shapes == {"raw_decay": (2, 3, 2, 2), "weight": (2, 3, 2, 2)}
    assert repr(module) == "Dendrites(channels=3, dendrites=4, directions=2, coupling='same')"


def test_two_directions_start_from_dendrites_of_their_own():
    torch.manual_seed(3)
    module = Dendrites(3, 4, 5, directions=2).double()
    torch.manual_seed(3)
    there, back = initial_dendrites(3, 4, 5), initial_dendrites(3, 4, 5)
    assert not torch.equal(there[3], back[3])
    x = random(2, 2, 3, 4, 5)
    expected = both_directions_reference(x.flatten(0, 1).flatten(2).mT, there, back)
    torch.testing.assert_close(module(x).flatten(0, 1).flatten(2).mT, expected, rtol=1e-5, atol=1e-5)
    assert {name: tuple(p.shape) for name, p in module.named_parameters()} == {
        "raw_decay": (2, 3, 2), "turns": (2, 3, 2), "weight": (2, 3, 2, 2),
    }  # fmt: skip
    assert module.kernel((4, 5)).shape == (2, 20, 3)
    assert repr(module) == "Dendrites(channels=3, dendrites=4, directions=2)"


def test_one_direction_is_as_it_was():
    """The same names, shapes and random numbers, whether it is said or not."""
    modules = []
    for options in ({}, {"directions": 1}):
        torch.manual_seed(3)
        modules.append(Dendrites(3, 4, 5, **options))
    torch.manual_seed(3)
    decay, _, weight = paired_modes(*initial_dendrites(3, 4, 5))
    for module in modules:
        assert {n: tuple(p.shape) for n, p in module.state_dict().items()} == {
            "raw_decay": (3, 2), "turns": (3, 2), "weight": (3, 2, 2),
        }  # fmt: skip
        assert torch.equal(module.weight, weight.float())
        torch.testing.assert_close(module.modes(5)[0], decay.float())
    assert repr(modules[0]) == "Dendrites(channels=3, dendrites=4)"


@pytest.mark.parametrize("directions", [0, 3, True, 1.0, "2"])
def test_there_are_two_directions(directions):
    with pytest.raises(LrfdynError, match=r"^directions: expected (an integer >= 1|at most 2), got"):
        Dendrites(3, 4, 5, directions)


@pytest.mark.parametrize("dendrites", [0, 1, 7], ids="k{}".format)
def test_dendrites_come_in_pairs(dendrites):
    with pytest.raises(LrfdynError, match=rf"^dendrites: .* got {dendrites}"):
        Dendrites(3, dendrites, 4)
