"""On a GPU: the fused, captured low-memory path and streaming against the plain model."""

from __future__ import annotations

import pytest
import torch

from lrfdyn import create_model
from lrfdyn.analysis.measure.inference import attention_state, held_state_bytes, peak_allocation
from lrfdyn.attention.row_stream import BUFFERS
from lrfdyn.deploy import RowStream, compile_for_inference
from lrfdyn.ops.dispatch import plain_operations
from tests.deploy.small import live

pytestmark = pytest.mark.gpu(needed=True)
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def full_float32(monkeypatch):
    """In TF32 the weights of the folded and of the plain model are rounded differently, to eleven bits, and a fifth of
    the last spikes of a small random network differ."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def build(attention: str = "lrf_dyn", **chosen):
    torch.manual_seed(0)
    options = {"dim": 64, "depth": 2, "heads": 2, "image_size": 96, "num_classes": 7, "time_steps": 4}
    return live(create_model("spikformer_8_512", attention=attention, **options, **chosen)).float().to(CUDA)


@pytest.mark.parametrize("attention", ["ssa", "lrf_dyn"])
@pytest.mark.parametrize("graph", [False, True])
@torch.inference_mode()
def test_captured_or_not_the_model_is_the_plain_one(attention, graph):
    model = build(attention)
    images = torch.randn(5, 3, 96, 96, device=CUDA)
    compiled = compile_for_inference(model, images_at_once=2, tile_mib=0.3, graph=graph)
    assert max(planned.tiles for planned in compiled.plan(images).sections) > 2
    with plain_operations():
        features, logits = model.forward_features(images), model(images)
    # A spike within rounding of its threshold may flip, and what follows then differs.
    assert (compiled.forward_features(images) != features).float().mean() < 0.02
    first = compiled(images)
    assert (first - logits).abs().max() < 0.2 * logits.abs().max()
    assert torch.equal(compiled(images), first)


@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("buffers", BUFFERS)
@torch.inference_mode()
def test_streaming(buffers, directions):
    attention = build(directions=directions).blocks[0].attn
    x = (torch.rand(4, 2, 64, 6, 6, device=CUDA) < 0.4).float()
    projected = attention.project(x)
    with plain_operations():
        expected = attention.mix(*projected)
    stream = RowStream(attention, 4, 2, (6, 6), buffers)
    rows = [stream.push(*(p[..., row, :] for p in projected)) for row in range(6)]
    currents = torch.stack([*(row for row in rows if row is not None), *stream.drain()], 3)
    assert (currents - expected).abs().max() <= 1e-5 * expected.abs().max().clamp(min=1)


@torch.inference_mode()
def test_memory():
    model = build()
    assert held_state_bytes(model) == sum(term["bytes"] for term in attention_state(model))
    images = torch.randn(32, 3, 96, 96, device=CUDA)
    with plain_operations():
        model(images)
        eager = peak_allocation(lambda: model(images), CUDA)
    compile_for_inference(model)(images)
    compiled = compile_for_inference(model, images_at_once=4)
    assert peak_allocation(lambda: compiled(images), CUDA) < 0.2 * eager


@torch.inference_mode()
def test_streaming_in_graphs_of_several_shapes():
    """The last images are fewer than those before, so that the layers hold another state for them."""
    model = build()
    images = torch.randn(5, 3, 96, 96, device=CUDA)
    compiled = compile_for_inference(model, mixing="streaming", images_at_once=2)
    first = compiled(images)
    for _ in range(3):
        taken = torch.full((1 << 22,), 255, dtype=torch.uint8, device=CUDA)  # memory that was given back
        assert torch.equal(compiled(images), first)
        assert bool((taken == 255).all())


@torch.inference_mode()
def test_a_graph_of_every_precision():
    compiled = compile_for_inference(build("ssa"))
    images = torch.randn(2, 3, 96, 96, device=CUDA)
    plain = compiled(images)
    with torch.autocast("cuda", torch.bfloat16):
        half = compiled(images)
    assert len(compiled._captured) == 2
    assert not torch.equal(half.float(), plain)
    assert torch.equal(compiled(images), plain)
