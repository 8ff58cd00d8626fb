"""Spiking attention: both orders of the products and the causal chunks against the N x N matrix."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from lrfdyn.errors import LrfdynError
from lrfdyn.ops.spike_attention import causal_spike_attention, spike_attention, spike_attention_reference
from tests.conftest import LAYOUTS, arrange, assert_same, random, shape_id

# batch, heads, N, d, e: many tokens, few tokens, one token, one batch, one channel
SHAPES = [(2, 3, 17, 3, 5), (1, 2, 3, 16, 12), (1, 1, 1, 4, 4), (2, 1, 1, 1, 3), (1, 1, 9, 1, 1)]
ids = {"ids": lambda s: shape_id(s, "BhNde")}


def tokens(shape, layout="contiguous", seed=0):
    *batch, n, d, e = shape
    sizes = [(*batch, n, d), (*batch, n, d), (*batch, n, e)]
    return [arrange(random(*size, seed=seed + i), layout) for i, size in enumerate(sizes)]


def definition(q, k, v, scale, causal=False):
    """Sums over tokens, with no matrix product at all."""
    out = torch.zeros_like(v)
    for n in range(q.shape[-2]):
        for j in range(n + 1 if causal else q.shape[-2]):
            score = (q[..., n, :] * k[..., j, :]).sum(-1, keepdim=True)
            out = out.index_add(-2, torch.tensor([n]), (scale * score * v[..., j, :]).unsqueeze(-2))
    return out


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("shape", SHAPES, **ids)
def test_definition(shape, causal):
    assert_same(
        lambda q, k, v: spike_attention_reference(q, k, v, 0.125, causal),
        lambda q, k, v: definition(q, k, v, 0.125, causal),
        tokens(shape),
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, **ids)
def test_cheaper_order_is_the_definition(shape, layout):
    assert_same(
        lambda q, k, v: spike_attention(q, k, v, 0.3),
        lambda q, k, v: spike_attention_reference(q, k, v, 0.3),
        tokens(shape, layout),
    )


sizes = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 14), st.integers(1, 9), st.integers(1, 9))


@given(sizes, st.sampled_from(LAYOUTS), st.integers(0, 999))
def test_cheaper_order_is_the_definition_for_any_size(shape, layout, seed):
    assert_same(
        lambda q, k, v: spike_attention(q, k, v, 0.3),
        lambda q, k, v: spike_attention_reference(q, k, v, 0.3),
        tokens(shape, layout, seed),
    )


class Products(TorchFunctionMode):
    """The matrix sizes of all results of matrix products."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if "matmul" in getattr(func, "__name__", ""):
            self.sizes.append(tuple(result.shape[-2:]))
        return result


@pytest.mark.parametrize(
    ("shape", "held"),
    [
        ((1, 1, 50, 3, 5), (3, 5)),
        ((1, 1, 5, 3, 6), (3, 6)),  # one token above 2 d e / (d + e) = 4
        ((1, 1, 3, 3, 6), (3, 3)),  # one token below
        ((1, 1, 2, 16, 12), (2, 2)),
    ],
    ids=lambda s: shape_id(s, "BhNde"[-len(s) :]),
)
def test_order_with_fewer_products_is_taken(shape, held):
    inputs = tokens(shape)
    with Products() as products:
        out = spike_attention(*inputs, 0.125)
    assert products.sizes == [held, tuple(out.shape[-2:])]
    torch.testing.assert_close(out, spike_attention_reference(*inputs, 0.125))


def check_causal(shape, chunk, layout, seed=0):
    inputs = tokens(shape, layout, seed)
    state = arrange(random(*shape[:2], *shape[3:], seed=seed + 3), layout)

    def chunked(q, k, v, state):
        return causal_spike_attention(q, k, v, 0.3, chunk=chunk, initial_state=state, output_final_state=True)

    def plain(q, k, v, state):
        out, last = spike_attention_reference(q, k, v, 0.3, causal=True), k.mT @ v
        return (out, last) if state is None else (out + 0.3 * (q @ state), last + state)

    assert_same(chunked, plain, [*inputs, state])
    assert_same(chunked, plain, [*inputs, None])


@pytest.mark.parametrize("chunk", [1, 2, 5, 64], ids="chunk{}".format)
@pytest.mark.parametrize("shape", SHAPES, **ids)
def test_causal_chunks_are_the_definition(shape, chunk):
    for layout in LAYOUTS:
        check_causal(shape, chunk, layout)


@given(sizes, st.integers(1, 16), st.sampled_from(LAYOUTS), st.integers(0, 999))
def test_causal_chunks_are_the_definition_for_any_size(shape, chunk, layout, seed):
    check_causal(shape, chunk, layout, seed)


@pytest.mark.parametrize("split", [1, 4, 6, 10], ids="N{}+".format)
def test_causal_state_carries_over_a_split(split):
    def parts(q, k, v):
        out, state = [], None
        for piece in (slice(0, split), slice(split, None)):
            part = q[..., piece, :], k[..., piece, :], v[..., piece, :]
            y, state = causal_spike_attention(*part, 0.3, chunk=3, initial_state=state, output_final_state=True)
            out.append(y)
        return torch.cat(out, -2), state

    def whole(q, k, v):
        return causal_spike_attention(q, k, v, 0.3, chunk=4, output_final_state=True)

    assert_same(parts, whole, tokens((2, 2, 11, 3, 5)))


def test_state_only_where_asked():
    assert causal_spike_attention(*tokens((1, 1, 5, 2, 2)), 1.0)[1] is None


def test_gradcheck():
    for shape in ((1, 2, 7, 2, 3), (1, 1, 2, 5, 4)):
        inputs = [x.requires_grad_() for x in tokens(shape)]
        assert torch.autograd.gradcheck(lambda q, k, v: spike_attention(q, k, v, 0.3), inputs)
        state = random(*shape[:2], *shape[3:], seed=3).requires_grad_()
        assert torch.autograd.gradcheck(
            lambda q, k, v, s: causal_spike_attention(q, k, v, 0.3, chunk=3, initial_state=s, output_final_state=True),
            [*inputs, state],
        )


@pytest.mark.parametrize("function", [spike_attention, causal_spike_attention])
@pytest.mark.parametrize(
    ("q", "k", "v", "argument"),
    [
        ((3,), (3,), (3,), "q"),
        ((2, 5, 3), (2, 5, 4), (2, 5, 3), "k"),
        ((2, 5, 3), (2, 4, 3), (2, 5, 3), "k"),
        ((2, 5, 3), (2, 5, 3), (2, 4, 3), "v"),
        ((2, 5, 3), (2, 5, 3), (5, 3), "v"),
    ],
    ids=lambda s: s if isinstance(s, str) else shape_id(s),
)
def test_bad_input_names_the_argument(function, q, k, v, argument):
    with pytest.raises(LrfdynError, match=rf"^{argument}: "):
        function(torch.zeros(q), torch.zeros(k), torch.zeros(v), 1.0)
