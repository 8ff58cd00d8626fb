"""Dendrites: tridiagonal definition, modes, and the three forms of the recurrence over modes."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lrfdyn.attention.lrf_dyn import Dendrites
from lrfdyn.errors import LrfdynError
from lrfdyn.ops.dendrite import (
    FORMS,
    dendrite,
    dendrite_reference,
    dendrite_step,
    initial_dendrites,
    mode_kernel,
    mode_powers,
    modes_from_tridiagonal,
    paired_modes,
)
from lrfdyn.ops.dendrite.reference import discretize, tridiagonal_matrix
from lrfdyn.ops.dendrite.scan import CHUNK, dendrite_scan
from tests.conftest import LAYOUTS, arrange, assert_close, assert_same, random, run, shape_id

# batch, tokens, channels, modes
SHAPES = [
    (1, 1, 1, 1),
    (2, 1, 3, 2),
    (1, 7, 1, 4),
    (3, 16, 5, 1),
    (2, CHUNK, 2, 3),
    (1, CHUNK + 1, 3, 2),
    (2, 131, 2, 2),
]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: shape_id(s, "BNCM"))
forms = pytest.mark.parametrize("form", FORMS)


def modes(channels, count, seed=0):
    decay = random(channels, count, seed=seed).exp() / 10
    return decay, random(channels, count, seed=seed + 1), random(channels, count, 2, seed=seed + 2)


def tokens_and_modes(shape, seed=0):
    batch, n, channels, count = shape
    return [random(batch, n, channels, seed=seed + 3), *modes(channels, count, seed)]


def plain(u, decay, frequency, weight, initial_state=None):
    """z_n = exp(lambda) z_{n-1} + u_n, X_n = 2 Re sum_j w_j z_n: the recurrence, token by token."""
    factor = torch.exp(torch.complex(-decay, frequency))
    w = torch.complex(weight[..., 0], weight[..., 1])
    z = torch.zeros(u.shape[0], *decay.shape, dtype=factor.dtype)
    if initial_state is not None:
        z = torch.complex(initial_state[..., 0], initial_state[..., 1])
    soma = []
    for n in range(u.shape[1]):
        z = factor * z + u[:, n, :, None]
        soma.append(2 * (w * z).sum(-1).real)
    return torch.stack(soma, 1), torch.stack((z.real, z.imag), -1)


# --- the forms against the recurrence


def check_form(form, inputs):
    """`inputs` are tokens, decay, frequency, weight and initial state."""

    def evaluate(*x, final):
        soma, last = dendrite(*x[:4], form=form, initial_state=x[4], output_final_state=final)
        return (soma, last) if final else soma

    for x in (inputs, [*inputs[:4], None]):
        assert_same(partial(evaluate, final=True), plain, x)
        # Without a state to return a form may skip work: the soma stays the same.
        assert_same(partial(evaluate, final=False), lambda *x: plain(*x)[0], x)


@shapes
@forms
def test_forms_are_the_recurrence(form, shape):
    check_form(form, [*tokens_and_modes(shape), random(shape[0], *shape[2:], 2, seed=9)])


@forms
@pytest.mark.parametrize("layout", LAYOUTS[1:])
@pytest.mark.parametrize("argument", ["u", "decay", "frequency", "weight", "initial_state"])
@pytest.mark.parametrize("shape", [(2, 7, 3, 2), (3, 70, 2, 4)], ids=lambda s: shape_id(s, "BNCM"))
def test_forms_take_any_layout(form, shape, argument, layout):
    inputs = [*tokens_and_modes(shape), random(shape[0], *shape[2:], 2, seed=9)]
    i = ["u", "decay", "frequency", "weight", "initial_state"].index(argument)
    inputs[i] = arrange(inputs[i], layout)
    check_form(form, inputs)


@forms
@given(
    st.tuples(st.integers(1, 3), st.integers(1, 80), st.integers(1, 3), st.integers(1, 4)),
    st.integers(0, 999),
)
def test_forms_are_the_recurrence_for_any_size(form, shape, seed):
    check_form(form, [*tokens_and_modes(shape, seed), random(shape[0], *shape[2:], 2, seed=seed + 4)])


@pytest.mark.parametrize("chunk", [1, 2, 5, 12, 13, 100], ids="chunk{}".format)
@pytest.mark.parametrize("tokens", [1, 12, 13, 24, 25], ids="N{}".format)
def test_chunks_of_the_scan(tokens, chunk):
    # Chunks smaller than, equal to and larger than N; N a multiple and not.
    inputs = [*tokens_and_modes((2, tokens, 3, 2)), random(2, 3, 2, 2, seed=9)]
    assert_same(lambda *x: dendrite_scan(*x, True, chunk=chunk), plain, inputs)
    assert_same(lambda *x: dendrite_scan(*x, False, chunk=chunk)[0], lambda *x: plain(*x)[0], inputs)
    assert_same(lambda *x: dendrite_scan(*x, None, False, chunk=chunk)[0], lambda *x: plain(*x)[0], inputs[:4])


@shapes
def test_automatic_form(shape):
    inputs = tokens_and_modes(shape)
    assert_same(lambda *x: dendrite(*x, output_final_state=True), plain, inputs)
    assert dendrite(*inputs)[1] is None


def test_kernel_by_hand():
    # One mode: kappa[m] = 2 exp(-m / 4) (cos(m pi / 2) * 3 - sin(m pi / 2) * 5)
    decay, frequency, weight = (
        torch.tensor(x, dtype=torch.float64) for x in ([[0.25]], [[math.pi / 2]], [[[3.0, 5.0]]])
    )
    kernel = mode_kernel(decay, frequency, weight, 4)
    expected = [6, -10 * math.exp(-0.25), -6 * math.exp(-0.5), 10 * math.exp(-0.75)]
    assert kernel.shape == (4, 1)
    assert kernel.flatten().tolist() == pytest.approx(expected, abs=1e-12)
    impulse = torch.zeros(1, 4, 1).double()
    impulse[0, 0, 0] = 1
    for form in FORMS:
        soma, _ = dendrite(impulse, decay, frequency, weight, form=form)
        assert soma.flatten().tolist() == pytest.approx(expected, abs=1e-12)


def test_powers():
    decay, frequency, _ = modes(3, 2)
    exponents = torch.tensor([0, 1, 2, 7])
    powers = mode_powers(decay, frequency, exponents)
    factor = torch.exp(torch.complex(-decay, frequency))
    torch.testing.assert_close(powers, torch.stack([factor**m for m in exponents.tolist()]))


@pytest.mark.parametrize("n", [5, 70], ids="N{}".format)
@forms
def test_gradcheck(form, n):
    inputs = [*tokens_and_modes((1, n, 1, 2)), random(1, 1, 2, 2, seed=9)]

    def both(u, decay, frequency, weight, state):
        return dendrite(u, decay, frequency, weight, form=form, initial_state=state, output_final_state=True)

    assert torch.autograd.gradcheck(both, [x.requires_grad_() for x in inputs], atol=1e-6, fast_mode=n > 10)


@pytest.mark.parametrize("split", [1, 6, 64, 89], ids="N{}+".format)
@forms
def test_state_carries_over_a_split(form, split):
    def parts(u, *parameters):
        *parameters, state = parameters
        first, state = dendrite(u[:, :split], *parameters, form=form, initial_state=state, output_final_state=True)
        second, state = dendrite(u[:, split:], *parameters, form=form, initial_state=state, output_final_state=True)
        return torch.cat((first, second), 1), state

    assert_same(parts, plain, [*tokens_and_modes((2, 90, 3, 2)), random(2, 3, 2, 2, seed=9)])


def test_one_step_holds_all_of_the_past():
    u, *parameters = tokens_and_modes((2, 9, 3, 2))
    expected, last = plain(u, *parameters)
    state = torch.zeros(2, 3, 2, 2).double()
    for n in range(9):
        soma, state = dendrite_step(u[:, n], *parameters, state)
        torch.testing.assert_close(soma, expected[:, n])
    torch.testing.assert_close(state, last)


@pytest.mark.parametrize("n", [9, 100], ids="N{}".format)
@forms
def test_causal(form, n):
    u, *parameters = tokens_and_modes((2, n, 3, 2))
    changed, m = u.clone(), n // 2
    changed[:, m] += 1
    before, after = (dendrite(x, *parameters, form=form)[0] for x in (u, changed))
    # The transform spreads rounding over all tokens, and only rounding.
    assert (before - after)[:, :m].abs().max() < (1e-12 if form == "fft" else 1e-300)
    assert ((before - after)[:, m:].abs().amax((0, 2)) > 1e-6).all()


def relative(actual, expected):
    return ((actual.double() - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("grid", [(8, 8), (14, 14), (32, 32)], ids="H{0[0]}-W{0[1]}".format)
@forms
def test_float32_at_the_sizes_of_the_models(form, grid):
    torch.manual_seed(0)
    parameters = paired_modes(*initial_dendrites(6, 8, grid[1]))
    u = (random(2, grid[0] * grid[1], 6) > 0.5).double()
    inputs = [u, *parameters, random(2, 6, 4, 2, seed=1)]
    outputs, gradients = run(plain, inputs)

    def both(*x):
        return dendrite(*x[:4], form=form, initial_state=x[4], output_final_state=True)

    single_outputs, single_gradients = run(both, [x.float() for x in inputs])
    assert {x.dtype for x in (*single_outputs, *single_gradients)} == {torch.float32}
    for single, double in zip(single_outputs + single_gradients, outputs + gradients, strict=True):
        assert relative(single, double) < 1e-4


def test_half_precision_runs_in_float32():
    u, *parameters = (x.float() for x in tokens_and_modes((2, 20, 3, 2)))
    spikes = (u > 0).float()
    expected, _ = dendrite(spikes, *parameters)
    for form in FORMS:
        with torch.autocast("cpu", torch.bfloat16):
            soma, state = dendrite(spikes.bfloat16(), *parameters, form=form, output_final_state=True)
        assert soma.dtype == state.dtype == torch.float32
        assert relative(soma, expected.double()) < 1e-5
    halves = [x.bfloat16() for x in (spikes, *parameters)]
    soma, state = dendrite(*halves, output_final_state=True)
    assert soma.dtype == torch.bfloat16
    assert state.dtype == torch.float32


# --- the tridiagonal definition and its modes


def tridiagonal(channels, dendrites, seed=0):
    tau = 0.5 + 5 * random(channels, dendrites, seed=seed).abs()
    rest = (random(channels, size, seed=seed + i) for i, size in enumerate((dendrites - 1, dendrites, dendrites), 1))
    return tau, *rest


def test_matrix_by_hand():
    a = tridiagonal_matrix(torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[3.0, 5.0]]))
    assert a.tolist() == [[[-1, 3, 0], [-3, -0.5, 5], [0, -5, -0.25]]]


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
def test_modes_of_pairs_are_the_definition(form, shape):
    batch, n, channels, dendrites = shape
    pairs = dendrites // 2

    def matrix(tau, coupling, gamma, readout):
        row = torch.zeros(channels, dendrites - 1).double()
        row[:, ::2] = coupling
        return tau.repeat_interleave(2, 1), row, gamma, readout

    def modal(u, *pair):
        return dendrite(u, *paired_modes(*matrix(*pair)), form=form)[0]

    def definition(u, *pair):
        return dendrite_reference(u, *matrix(*pair))[0]

    tau, _, gamma, readout = tridiagonal(channels, dendrites)
    inputs = [random(batch, n, channels, seed=7), tau[:, :pairs], random(channels, pairs, seed=8), gamma, readout]
    assert_same(modal, definition, inputs)


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
@pytest.mark.parametrize("frequency", [0.0, 1.0, -3.0, 1e6], ids="frequency{:g}".format)
@pytest.mark.parametrize("n", [16, 100], ids="N{}".format)
def test_stable_wherever_the_optimiser_goes(raw_decay, frequency, n):
    torch.manual_seed(0)
    module = Dendrites(channels=3, dendrites=4, width=4)
    with torch.no_grad():
        module.raw_decay.fill_(raw_decay)
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


def test_module_starts_from_the_dendrites_and_runs_along_the_rows():
    torch.manual_seed(3)
    module = Dendrites(channels=3, dendrites=4, width=5).double()
    torch.manual_seed(3)
    matrix = initial_dendrites(3, 4, 5)
    x = random(2, 2, 3, 4, 5)
    soma = module(x)
    assert soma.shape == x.shape
    expected, _ = dendrite_reference(x.flatten(0, 1).flatten(2).mT, *matrix)
    # Parameters are kept in float32 until the module is made double.
    torch.testing.assert_close(soma.flatten(0, 1).flatten(2).mT, expected, rtol=1e-5, atol=1e-5)
    # A wider grid than the module was built for is evaluated with its own row length.
    x = random(1, 1, 3, 2, 9)
    decay, frequency, weight = module.modes(5)
    expected, _ = plain(x[0].flatten(2).mT, decay, frequency * (5 / 9), weight)
    torch.testing.assert_close(module(x)[0].flatten(2).mT, expected)


# --- bad input

GOOD = {"u": (2, 5, 3), "decay": (3, 4), "frequency": (3, 4), "weight": (3, 4, 2), "initial_state": (2, 3, 4, 2)}


@pytest.mark.parametrize(
    ("argument", "shape"),
    [
        ("u", (5, 3)),
        ("u", (2, 0, 3)),
        ("decay", (3, 5)),
        ("decay", (4,)),
        ("frequency", (4, 3)),
        ("frequency", (1, 4)),
        ("weight", (3, 4, 3)),
        ("weight", (2, 4, 2)),
        ("weight", (4,)),
        ("initial_state", (3, 4, 2)),
        ("initial_state", (1, 3, 4, 2)),
    ],
    ids=lambda s: s if isinstance(s, str) else shape_id(s),
)
def test_bad_shape_names_the_argument(argument, shape):
    arguments = {name: torch.zeros(size) for name, size in {**GOOD, argument: shape}.items()}
    with pytest.raises(LrfdynError, match=rf"^{argument}: "):
        dendrite(**arguments)


@pytest.mark.parametrize(
    ("form", "hint"), [("scam", "did you mean scan"), ("ftt", "did you mean fft"), ("xyz", "known: ")]
)
def test_unknown_form(form, hint):
    arguments = {name: torch.zeros(size) for name, size in GOOD.items()}
    with pytest.raises(LrfdynError, match=rf"^form: unknown name '{form}'; {hint}"):
        dendrite(**arguments, form=form)


@pytest.mark.parametrize("dendrites", [0, 1, 7], ids="k{}".format)
def test_dendrites_come_in_pairs(dendrites):
    with pytest.raises(LrfdynError, match=rf"^dendrites: .* got {dendrites}"):
        Dendrites(3, dendrites, 4)
