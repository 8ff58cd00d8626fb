"""The kernels that mix tokens (stencils, dendrites, attention) against their definitions."""

from __future__ import annotations

import math
import sys

import pytest
import torch

from lrfdyn.ops.dendrite import dendrite
from lrfdyn.ops.dendrite.triton import Dendrite
from lrfdyn.ops.lrf.reference import lrf_reference
from lrfdyn.ops.lrf.triton import Lrf
from lrfdyn.ops.spike_attention import spike_attention_reference
from lrfdyn.ops.spike_attention.triton import SpikeAttention
from tests.ops.kernels import DEVICE, DTYPES, GPU, TOLERANCE, close, compare, rand, same_bits_twice, spikes

pytestmark = pytest.mark.gpu

# batch, channels, height, width, dilations, what is added
STENCILS = {
    "B2-C40-5x7-d3,5-identity": (2, 40, 5, 7, (3, 5), "identity"),
    "B3-C8-8x8-d1-residual": (3, 8, 8, 8, (1,), "residual"),
    "B1-C16-9x4-d1,3,5": (1, 16, 9, 4, (1, 3, 5), None),
    "B2-C70-3x3-d5-residual": (2, 70, 3, 3, (5,), "residual"),
    "B1-C4-1x1-d3": (1, 4, 1, 1, (3,), None),
}
if GPU:
    STENCILS |= {
        "B64-C384-8x8-d3,5-identity": (64, 384, 8, 8, (3, 5), "identity"),
        "B33-C512-14x14-d3,5-residual": (33, 512, 14, 14, (3, 5), "residual"),
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", STENCILS)
def test_lrf(case, dtype):
    compare_stencils(*STENCILS[case], dtype)


@pytest.mark.parametrize("case", [(3, 6, 5, 3, (1, 3), "identity"), (2, 4, 4, 3, (1, 2), "residual")], ids=str)
def test_lrf_row_by_row(case, monkeypatch):
    """As grids are mixed that are too large for the registers."""
    monkeypatch.setattr(sys.modules[Lrf.__module__], "WHOLE", 0)
    compare_stencils(*case, torch.float32)


def compare_stencils(batch, channels, height, width, dilations, added, dtype):
    x = rand(batch, height, width, channels, dtype=dtype).permute(0, 3, 1, 2)
    weight = rand(len(dilations), channels, 3, 3, seed=1)
    residual = rand(batch, channels, height, width, seed=2, dtype=dtype) if added == "residual" else None

    def definition(x, weight, residual):
        y = lrf_reference(x, weight, dilations)
        return y + x if added == "identity" else y if residual is None else y + residual

    compare(
        lambda x, w, r: Lrf.apply(x, w, dilations, r, added == "identity", None),
        definition,
        [x, weight, residual],
        TOLERANCE[dtype],
    )


def test_lrf_gives_the_same_bits_twice():
    x, w = rand(5, 16, 4, 4).requires_grad_(), rand(2, 16, 3, 3, seed=1).requires_grad_()

    def run():
        y = Lrf.apply(x, w, (1, 3), None, False, None)
        return y, *torch.autograd.grad(y, (x, w), torch.ones_like(y))

    same_bits_twice(run)


@pytest.mark.parametrize("whole", [64, 0], ids=["whole", "row by row"])
def test_lrf_of_packed_spikes_gives_the_same_gradients(whole, monkeypatch):
    monkeypatch.setattr(sys.modules[Lrf.__module__], "WHOLE", whole)
    bits = torch.randint(2**3, (2, 4, 3, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    bits = bits.to(DEVICE).permute(0, 3, 1, 2)
    full, weight = torch.cat([(bits >> t) & 1 for t in range(3)]).float(), rand(2, 8, 3, 3, seed=1)
    grads = []
    for packed in (None, bits):
        leaves = [full.detach().requires_grad_(), weight.detach().requires_grad_()]
        out = Lrf.apply(*leaves, (1, 3), None, False, packed)
        grads.append(torch.autograd.grad(out, leaves, rand(*out.shape, seed=9)))
    same_bits_twice(iter(grads).__next__)


def modes(*shape):
    """Of `[C, M]`, or of `[2, C, M]` in two directions."""
    return 0.02 + rand(*shape, seed=5).abs(), rand(*shape, seed=6), rand(*shape, 2, seed=7)


def real_modes(*shape):
    """Without frequencies, two in the place of each oscillator."""
    return 0.02 + rand(*shape, 2, seed=5).abs(), None, rand(*shape, 2, seed=7)


SEQUENCES = [(3, 19, 40, 4), (2, 1, 32, 2), (5, 24, 16, 1), (1, 9, 3, 4)]
if GPU:
    SEQUENCES += [(64, 64, 384, 4), (17, 196, 512, 4)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SEQUENCES, ids=str)
def test_dendrite(shape, dtype):
    compare_dendrites(modes, shape, dtype)


@pytest.mark.parametrize("shape", SEQUENCES[1::2], ids=str)
def test_dendrite_of_real_modes(shape):
    compare_dendrites(real_modes, shape, torch.float32)


def compare_dendrites(make, shape, dtype, directions=()):
    batch, tokens, channels, count = shape
    u = spikes(batch, tokens, channels, dtype=dtype)
    compare(
        lambda u, *m: Dendrite.apply(u, *m, dtype, None, None, False)[0],
        lambda u, *m: dendrite(u, *m, form="scan")[0],
        [u, *make(*directions, channels, count)],
        TOLERANCE[dtype],
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 11, 34, 1), (2, 1, 32, 2), (1, 8, 16, 2), *SEQUENCES[4:]], ids=str)
def test_dendrite_in_two_directions(shape, dtype):
    compare_dendrites(modes, shape, dtype, (2,))


def test_dendrite_of_real_modes_in_two_directions():
    compare_dendrites(real_modes, (2, 11, 34, 2), torch.float32, (2,))


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("make", [modes, real_modes], ids=["oscillators", "real"])
def test_dendrite_carries_its_state(make, given):
    u, m = rand(2, 11, 20), make(20, 3)
    state = rand(2, 20, 3, 2, seed=8) if given else None
    soma, last = Dendrite.apply(u, *m, torch.float32, None, state, True)
    given_state = None if state is None else state.double()
    double = (u.double(), *(None if t is None else t.double() for t in m))
    want, want_last = dendrite(*double, form="step", initial_state=given_state, output_final_state=True)
    close(soma, want, 1e-5, "soma")
    close(last, want_last, 1e-5, "state")


@pytest.mark.parametrize("decay", [9.5, 12.0, 40.0])
def test_dendrite_with_large_decays(decay):
    """What one spike leaves for the next token is exp(-alpha), however little it is."""
    u = torch.zeros(1, 2, 4, device=DEVICE)
    u[:, 0] = 1
    _, frequency, weight = modes(4, 1)
    soma, _ = Dendrite.apply(u, torch.full_like(frequency, decay), 0 * frequency, weight, u.dtype, None, None, False)
    torch.testing.assert_close(soma[:, 1], soma[:, 0] * math.exp(-decay), rtol=1e-5, atol=0)


@pytest.mark.parametrize("shape", [(6, 10, 8, 2), (2, 3, 2, 8, 1)], ids=["one direction", "two"])
def test_dendrite_gives_the_same_bits_twice(shape):
    u, m = rand(*shape[:2], 8).requires_grad_(), [t.requires_grad_() for t in modes(*shape[2:])]

    def run():
        y, _ = Dendrite.apply(u, *m, torch.float32, None, None, False)
        return y, *torch.autograd.grad(y, (u, *m), torch.ones_like(y))

    same_bits_twice(run)


# batch, heads, tokens, d, e
HEADS = [(2, 3, 20, 32, 32), (1, 2, 1, 24, 40), (2, 2, 70, 16, 8), (1, 1, 130, 16, 16)]
if GPU:
    HEADS += [(64, 12, 64, 32, 32), (16, 8, 196, 64, 64)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("shape", HEADS, ids=str)
def test_spike_attention(shape, causal, dtype):
    batch, heads, tokens, d, e = shape
    if dtype == torch.bfloat16 and not GPU:
        pytest.skip("Triton's interpreter has no matrix product of bfloat16")
    if dtype == torch.float32 and d * e > 1600:
        pytest.skip("wide heads in float32 take the plain operation")
    q, k = (spikes(batch, tokens, heads, d, seed=i, dtype=dtype).transpose(1, 2) for i in (0, 1))
    v = spikes(batch, tokens, heads, e, seed=2, dtype=dtype).transpose(1, 2)
    out = compare(
        lambda q, k, v: SpikeAttention.apply(q, k, v, 0.125, causal, None, False),
        lambda q, k, v: spike_attention_reference(q, k, v, 0.125, causal),
        [q, k, v],
        TOLERANCE[dtype],
    )
    # The next layer reads heads side by side.
    assert out.transpose(1, 2).is_contiguous()


def test_packed_spikes_give_the_same_gradients():
    steps, images, heads, tokens, d = 3, 2, 2, 10, 16
    bits = [torch.randint(2**steps, (images, tokens, heads, d), dtype=torch.uint8) for _ in range(3)]
    full = [torch.cat([(b >> t) & 1 for t in range(steps)]).to(DEVICE, torch.float32).transpose(1, 2) for b in bits]
    bits = [b.to(DEVICE).transpose(1, 2) for b in bits]
    for causal in (False, True):
        grads = []
        for packed in (None, bits):
            leaves = [x.detach().requires_grad_() for x in full]
            out = SpikeAttention.apply(*leaves, 0.5, causal, packed, False)
            grads.append(torch.autograd.grad(out, leaves, rand(*out.shape, seed=9)))
        same_bits_twice(iter(grads).__next__)
    tokens_full = full[0].transpose(1, 2).flatten(2)
    grads = []
    for packed in (None, bits[0].transpose(1, 2).flatten(2)):
        leaves = [x.detach().requires_grad_() for x in (tokens_full, *modes(heads * d, 2))]
        out, _ = Dendrite.apply(*leaves, torch.float32, packed, None, False)
        grads.append(torch.autograd.grad(out, leaves, rand(*out.shape, seed=9)))
    same_bits_twice(iter(grads).__next__)


def test_packed_spikes_in_two_directions():
    bits = torch.randint(2**2, (1, 3, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    full, grads = torch.cat([(bits >> t) & 1 for t in range(2)]).float(), []
    for packed in (None, bits):
        leaves = [x.detach().requires_grad_() for x in (full, *modes(2, 4, 1))]
        out, _ = Dendrite.apply(*leaves, torch.float32, packed, None, False)
        grads.append(torch.autograd.grad(out, leaves, rand(*out.shape, seed=9)))
    same_bits_twice(iter(grads).__next__)
