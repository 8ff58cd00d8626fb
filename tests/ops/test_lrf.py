"""Local receptive fields: convolutions against shifted copies of the grid."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lrfdyn.errors import LrfdynError
from lrfdyn.ops.lrf import lrf, lrf_reference
from tests.conftest import LAYOUTS, arrange, assert_same, random, shape_id

SHAPES = [(1, 1, 1, 1), (1, 3, 1, 7), (2, 1, 5, 1), (1, 2, 4, 3), (2, 3, 9, 13)]
DILATIONS = [(1,), (3,), (3, 5), (1, 3, 5), (20,)]  # 20 reaches beyond every grid here: only the centre is left


def check(shape, dilations, layout, with_residual, seed=0):
    x = arrange(random(*shape, seed=seed), layout)
    weight = arrange(random(len(dilations), shape[1], 3, 3, seed=seed + 1), layout)
    residual = arrange(random(*shape, seed=seed + 2), layout) if with_residual else None

    def definition(x, weight, residual):
        y = lrf_reference(x, weight, dilations)
        return y if residual is None else y + residual

    assert_same(lambda x, weight, residual: lrf(x, weight, dilations, residual), definition, [x, weight, residual])


@pytest.mark.parametrize("with_residual", [False, True], ids=["alone", "residual"])
@pytest.mark.parametrize("dilations", DILATIONS, ids=lambda d: "d" + shape_id(d))
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: shape_id(s, "BCHW"))
def test_convolutions_are_the_definition(shape, dilations, with_residual):
    for layout in LAYOUTS:
        check(shape, dilations, layout, with_residual)


@given(
    st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 9), st.integers(1, 9)),
    st.lists(st.integers(1, 6), min_size=1, max_size=3, unique=True),
    st.sampled_from(LAYOUTS),
    st.booleans(),
    st.integers(0, 999),
)
def test_convolutions_are_the_definition_on_any_grid(shape, dilations, layout, with_residual, seed):
    check(shape, dilations, layout, with_residual, seed)


def test_one_tap_by_hand():
    # r[0, 2] is the tap above and to the right: Y[i, j] = X[i - d, j + d].
    x = torch.arange(12.0).reshape(1, 1, 3, 4)
    weight = torch.zeros(1, 1, 3, 3)
    weight[0, 0, 0, 2] = 1
    expected = torch.tensor([[0.0, 0, 0, 0], [0, 0, 0, 0], [2, 3, 0, 0]])
    for function in (lrf, lrf_reference):
        assert torch.equal(function(x, weight, (2,))[0, 0], expected)


def test_dilation_beyond_the_grid_leaves_the_centre():
    x, weight = random(2, 3, 4, 5), random(1, 3, 3, 3, seed=1)
    torch.testing.assert_close(lrf(x, weight, (5,)), weight[0, :, 1, 1, None, None] * x)


def test_no_dilations_return_the_residual_itself():
    x, weight, residual = random(2, 3, 4, 5), torch.zeros(0, 3, 3, 3), random(2, 3, 4, 5, seed=1)
    assert lrf(x, weight, (), residual) is residual
    assert torch.equal(lrf(x, weight, ()), torch.zeros_like(x))


@pytest.mark.parametrize("dilations", [(1,), (2, 3)], ids=lambda d: "d" + shape_id(d))
def test_gradcheck(dilations):
    inputs = random(1, 2, 4, 3), random(len(dilations), 2, 3, 3, seed=1), random(1, 2, 4, 3, seed=2)
    assert torch.autograd.gradcheck(
        lambda x, w, r: lrf(x, w, dilations, r), [t.requires_grad_() for t in inputs], fast_mode=False
    )


@pytest.mark.parametrize(
    ("x", "weight", "argument"),
    [
        ((3, 4, 5), (1, 3, 3, 3), "x"),
        ((2, 3, 4, 5), (2, 3, 3, 3), "weight"),
        ((2, 3, 4, 5), (1, 2, 3, 3), "weight"),
        ((2, 3, 4, 5), (1, 3, 1, 3, 3), "weight"),
        ((2, 3, 4, 5), (1, 3, 5, 5), "weight"),
    ],
    ids=lambda s: s if isinstance(s, str) else shape_id(s),
)
def test_bad_input_names_the_argument(x, weight, argument):
    with pytest.raises(LrfdynError, match=rf"^{argument}: "):
        lrf(torch.zeros(x), torch.zeros(weight), (1,))
