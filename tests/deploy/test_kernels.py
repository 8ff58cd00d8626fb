"""The path of a GPU, fused kernels on tiles, in Triton's interpreter: all of it but the captured graph."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from lrfdyn import create_model
from lrfdyn.attention.row_stream import BUFFERS
from lrfdyn.convert.fold import fold_batch_norm
from lrfdyn.deploy import RowStream, compile_for_inference
from lrfdyn.ops.bits import pack_channels, unpack_channels
from tests.deploy.small import live
from tests.ops.kernels import GPU

pytestmark = pytest.mark.skipif(GPU, reason="test_gpu.py runs the same on the GPU itself")


@contextmanager
def dispatch(to_kernels: bool) -> Iterator[list[int]]:
    """All operations take their kernel, which the interpreter runs on CPU tensors, or their definition. Gives a list
    that grows with every operation that asks."""
    asked: list[int] = []

    def answer(*tensors: torch.Tensor | None) -> bool:
        asked.append(len(tensors))
        return to_kernels

    with pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if name.startswith("lrfdyn") and hasattr(module, "use_triton"):
                patch.setattr(module, "use_triton", answer)
        yield asked


@pytest.mark.parametrize("channels", [3, 8, 20, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits(channels, dtype):
    """Whole and in rows of a map, from tensors in either order of memory: the same bytes, and the same spikes back."""
    spikes = (torch.rand(3, 2, 6, 5, channels) < 0.4).to(dtype)
    with dispatch(to_kernels=False):
        expected = pack_channels(spikes)
    with dispatch(to_kernels=True) as asked:
        assert torch.equal(pack_channels(spikes), expected)
        assert torch.equal(pack_channels(spikes.transpose(-1, -2).contiguous().transpose(-1, -2)), expected)
        held = torch.zeros_like(expected)
        for first, last in ((0, 4), (4, 6)):
            pack_channels(spikes[1:, :, first:last], held[1:, :, first:last])
        assert torch.equal(held[1:], expected[1:])
        assert not held[0].any()
        assert torch.equal(unpack_channels(expected, channels, dtype), spikes)
        assert torch.equal(unpack_channels(expected[1:2, :, 2:5], channels, dtype), spikes[1:2, :, 2:5])
        assert torch.equal(unpack_channels(pack_channels(spikes[0, 0]), channels, dtype), spikes[0, 0])
    assert len(asked) == 8


def build(attention: str, **options):
    torch.manual_seed(0)
    given = {"dim": 32, "depth": 1, "heads": 2, "image_size": 32, "num_classes": 5, "time_steps": 2}
    return live(create_model("spikformer_8_512", attention=attention, attention_options=options or None, **given))


@pytest.mark.parametrize(
    ("attention", "options"), [("ssa", {}), ("lrf_dyn", {}), ("lrf_dyn", {"directions": 2})], ids=str
)
@torch.inference_mode()
def test_tiles_of_fused_kernels(attention, options):
    with dispatch(to_kernels=False):
        model = build(attention, **options).float()
        images = torch.randn(3, 3, 32, 32)
        folded = fold_batch_norm(model)
        expected, logits = folded.forward_features(images), folded(images)
        assert expected.std(1).mean() > 1e-3
    compiled = compile_for_inference(model, images_at_once=2, tile_mib=0.05, steps="together")
    assert max(planned.tiles for planned in compiled.plan(images).sections) > 2
    with dispatch(to_kernels=True) as asked:
        assert torch.equal(compiled.forward_features(images), expected)
        torch.testing.assert_close(compiled(images), logits)
    assert len(asked) > 20


STREAMS = [
    *((buffers, {}) for buffers in BUFFERS),
    *(("potentials", {k: v}) for k, v in (("directions", 2), ("coupling", "same"))),
]


@pytest.mark.parametrize(("buffers", "options"), STREAMS, ids=str)
@torch.inference_mode()
def test_streaming_with_the_stateful_kernel(buffers, options):
    v = (torch.rand(2, 1, 32, 4, 4) < 0.4).float()
    with dispatch(to_kernels=False):
        attention = build("lrf_dyn", dilations=(1, 2), **options).float().blocks[0].attn
        expected = attention.mix(v)
    stream = RowStream(attention, 2, 1, (4, 4), buffers)
    with dispatch(to_kernels=True) as asked:
        rows = [stream.push(v[..., row, :]) for row in range(4)]
        currents = torch.stack([*(row for row in rows if row is not None), *stream.drain()], 3)
    assert (currents - expected).abs().max() <= 1e-5 * expected.abs().max().clamp(min=1)
    assert asked
