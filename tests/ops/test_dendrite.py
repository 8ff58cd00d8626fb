"""Dendrites: the three forms of the recurrence over modes."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lrfdyn.errors import LrfdynError
from lrfdyn.ops.dendrite import dendrite, dendrite_step, initial_dendrites, paired_modes
from lrfdyn.ops.dendrite.modes import CHUNK, FORMS, dendrite_scan, mode_kernel, mode_powers
from tests.conftest import LAYOUTS, arrange, assert_same, random, run, shape_id

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


def tokens_and_real_modes(shape, seed=0):
    """Without frequencies: two real modes in the place of each oscillator."""
    batch, n, channels, count = shape
    decay, weight = random(channels, count, 2, seed=seed).exp() / 10, random(channels, count, 2, seed=seed + 2)
    return [random(batch, n, channels, seed=seed + 3), decay, None, weight]


def plain(u, decay, frequency, weight, initial_state=None):
    """z_n = exp(lambda) z_{n-1} + u_n, X_n = 2 Re sum_j w_j z_n: the recurrence, token by token."""
    if frequency is None:
        z = torch.zeros(u.shape[0], *decay.shape).double() if initial_state is None else initial_state
        soma = []
        for n in range(u.shape[1]):
            z = torch.exp(-decay) * z + u[:, n, :, None, None]
            soma.append(2 * (weight * z).sum((2, 3)))
        return torch.stack(soma, 1), z
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
@pytest.mark.parametrize("make", [tokens_and_modes, tokens_and_real_modes], ids=["oscillators", "real"])
def test_forms_are_the_recurrence(make, form, shape):
    check_form(form, [*make(shape), random(shape[0], *shape[2:], 2, seed=9)])


@forms
def test_real_modes_are_oscillators_that_do_not_turn(form):
    u, decay, _, weight = tokens_and_real_modes((2, 40, 3, 2))
    one_by_one = torch.stack((weight.flatten(1), torch.zeros(3, 4).double()), -1)
    expected, last = dendrite(
        u, decay.flatten(1), torch.zeros(3, 4).double(), one_by_one, form=form, output_final_state=True
    )
    soma, state = dendrite(u, decay, None, weight, form=form, output_final_state=True)
    torch.testing.assert_close(soma, expected)
    torch.testing.assert_close(state.flatten(2), last[..., 0])  # in half of the numbers
    kernel = mode_kernel(decay.flatten(1), torch.zeros(3, 4).double(), one_by_one, 7)
    torch.testing.assert_close(mode_kernel(decay, None, weight, 7), kernel)


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


@forms
@pytest.mark.parametrize("tokens", [1, CHUNK, 5 * CHUNK + 1], ids="N{}".format)
@pytest.mark.parametrize("make", [tokens_and_modes, tokens_and_real_modes], ids=["oscillators", "real"])
def test_no_images(make, form, tokens):
    for state in (None, random(0, 3, 2, 2)):
        u, *given = make((0, tokens, 3, 2))
        soma, last = dendrite(u, *given, form=form, initial_state=state, output_final_state=True)
        assert soma.shape == (0, tokens, 3)
        assert last.shape == (0, 3, 2, 2)


@pytest.mark.parametrize("chunk", [1, 2, 5, 12, 13, 100], ids="chunk{}".format)
@pytest.mark.parametrize("tokens", [1, 12, 13, 24, 25], ids="N{}".format)
def test_chunks_of_the_scan(tokens, chunk):
    # Chunks smaller than, equal to and larger than N; N a multiple and not.
    inputs = [*tokens_and_modes((2, tokens, 3, 2)), random(2, 3, 2, 2, seed=9)]
    assert_same(lambda *x: dendrite_scan(x[0], x[1:4], x[4], True, chunk), plain, inputs)
    assert_same(lambda *x: dendrite_scan(x[0], x[1:4], x[4], False, chunk)[0], lambda *x: plain(*x)[0], inputs)
    assert_same(lambda *x: dendrite_scan(x[0], x[1:4], None, False, chunk)[0], lambda *x: plain(*x)[0], inputs[:4])


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


@pytest.mark.parametrize("decay", [9.5, 10.5, 25.0, 600.0])
@forms
def test_large_decays_are_what_they_are(form, decay):
    """exp(-alpha) is no number to leave out before it is none; the gradient of the decay is that of the recurrence."""
    u, _, frequency, weight = tokens_and_modes((1, 3, 2, 2))
    inputs = [u, torch.full_like(frequency, decay), frequency, weight]
    (soma,), gradients = run(lambda *x: dendrite(*x, form=form)[0], inputs)
    (expected,), expected_gradients = run(lambda *x: plain(*x)[0], inputs)
    torch.testing.assert_close(soma, expected, rtol=1e-12, atol=1e-14)
    # The transform rounds at the size of the largest entry.
    exact = {"rtol": 1e-6, "atol": 1e-14 if form == "fft" else 0.0}
    torch.testing.assert_close(gradients[1], expected_gradients[1], **exact)
    powers = mode_powers(inputs[1], 0 * frequency, torch.tensor([1]))
    torch.testing.assert_close(powers.real, torch.full_like(powers.real, math.exp(-decay)), rtol=1e-12, atol=0)


def test_powers():
    decay, frequency, _ = modes(3, 2)
    exponents = torch.tensor([0, 1, 2, 7])
    powers = mode_powers(decay, frequency, exponents)
    factor = torch.exp(torch.complex(-decay, frequency))
    torch.testing.assert_close(powers, torch.stack([factor**m for m in exponents.tolist()]))


@pytest.mark.parametrize("n", [5, 70], ids="N{}".format)
@forms
@pytest.mark.parametrize("make", [tokens_and_modes, tokens_and_real_modes], ids=["oscillators", "real"])
def test_gradcheck(make, form, n):
    inputs = [*make((1, n, 1, 2)), random(1, 1, 2, 2, seed=9)]

    def both(u, decay, frequency, weight, state):
        return dendrite(u, decay, frequency, weight, form=form, initial_state=state, output_final_state=True)

    leaves = [None if x is None else x.requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(both, leaves, atol=1e-6, fast_mode=n > 10)


@pytest.mark.parametrize("split", [1, 6, 64, 89], ids="N{}+".format)
@forms
def test_state_carries_over_a_split(form, split):
    def parts(u, *parameters):
        *parameters, state = parameters
        first, state = dendrite(u[:, :split], *parameters, form=form, initial_state=state, output_final_state=True)
        second, state = dendrite(u[:, split:], *parameters, form=form, initial_state=state, output_final_state=True)
        return torch.cat((first, second), 1), state

    assert_same(parts, plain, [*tokens_and_modes((2, 90, 3, 2)), random(2, 3, 2, 2, seed=9)])


@pytest.mark.parametrize("make", [tokens_and_modes, tokens_and_real_modes], ids=["oscillators", "real"])
def test_one_step_holds_all_of_the_past(make):
    u, *parameters = make((2, 9, 3, 2))
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


# --- two directions


def both(u, decay, frequency, weight):
    """The recurrence of one set from the first token on, and of the other from the last on."""
    there, back = zip(decay, (None, None) if frequency is None else frequency, weight, strict=True)
    return plain(u, *there)[0] + plain(u.flip(1), *back)[0].flip(1)


def two_sets(shape, seed=0):
    u, *there = tokens_and_modes(shape, seed)
    return [u, *(torch.stack(pair) for pair in zip(there, modes(*shape[2:], seed=seed + 20), strict=True))]


@shapes
@pytest.mark.parametrize("form", [*FORMS, "auto"])
def test_two_directions_are_two_recurrences(form, shape):
    assert_same(lambda *x: dendrite(*x, form=form)[0], both, two_sets(shape))


@forms
def test_two_directions_of_real_modes(form):
    (u, *there), (_, *back) = (tokens_and_real_modes((2, 40, 3, 2), seed) for seed in (0, 20))
    sets = [None if pair[0] is None else torch.stack(pair) for pair in zip(there, back, strict=True)]
    assert_same(lambda *x: dendrite(*x, form=form)[0], both, [u, *sets])


@pytest.mark.parametrize("layout", LAYOUTS[1:])
@pytest.mark.parametrize("argument", range(4), ids=["u", "decay", "frequency", "weight"])
def test_two_directions_take_any_layout(argument, layout):
    inputs = two_sets((2, 7, 3, 2))
    inputs[argument] = arrange(inputs[argument], layout)
    assert_same(lambda *x: dendrite(*x)[0], both, inputs)


@forms
@given(st.tuples(st.integers(1, 3), st.integers(1, 80), st.integers(1, 3), st.integers(1, 4)), st.integers(0, 999))
def test_the_image_turned_around_is_the_directions_exchanged(form, shape, seed):
    u, *sets = two_sets(shape, seed)
    turned = dendrite(u.flip(1), *(x.flip(0) for x in sets), form=form)[0]
    torch.testing.assert_close(turned.flip(1), dendrite(u, *sets, form=form)[0], rtol=1e-9, atol=1e-9)


@forms
def test_gradcheck_of_two_directions(form):
    inputs = [x.requires_grad_() for x in two_sets((1, 5, 2, 2))]
    assert torch.autograd.gradcheck(lambda *x: dendrite(*x, form=form)[0], inputs, atol=1e-6)


def test_a_token_counts_in_both_directions():
    """At lag 0 a mode gives 2 Re w; before and behind it, that of one direction."""
    decay, frequency, weight = (x[:, :1] for x in two_sets((1, 1, 1, 1))[1:])
    impulse = torch.zeros(1, 3, 1).double()
    impulse[0, 1] = 1
    soma = dendrite(impulse, decay, frequency, weight)[0].flatten()
    there, back = (mode_kernel(*x, 2).flatten() for x in zip(decay, frequency, weight, strict=True))
    torch.testing.assert_close(soma, torch.stack((back[1], there[0] + back[0], there[1])))
    assert soma[1].item() == pytest.approx(2 * float(weight[:, 0, 0, 0].sum()))


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


@pytest.mark.parametrize("shape", [(3, 4), (3, 4, 1), (2, 4, 2)], ids=shape_id)
def test_bad_shape_of_real_decays(shape):
    arguments = {name: torch.zeros(size) for name, size in {**GOOD, "decay": shape}.items()}
    with pytest.raises(LrfdynError, match=r"^decay: expected \[3, 4, 2\], got"):
        dendrite(**{**arguments, "frequency": None})
    u, state = arguments["u"][:, 0], arguments["initial_state"]
    with pytest.raises(LrfdynError, match=r"^decay: expected \[3, 4, 2\], got"):
        dendrite_step(u, arguments["decay"], None, arguments["weight"], state)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"decay": (3, 4)}, r"decay: expected \[2, 3, 4\], got \[3, 4\]"),
        ({"frequency": (1, 3, 4)}, r"frequency: expected \[2, 3, 4\], got \[1, 3, 4\]"),
        ({"weight": (3, 3, 4, 2)}, r"weight: expected \[2, 3, 4, 2\], got \[3, 3, 4, 2\]"),
        ({"weight": (2, 2, 3, 4, 2)}, r"weight: expected \[C, M, 2\] or \[2, C, M, 2\], got"),
        ({"initial_state": (2, 3, 4, 2)}, r"weight: expected \[C, M, 2\] with a state, got \[2, 3, 4, 2\]"),
        ({"output_final_state": True}, r"weight: expected \[C, M, 2\] with a state, got"),
    ],
    ids=str,
)
def test_bad_input_of_two_directions(changed, message):
    given = {"u": (2, 5, 3), "decay": (2, 3, 4), "frequency": (2, 3, 4), "weight": (2, 3, 4, 2), **changed}
    with pytest.raises(LrfdynError, match=f"^{message}"):
        dendrite(**{name: x if isinstance(x, bool) else torch.zeros(x) for name, x in given.items()})


@pytest.mark.parametrize(
    ("form", "hint"), [("scam", "did you mean scan"), ("ftt", "did you mean fft"), ("xyz", "known: ")]
)
def test_unknown_form(form, hint):
    arguments = {name: torch.zeros(size) for name, size in GOOD.items()}
    with pytest.raises(LrfdynError, match=rf"^form: unknown name '{form}'; {hint}"):
        dendrite(**arguments, form=form)
