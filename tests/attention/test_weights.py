"""The mixing matrices for the analysis: what an attention does to the values, as weights between tokens."""

from __future__ import annotations

import pytest
import torch

from lrfdyn.attention.ssa import LocalReceptiveFields
from tests.attention.small import DIM, build, dense_weights, hosts, images, mixing_weights, stencil_matrix
from tests.conftest import random, shape_id


@hosts
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, {}) for kind in ("ssa", "causal_ssa", "vsa", "sdsa")),
        *((kind, {"dilations": (1, 3)}) for kind in ("causal_ssa", "lrf_ssa", "lrf_dyn")),
        ("lrf_ssa", {"dilations": ()}),
        ("lrf_dyn", {"token": "qkv"}),
        ("lrf_dyn", {"directions": 2, "dilations": (1,)}),
        ("lrf_dyn", {"directions": 2, "coupling": "same"}),
        ("lrf_ssa", {"dilations": (1, 3), "norm": True}),
        ("causal_ssa", {"dilations": (1,), "norm": True, "scale_lrf": True}),
    ],
    ids=str,
)
@pytest.mark.parametrize("block", [1, 3000, 2**24], ids=["row by row", "some rows", "at once"])
def test_blocks_of_queries_equal_the_whole_matrix(kind, options, host, block):
    attention = build(kind, host, (4, 5), **options).eval()
    x = images(2, 3, DIM, (5, 4))  # another grid than at construction
    expected = dense_weights(attention, x).sum(0)
    found = mixing_weights(attention, x, block)
    assert expected.max() > 0
    if attention.fixed_mixing:
        assert len(found) == 1
        found = found * 2  # of one time step: the mixing is the same in all
    torch.testing.assert_close(found.expand_as(expected), expected)


@hosts
@pytest.mark.parametrize("kind", ["ssa", "causal_ssa", "vsa"])
def test_weights_are_the_operator_on_the_values(kind, host):
    """Scores of spikes are not negative, so with one head the weights are the operator itself."""
    attention = build(kind, host, (4, 5), dim=4, heads=1).eval()
    x = images(1, 2, 4, (4, 5))
    spikes = attention.project(x)
    mixed = (mixing_weights(attention, x) @ spikes[2][0].flatten(2).mT).mT.unflatten(2, (4, 5))
    if kind == "vsa":
        mixed = attention.norm(mixed)
    torch.testing.assert_close(mixed.unsqueeze(0), attention.mix(*spikes))


@pytest.mark.parametrize("dilations", [(), (1,), (1, 3)], ids=lambda d: "d" + shape_id(d))
@pytest.mark.parametrize(("channels", "directions"), [(1, 1), (3, 1), (2, 2)], ids=str)
def test_lrf_dyn_weights_are_the_responses_to_single_tokens(channels, directions, dilations):
    options = {"dilations": dilations, "dendrites": 4, "directions": directions}
    attention = build("lrf_dyn", grid=(4, 5), dim=channels, heads=1, **options)
    impulses = torch.eye(20).double().reshape(20, 1, 1, 4, 5).expand(-1, -1, channels, -1, -1)
    soma = attention.dendrites(impulses)
    columns = attention.lrf(soma, residual=soma).squeeze(1).flatten(2)  # [input token, channel, output token]
    (weights,) = mixing_weights(attention, images(2, 3, channels, (4, 5)))
    torch.testing.assert_close(weights, columns.abs().mean(1).T)


def test_lrf_dyn_weights_are_the_operator_where_nothing_is_negative():
    attention = build("lrf_dyn", grid=(4, 5), dim=1, heads=1, dilations=(1, 3), dendrites=4)
    with torch.no_grad():
        attention.dendrites.turns.zero_()
        for p in (attention.dendrites.weight, attention.lrf.weight):
            p.abs_()
    v = images(1, 1, 1, (4, 5))
    soma = attention.dendrites(v)
    expected = attention.lrf(soma, residual=soma).flatten()
    torch.testing.assert_close(mixing_weights(attention, v)[0] @ v.flatten(), expected)


@pytest.mark.parametrize("grid", [(1, 1), (1, 4), (3, 2), (5, 7)], ids=lambda s: shape_id(s, "HW"))
@pytest.mark.parametrize("dilations", [(), (1,), (2, 3)], ids=lambda d: "d" + shape_id(d))
def test_stencils_as_a_matrix(grid, dilations):
    torch.manual_seed(0)
    local = LocalReceptiveFields(3, dilations).double()
    matrix = stencil_matrix(local, grid)
    x = random(2, 1, 3, *grid)
    expected = torch.einsum("cnm,tbcm->tbcn", matrix, x.flatten(3)).unflatten(3, grid)
    torch.testing.assert_close(local(x, residual=torch.zeros_like(x)), expected)


def test_no_dilations_return_the_residual_itself():
    x, residual = random(1, 1, 3, 2, 2), random(1, 1, 3, 2, 2, seed=1)
    assert LocalReceptiveFields(3, ())(x, residual=residual) is residual


def test_grid_gives_the_row_length():
    attention = build("lrf_dyn", grid=(3, 8))
    (_, narrow, _), (_, wide, _) = attention.dendrites.modes(8), attention.dendrites.modes(16)
    torch.testing.assert_close(wide, narrow / 2)
    assert narrow.max().item() == pytest.approx(torch.pi)  # the fastest that a row of 8 can show


def test_weights_mean_the_same_whatever_the_grid_at_construction():
    small, large = build("lrf_dyn", grid=(8, 8)), build("lrf_dyn", grid=(16, 16), seed=1)
    large.load_state_dict(small.state_dict())
    assert torch.equal(small.dendrites.kernel((8, 8)), large.dendrites.kernel((8, 8)))
    x = images(2, 2, DIM, (8, 8))
    assert torch.equal(small.eval()(x), large.eval()(x))
