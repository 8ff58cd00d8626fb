"""The mixing matrices for the analysis: what an attention does to the values, as weights between tokens."""

from __future__ import annotations

import pytest
import torch

from lrfdyn.attention.base import from_heads, to_heads
from lrfdyn.attention.local import LocalReceptiveFields
from tests.attention.small import DIM, HEADS, build, hosts, images
from tests.conftest import random, shape_id


@hosts
def test_weights_of_lrf_ssa_are_absolute_per_channel(host):
    attention = build("lrf_ssa", host, (4, 5), dilations=(1, 3)).eval()
    x = images(2, 2, DIM, (4, 5))
    scores, local = attention.scores(x), attention.lrf.matrix((4, 5))
    per_head = attention.value_dim // HEADS
    expected = sum((scores[:, c // per_head] + local[c]).abs() for c in range(attention.value_dim))
    torch.testing.assert_close(attention.weights(x), expected / attention.value_dim)


@hosts
@pytest.mark.parametrize(
    ("kind", "options"),
    [("ssa", {}), ("causal_ssa", {}), ("vsa", {}), ("lrf_ssa", {"dilations": ()})],
    ids=["ssa", "causal_ssa", "vsa", "lrf_ssa"],
)
def test_scores_are_the_operator_on_the_values(kind, options, host):
    attention = build(kind, host, (4, 5), **options).eval()
    x = images(2, 2, DIM, (4, 5))
    spikes = [getattr(attention, name)(x) for name in "qkv"]
    scores = attention.scores(x)
    assert scores.shape == (4, HEADS, 20, 20)
    mixed = from_heads(scores @ to_heads(spikes[2], HEADS), like=spikes[2])
    if kind == "vsa":
        mixed = attention.norm(mixed.flatten(0, 1)).unflatten(0, mixed.shape[:2])
    torch.testing.assert_close(mixed, attention.mix(*spikes))
    torch.testing.assert_close(attention.weights(x), scores.abs().sum(1) / HEADS)


@pytest.mark.parametrize("dilations", [(), (1,), (1, 3)], ids=lambda d: "d" + shape_id(d))
@pytest.mark.parametrize("channels", [1, 3], ids="C{}".format)
def test_lrf_dyn_weights_are_the_responses_to_single_tokens(channels, dilations):
    attention = build("lrf_dyn", grid=(4, 5), dim=channels, heads=1, dilations=dilations, dendrites=4)
    impulses = torch.eye(20).double().reshape(20, 1, 1, 4, 5).expand(-1, -1, channels, -1, -1)
    soma = attention.dendrites(impulses)
    columns = attention.lrf(soma, residual=soma).squeeze(1).flatten(2)  # [input token, channel, output token]
    weights = attention.weights(images(2, 3, channels, (4, 5)))
    assert weights.shape == (6, 20, 20)
    for one in weights:
        torch.testing.assert_close(one, columns.abs().mean(1).T)


def test_lrf_dyn_weights_are_the_operator_where_nothing_is_negative():
    attention = build("lrf_dyn", grid=(4, 5), dim=1, heads=1, dilations=(1, 3), dendrites=4)
    with torch.no_grad():
        attention.dendrites.turns.zero_()
        for p in (attention.dendrites.weight, attention.lrf.weight):
            p.abs_()
    v = images(1, 1, 1, (4, 5))
    soma = attention.dendrites(v)
    expected = attention.lrf(soma, residual=soma).flatten()
    torch.testing.assert_close(attention.weights(v)[0] @ v.flatten(), expected)


@pytest.mark.parametrize("grid", [(1, 1), (1, 4), (3, 2), (5, 7)], ids=lambda s: shape_id(s, "HW"))
@pytest.mark.parametrize("dilations", [(), (1,), (2, 3)], ids=lambda d: "d" + shape_id(d))
def test_stencils_as_a_matrix(grid, dilations):
    torch.manual_seed(0)
    local = LocalReceptiveFields(3, dilations).double()
    n = grid[0] * grid[1]
    matrix = local.matrix(grid)
    assert matrix.shape == (3, n, n)
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
