"""Row by row, LRF-Dyn computes what the parallel form computes, in a state of the derived size."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lrfdyn import LrfdynError, create_model
from lrfdyn.analysis.measure.inference import peak_allocation
from lrfdyn.attention import Attention, AttentionHost, LRFDyn, create_attention
from lrfdyn.attention.base import lif_conv
from lrfdyn.attention.row_stream import BUFFERS
from lrfdyn.deploy import RowStream, StreamingAttention
from lrfdyn.nn.neurons import IntegerSpike
from lrfdyn.ops.bits import pack_channels, pack_integers, unpack_channels, unpack_integers
from tests.models.host_checks import randomize, wake_attention

HOSTS = {
    "spikformer_4_384": {"dim": 16, "depth": 1, "heads": 2, "image_size": 24},
    "qkformer_4_384": {"dim": 32, "depth": 3, "heads": 2, "image_size": 24},
    "sdt_v1_2_512": {"dim": 16, "depth": 1, "heads": 2, "image_size": 24},
    "spikformer_dvs_2_256": {"dim": 16, "depth": 1, "heads": 2, "image_size": 96},
    "qkformer_dvs_2_256": {"dim": 32, "heads": 2, "image_size": 96},
    "sdt_v1_dvs_2_256": {"dim": 16, "depth": 1, "heads": 2, "image_size": 24},
    "sdt_v2_15m": {"widths": (8, 8, 16, 16), "depths": (1, 1, 1, 1, 1), "heads": 2, "image_size": 96},
    "sdt_v3_s": {"widths": (8, 8, 16, 16), "depths": (1, 1, 1, 1, 1), "heads": 2, "image_size": 96},
}


def layer(host: str = "spikformer_4_384", dtype: torch.dtype = torch.float64, **options) -> LRFDyn:
    torch.manual_seed(0)
    model = create_model(host, attention="lrf_dyn", attention_options=options, time_steps=2, **HOSTS[host])
    randomize(model)
    wake_attention(model)
    found = next(m for m in model.modules() if isinstance(m, Attention))
    assert isinstance(found, LRFDyn)
    return found.to(dtype).eval()


def spikes_in(attention: LRFDyn, grid: tuple[int, int], dtype: torch.dtype = torch.float64, batch: int = 2):
    generator = torch.Generator().manual_seed(1)
    return (torch.rand(2, batch, attention.dim, *grid, generator=generator) < 0.4).to(dtype)


def streamed_currents(attention: LRFDyn, x: torch.Tensor, buffers: str) -> torch.Tensor:
    projected = attention.project(x)
    stream = RowStream(attention, *x.shape[:2], (x.shape[3], x.shape[4]), buffers)
    rows = [stream.push(*(p[..., row, :] for p in projected)) for row in range(x.shape[3])]
    assert [row is None for row in rows] == [i < stream.delay for i in range(x.shape[3])]
    return torch.stack([*(row for row in rows if row is not None), *stream.drain()], 3)


@pytest.mark.parametrize("grid", [(6, 6), (1, 5), (13, 4), (7, 1), (3, 12)], ids=str)
@pytest.mark.parametrize("dilations", [(), (1,), (3, 5), (1, 3, 5), (2, 40)], ids=str)
@pytest.mark.parametrize("token", ["value", "qkv"])
@pytest.mark.parametrize("buffers", BUFFERS)
@torch.no_grad()
def test_rows_equal_the_parallel_form(buffers, token, dilations, grid):
    attention = layer(token=token, dilations=dilations)
    x = spikes_in(attention, grid)
    expected = attention.mix(*attention.project(x))
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(streamed_currents(attention, x, buffers), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dilations", [(), (1, 3)], ids=str)
@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("buffers", BUFFERS)
@torch.no_grad()
def test_rows_of_real_modes(buffers, directions, dilations):
    attention = layer(coupling="same", dilations=dilations, directions=directions)
    x = spikes_in(attention, (7, 5))
    expected = attention.mix(*attention.project(x))
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(streamed_currents(attention, x, buffers), expected, rtol=1e-9, atol=1e-9)
    # k d numbers, as many as with oscillators.
    oscillators = layer(dilations=dilations, directions=directions)
    assert RowStream(attention, buffers=buffers).nbytes == RowStream(oscillators, buffers=buffers).nbytes
    single = attention.float()
    assert RowStream(single, buffers=buffers).nbytes == sum(t.bytes for t in single.state_terms(buffers=buffers))


@pytest.mark.parametrize("grid", [(6, 6), (1, 5), (8, 1)], ids=str)
@pytest.mark.parametrize("dilations", [(), (1, 3), (2, 40)], ids=str)
@pytest.mark.parametrize("token", ["value", "qkv"])
@pytest.mark.parametrize("buffers", BUFFERS)
@torch.no_grad()
def test_two_directions_by_rows(buffers, token, dilations, grid):
    """Rows come out once all have arrived, the same as those of the parallel form; the state is that derived."""
    attention = layer(token=token, dilations=dilations, directions=2)
    x = spikes_in(attention, grid)
    projected = attention.project(x)
    expected = attention.mix(*projected)
    torch.testing.assert_close(streamed_currents(attention, x, buffers), expected, rtol=1e-9, atol=1e-9)
    stream = RowStream(attention.float(), *x.shape[:2], grid, buffers)
    assert stream.delay == grid[0] - 1
    derived = attention.state_terms(grid, buffers)
    assert stream.nbytes == x.shape[0] * x.shape[1] * sum(term.bytes for term in derived)
    held = {term.name: term for term in derived}
    # Bits of the whole image, and nothing of a single row.
    assert ("token spikes" in held) == (grid[0] > 1)
    assert held.get("token spikes", derived[0]).elements == (math.prod(grid) * 16 if grid[0] > 1 else 2 * 8 * 16)


def test_two_directions_hold_the_image_as_bits():
    """Spikformer-8-512, d = 512 on 14 x 14 tokens: k d numbers for either way, and 196 d bits."""
    attention = create_model("spikformer_8_512", attention="lrf_dyn", depth=1, directions=2).blocks[0].attn.eval()
    spikes, states, potentials = (RowStream(attention, buffers=buffers).nbytes for buffers in BUFFERS)
    state, bits = 4 * 8 * 512, 14 * 14 * 512 // 8
    assert spikes == 2 * state + bits
    assert states == (5 + 14) * state + bits
    assert potentials == 2 * state + bits + 4 * 14 * 14 * 512
    assert spikes < sum(term.bytes for term in create_model("spikformer_8_512", depth=1).blocks[0].attn.state_terms())


@pytest.mark.parametrize("buffers", BUFFERS)
@pytest.mark.parametrize(("token", "directions"), [("value", 1), ("qkv", 1), ("qkv", 2)], ids=str)
@pytest.mark.parametrize("host", HOSTS)
@torch.no_grad()
def test_a_layer_of_every_host_in_float32(host, token, directions, buffers):
    attention = layer(host, torch.float32, token=token, directions=directions)
    x = spikes_in(attention, (7, 6), torch.float32)
    expected = attention.mix(*attention.project(x))
    currents = streamed_currents(attention, x, buffers)
    assert (currents - expected).abs().max() <= 1e-5 * expected.abs().max().clamp(min=1)
    # Spikes may differ only where the neuron is within rounding of a threshold, here nowhere.
    streaming = StreamingAttention(attention, buffers)
    projected = attention.project(x)
    spikes = attention.spikes(*projected)
    assert 10 < (spikes != 0).sum() < spikes.numel() - 10
    assert torch.equal(streaming.spikes(x), spikes)
    torch.testing.assert_close(streaming(x), attention(x))


@pytest.mark.parametrize("buffers", BUFFERS)
@pytest.mark.parametrize("token", ["value", "qkv"])
@pytest.mark.parametrize("host", ["spikformer_4_384", "sdt_v3_s"])
@pytest.mark.parametrize("dilations", [(), (1,), (3, 5), (2, 40)], ids=str)
def test_state_is_as_large_as_derived_and_allocated_once(host, dilations, token, buffers):
    attention = layer(host, torch.float32, token=token, dilations=dilations)
    grid = (9, 5)
    made: list[RowStream] = []
    frames = 2 * 3
    allocated = peak_allocation(lambda: made.append(RowStream(attention, 2, 3, grid, buffers)))
    derived = sum(term.bytes for term in attention.state_terms(grid, buffers))
    stream = made[0]
    assert stream.nbytes == allocated == frames * derived
    before = [t.data_ptr() for t in stream.tensors]
    with torch.no_grad():
        projected = attention.project(spikes_in(attention, grid, torch.float32, batch=3))
        for row in range(grid[0]):
            stream.push(*(p[..., row, :] for p in projected))
    assert [t.data_ptr() for t in stream.tensors] == before
    assert stream.nbytes == allocated


def test_less_is_held_the_more_is_computed_again():
    attention = create_model("spikformer_8_512", attention="lrf_dyn", depth=1).blocks[0].attn.eval()
    spikes, states, potentials = (RowStream(attention, buffers=buffers).nbytes for buffers in BUFFERS)
    # k d = 8 * 512 numbers, bits of 11 rows of 14 tokens
    bits = 11 * 14 * 512 // 8
    assert spikes == 4 * 8 * 512 + bits
    assert states == 5 * 4 * 8 * 512 + bits
    assert potentials == 4 * 8 * 512 + 4 * 11 * 14 * 512
    ssa = create_model("spikformer_8_512", depth=1).blocks[0].attn
    assert spikes < states < sum(term.bytes for term in ssa.state_terms()) < potentials


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(
    ("token", "levels"), [("value", 2), ("qkv", 4), ("qkv", 16), ("qkv", 100), ("value", 256), ("value", 1000)]
)
@torch.no_grad()
def test_integer_spikes_take_the_bits_that_they_need(token, levels, normalize):
    """The neurons say how many: the host has nothing to repeat."""
    host = AttentionHost(lif_conv, lif_conv, value_ratio=2)
    attention = create_attention("lrf_dyn", 8, 2, (7, 5), host, token=token, dilations=(1, 2)).double()
    for name in attention.projections:
        getattr(attention, name).neuron = IntegerSpike(levels, normalize)
        getattr(attention, name).bn.weight.fill_(levels)
        getattr(attention, name).bn.bias.fill_(levels)
    x = torch.randn(2, 1, 8, 7, 5, dtype=torch.float64)
    attention(x)
    attention.eval()
    projected = attention.project(x)
    assert max(p.max() for p in projected) == (1 if normalize else levels)
    expected = attention.mix(*projected)
    for buffers in BUFFERS:
        torch.testing.assert_close(streamed_currents(attention, x, buffers), expected, rtol=1e-9, atol=1e-9)
    attention.float()
    for buffers in BUFFERS:
        held = sum(term.bytes for term in attention.state_terms(buffers=buffers))
        assert RowStream(attention, buffers=buffers).nbytes == held
    assert attention.state_terms()[1].bits == (levels**2 if token == "qkv" else levels).bit_length()


def test_integers_that_numbers_cannot_count_are_refused():
    attention = layer("sdt_v3_s", token="qkv")
    attention.v.neuron.levels = 2**23
    with pytest.raises(LrfdynError, match="expected tokens of at most 24 bits, got integers up to 33554432"):
        RowStream(attention)


def test_a_state_made_for_inference_serves_later_calls():
    attention = layer(dtype=torch.float32, token="qkv")
    streaming = StreamingAttention(attention)
    x = spikes_in(attention, (6, 6), torch.float32)
    with torch.inference_mode():
        first = streaming(x)
    state = streaming.stream
    assert torch.equal(streaming(x), first)
    assert streaming.stream is state


@pytest.mark.parametrize("shape", [(2, 0, 16, 6, 6), (0, 1, 16, 6, 6), (2, 1, 16, 0, 6)], ids=str)
def test_nothing_to_attend_to(shape):
    attention = layer()
    for call in (attention, attention.project, StreamingAttention(attention)):
        with pytest.raises(LrfdynError, match=r"x: expected no empty dimension, got \["):
            call(torch.zeros(shape, dtype=torch.float64))


@pytest.mark.parametrize("buffers", BUFFERS)
@pytest.mark.parametrize("directions", [1, 2])
@torch.no_grad()
def test_a_stream_starts_anew_and_keeps_its_state(directions, buffers):
    attention = layer(token="qkv", directions=directions)
    streaming = StreamingAttention(attention, buffers)
    x = spikes_in(attention, (6, 6))
    first, state = streaming(x), streaming.stream
    streaming(1 - x)
    assert torch.equal(streaming(x), first)
    assert streaming.stream is state
    streaming(x[:, :1])
    assert streaming.stream is not state


@torch.no_grad()
def test_a_layer_that_is_moved_takes_its_state_along():
    attention = layer(dtype=torch.float32)
    streaming = StreamingAttention(attention)
    x = spikes_in(attention, (6, 6))
    streaming(x.float())
    streaming.double()
    assert torch.equal(streaming.spikes(x), attention.spikes(*attention.project(x)))
    assert streaming.stream.state.dtype == torch.float64


@pytest.mark.parametrize(("host", "steps"), [("spikformer_4_384", "0 or 1"), ("sdt_v3_s", r"multiples of 1/4 up to 1")])
def test_rows_that_are_no_spikes(host, steps):
    """Bits cannot hold them: not a wrong result but an error, which leaves the stream as it was."""
    attention = layer(host)
    stream = RowStream(attention, 2, 1, (3, 6))
    row = torch.zeros(2, 1, attention.value_dim, 6, dtype=torch.float64)
    for wrong in (0.3, -1, 2):
        with pytest.raises(LrfdynError, match=rf"v: expected spikes \({steps}\), got numbers from"):
            stream.push(row + wrong)
    assert stream.arrived == 0
    stream.push(row + 1)
    stream.push((row + 1).bool())


@pytest.mark.parametrize("channels", [1, 8, 13, 40])
def test_bits(channels):
    spikes = (torch.rand(3, 5, channels) < 0.5).float()
    packed = pack_channels(spikes)
    assert packed.shape == (3, 5, -(-channels // 8))
    assert packed.dtype == torch.uint8
    assert torch.equal(unpack_channels(packed, channels, torch.float32), spikes)
    for other in (spikes.transpose(0, 1), spikes[:1, :1].mT.contiguous().mT, spikes[:, ::2]):
        assert torch.equal(unpack_channels(pack_channels(other), channels, torch.float32), other)
    codes = torch.randint(0, 17, (3, 5, channels)).double()
    planes = torch.zeros(5, 3, 5, -(-channels // 8), dtype=torch.uint8)
    pack_integers(codes, planes)
    assert torch.equal(unpack_integers(planes, channels, torch.float64), codes)


def test_bad_input():
    attention = layer()
    with pytest.raises(LrfdynError, match="buffers: unknown name 'spike'; did you mean spikes"):
        StreamingAttention(attention, "spike")
    with pytest.raises(
        LrfdynError, match="attention: expected an object of type Attention, got an object of type Identity"
    ):
        StreamingAttention(nn.Identity())  # type: ignore[arg-type]
    other = create_model("spikformer_4_384", depth=1).blocks[0].attn.eval()
    for build in (other.row_stream, lambda: StreamingAttention(other)):
        with pytest.raises(LrfdynError, match="attention: 'ssa' has no streaming form"):
            build()
    for grid in ((0, 6), (6,)):
        with pytest.raises(LrfdynError, match="grid: expected the rows and columns of tokens"):
            RowStream(attention, 2, 1, grid)  # type: ignore[arg-type]
    most = 2**20
    for time_steps, batch, name in ((most + 1, most + 1, "time_steps"), (1, most + 1, "batch")):
        with pytest.raises(LrfdynError, match=f"{name}: expected at most {most}, got {most + 1}"):
            RowStream(attention, time_steps, batch)
    with pytest.raises(LrfdynError, match=r"x: expected \[T, B, 16, H, W\], got \[2, 1, 4, 6, 6\]"):
        StreamingAttention(attention)(torch.zeros(2, 1, 4, 6, 6, dtype=torch.float64))
    stream = RowStream(attention, 2, 1, (1, 6))
    with pytest.raises(LrfdynError, match="v: expected a tensor, got list"):
        stream.push([1.0])  # type: ignore[arg-type]
    with pytest.raises(LrfdynError, match="spikes: expected rows of v, got 2"):
        stream.push(torch.zeros(2, 1, 16, 6), torch.zeros(2, 1, 16, 6))
    with pytest.raises(LrfdynError, match=r"v: expected a row \[2, 1, 16, 6\], got \[2, 1, 16, 5\]"):
        stream.push(torch.zeros(2, 1, 16, 5))
    with pytest.raises(LrfdynError, match="drain: expected all 1 rows before, 0 have arrived"):
        next(stream.drain())
    stream.push(torch.zeros(2, 1, 16, 6, dtype=torch.float64))
    with pytest.raises(LrfdynError, match="all 1 rows have arrived"):
        stream.push(torch.zeros(2, 1, 16, 6, dtype=torch.float64))
    with pytest.raises(LrfdynError, match="attention: expected evaluation mode"):
        RowStream(attention.train())
