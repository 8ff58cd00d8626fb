"""Low-memory inference: the logits of the plain model, whatever the cut into images, rows and time steps."""

from __future__ import annotations

import copy
import io
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import FrozenInstanceError, replace
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from lrfdyn import LrfdynError, create_model
from lrfdyn.analysis.measure.inference import peak_allocation
from lrfdyn.attention import ATTENTIONS
from lrfdyn.convert.fold import fold_batch_norm
from lrfdyn.deploy import compile_for_inference
from lrfdyn.deploy.feature_maps import FeatureMap, buffer_bytes, place_maps
from lrfdyn.deploy.lowmem import SteppedNeuron
from lrfdyn.deploy.streaming_attention import StreamingAttention
from lrfdyn.nn.layers import max_pool
from lrfdyn.nn.neurons import IF, LIF, MSLIF, PaperLIF
from lrfdyn.nn.sections import lean_max_pool
from tests.deploy.small import live

META = {"widths": (8, 8, 16, 16), "depths": (1, 1, 1, 1, 1), "heads": 2, "image_size": 64}
HOSTS = {
    "spikformer_8_512": {"dim": 16, "depth": 2, "heads": 2, "image_size": 64},
    "spikformer_4_384": {"dim": 16, "depth": 1, "heads": 2, "image_size": 24},
    "qkformer_10_512": {"dim": 32, "depth": 4, "heads": 2, "image_size": 64},
    "qkformer_4_384": {"dim": 32, "depth": 3, "heads": 2, "image_size": 24},
    "sdt_v1_8_512": {"dim": 16, "depth": 2, "heads": 2, "image_size": 64},
    "spikformer_dvs_2_256": {"dim": 16, "depth": 2, "heads": 2, "image_size": 64},
    "qkformer_dvs_2_256": {"dim": 32, "heads": 2, "image_size": 64},
    "sdt_v1_dvs_2_256": {"dim": 16, "heads": 2, "image_size": 24},
    "sdt_v2_15m": META,
    "sdt_v3_s": META,
}
TINY = 1e-3  # MiB: as many tiles as there can be


def build(host: str, attention: str = "lrf_dyn", dtype: torch.dtype = torch.float64, time_steps: int = 2, **options):
    torch.manual_seed(0)
    given = {"num_classes": 7, "time_steps": time_steps, **HOSTS[host], **options}
    return live(create_model(host, attention=attention, **given)).to(dtype)


def images_for(model, batch: int = 3, size: tuple[int, int] | None = None):
    _, height, width = model.input_size
    generator = torch.Generator().manual_seed(1)
    shape = (batch, model.in_channels, *(size or (height, width)))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(next(model.parameters()).dtype)


@torch.no_grad()
def check(model, images: torch.Tensor, **options) -> None:
    features = model.forward_features(images)
    assert features.std(1).mean() > 1e-3, "the images must matter"
    compiled = compile_for_inference(model, **options)
    torch.testing.assert_close(compiled.forward_features(images), features, rtol=1e-9, atol=1e-9)
    logits = compiled(images)
    torch.testing.assert_close(logits, model(images), rtol=1e-9, atol=1e-9)
    assert torch.equal(compiled(images), logits)  # nothing is carried over from call to call


@pytest.mark.parametrize("steps", ["sequence", "together"])
@pytest.mark.parametrize("tile_mib", [TINY, 100.0])
@pytest.mark.parametrize("host", HOSTS)
def test_every_host_in_tiles(host, tile_mib, steps):
    model = build(host)
    images = images_for(model)
    check(model, images, tile_mib=tile_mib, steps=steps, images_at_once=2)
    plan = compile_for_inference(model, tile_mib=tile_mib, steps=steps).plan(images)
    tiles = [planned.tiles for planned in plan.sections]
    assert max(tiles) > 3 if tile_mib == TINY else set(tiles) == {1}


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_every_attention(attention):
    model = build("spikformer_8_512", attention)
    check(model, images_for(model), tile_mib=TINY)


def test_norms_of_stencils_and_real_modes():
    options = {"dilations": (1, 2), "norm": True, "scale_lrf": True}
    for host in ("spikformer_4_384", "sdt_v3_s"):
        model = build(host, "lrf_ssa", attention_options=options)
        check(model, images_for(model), tile_mib=TINY)
    model = build("spikformer_4_384", attention_options={"coupling": "same"})
    check(model, images_for(model), tile_mib=TINY, mixing="streaming")


@pytest.mark.parametrize("host", HOSTS)
def test_streaming_attention_inside(host):
    model = build(host, attention_options={"token": "qkv", "dilations": (1, 2)})
    check(model, images_for(model), tile_mib=0.1, mixing="streaming")
    check(model, images_for(model), mixing="streaming", buffers="potentials", steps="together", images_at_once=3)


@pytest.mark.parametrize(("host", "buffers"), [("spikformer_4_384", "states"), ("sdt_v3_s", "spikes")])
def test_two_directions(host, buffers):
    model = build(host, attention_options={"directions": 2, "dilations": (1, 2)})
    check(model, images_for(model), tile_mib=TINY)
    check(model, images_for(model), mixing="streaming", buffers=buffers)


@pytest.mark.parametrize("size", [(64, 64), (65, 71), (70, 39), (16, 130)], ids=str)
def test_odd_image_sizes(size):
    for host in ("spikformer_8_512", "qkformer_10_512", "qkformer_dvs_2_256", "sdt_v1_8_512", "sdt_v3_s"):
        model = build(host)
        check(model, images_for(model, size=size), tile_mib=0.02)


@pytest.mark.parametrize(
    ("host", "attention"),
    [("spikformer_8_512", "lrf_dyn"), ("qkformer_dvs_2_256", "ssa"), ("sdt_v1_dvs_2_256", "sdsa")],
)
@torch.no_grad()
def test_event_frames_and_many_time_steps(host, attention):
    model = build(host, attention, time_steps=6)
    frames = torch.stack([images_for(model), *(images_for(model).roll(n, -1) for n in range(1, 6))])
    expected = model(frames)
    for tile in (TINY, 0.3, 100):
        torch.testing.assert_close(compile_for_inference(model, tile_mib=tile)(frames), expected, rtol=1e-9, atol=1e-9)
    steps = {planned.steps for planned in compile_for_inference(model, tile_mib=0.3).plan(frames).sections}
    assert len(steps) > 1  # some sections take several steps at a time, some do not


@pytest.mark.parametrize("time_steps", [9, 16])
def test_more_time_steps_than_a_byte_has_bits(time_steps):
    model = build("spikformer_4_384", "ssa", time_steps=time_steps)
    for steps in ("sequence", "together"):
        check(model, images_for(model, batch=2), tile_mib=0.05, steps=steps)


@pytest.mark.parametrize("attention", ["ssa", "lrf_dyn"])
@torch.no_grad()
def test_float32_equals_the_folded_model_bit_for_bit(attention):
    model = build("spikformer_8_512", attention, torch.float32, time_steps=4, dim=32, image_size=96)
    images = images_for(model, batch=2)
    folded = fold_batch_norm(model).to(memory_format=torch.channels_last)
    expected = torch.cat([folded(image.unsqueeze(0)) for image in images])
    assert torch.equal(compile_for_inference(model, tile_mib=0.2)(images), expected)


@pytest.mark.parametrize("host", ["sew_resnet18", "ms_resnet18"])
@pytest.mark.parametrize("tile_mib", [TINY, 100.0])
def test_hosts_without_attention_pass_images_and_steps_in_turn(host, tile_mib):
    torch.manual_seed(0)
    model = live(create_model(host, num_classes=7, time_steps=2), size=32)
    check(model, torch.randn(2, 3, 32, 32, dtype=torch.float64), tile_mib=tile_mib)


@torch.no_grad()
def test_a_neuron_that_runs_over_the_batch_sees_the_whole_batch():
    model = build("qkformer_4_384", legacy_neuron_axis=True)
    check(model, images_for(model), steps="together", images_at_once=1)
    with pytest.raises(LrfdynError, match="legacy_neuron_axis=True needs steps='together'"):
        compile_for_inference(model)


@torch.no_grad()
def test_memory_is_a_small_part_and_does_not_grow_with_the_batch():
    model = build("spikformer_8_512", dtype=torch.float32, time_steps=4, dim=32, image_size=128)
    compiled = compile_for_inference(model, tile_mib=0.25)
    one, four = (images_for(model, batch=n) for n in (1, 4))
    for images in (one, four):
        compiled(images)
    low, low_four = (peak_allocation(lambda images=images: compiled(images)) for images in (one, four))
    eager = peak_allocation(lambda: model(four))
    planned = compiled.plan(four).map_bytes
    assert low_four < 1.1 * low + four.nbytes
    assert low_four + planned < 0.1 * eager


@torch.no_grad()
def test_maps_are_planned():
    model = build("spikformer_8_512", dtype=torch.float32, dim=32)
    images = images_for(model, batch=1)
    plan = compile_for_inference(model).plan(images)
    # 64 x 64 pixels: stage 1 keeps 4 channels as one byte of 2 steps at 32 x 32, stage 2 8 channels at 16 x 16
    assert [planned.out.nbytes for planned in plan.sections[:2]] == [2 * 32 * 32, 2 * 16 * 16]
    assert plan.map_bytes == 2 * 32 * 32 + 2 * 16 * 16
    assert [planned.out.holds for planned in plan.sections] == ["bits"] * 4 + ["integers"] * 5


def test_a_plan_is_not_changed():
    model = build("spikformer_4_384", dtype=torch.float32)
    plan = compile_for_inference(model).plan(images_for(model))
    for planned, name in ((plan, "map_bytes"), (plan.sections[0], "rows")):
        with pytest.raises(FrozenInstanceError):
            setattr(planned, name, 1)


def test_as_many_steps_at_a_time_as_fit():
    """Down to one, and a section that just fits is not cut."""
    model = build("spikformer_4_384", dtype=torch.float32, time_steps=6)
    images = images_for(model, batch=1)
    section = next(section for section in model.sections() if section.halo)
    height, width = images.shape[-2:]
    for steps in (6, 3, 2, 1):
        whole = section.numbers_per_pixel(steps) * width * height
        for numbers, fits in ((whole, True), (whole - 1, False)):
            first, *_ = compile_for_inference(model, tile_mib=4 * numbers / 2**20).plan(images).sections
            assert first.section.name == section.name
            assert ((first.tiles, first.steps) == (1, steps)) is fits


@torch.no_grad()
def test_sums_of_spikes_that_no_byte_holds():
    """As in a network of 130 blocks: here every section adds 85, so that sums from the third on are too large."""
    model = build("spikformer_8_512", dtype=torch.float32, dim=32)
    compiled, images = compile_for_inference(model, steps="together"), images_for(model, batch=1)
    *spikes, rpe, a, b, c, d = compiled.model.sections()
    sums = [replace(s, run=lambda x, run=s.run: run(x) + 84, adds=85) for s in (rpe, a, b, c, d)]
    compiled.model.sections = lambda: iter([*spikes, *sums])
    expected = compiled.model.to_time_major(images)
    for section in compiled.model.sections():
        expected = section.run(expected)
    assert expected.max() >= 5 * 84
    assert torch.equal(compiled.forward_features(images), expected)
    types = [planned.out.stored_dtype for planned in compiled.plan(images).sections]
    assert types == [torch.uint8] * 6 + [torch.float32] * 3


@pytest.mark.parametrize("grid", [(1, 1), (1, 6), (5, 2), (8, 8), (7, 9)], ids=str)
def test_lean_pool(grid):
    x = torch.randn(2, 3, 4, *grid)
    before = x.clone()
    assert torch.equal(lean_max_pool(x), max_pool(x))
    assert torch.equal(x, before)


@pytest.mark.parametrize("holds", ["bits", "integers", "numbers"])
def test_maps_give_back_what_they_took(holds):
    maps = [FeatureMap(holds, (2, 3, channels, 5, 4), torch.float64) for channels in (11, 3)]
    place_maps(maps, torch.empty(buffer_bytes(maps), dtype=torch.uint8))
    values = [torch.randint(0, 2, (2, 3, c, 5, 4)).double() for c in (11, 3)]
    for held, value in zip(maps, values, strict=True):
        held.store(value[:, :, :, :2], 0)
        for t in range(2):
            held.store(value[t : t + 1, :, :, 2:], 2, slice(t, t + 1))
    for held, value in zip(maps, values, strict=True):
        assert torch.equal(held.load(0, 5), value)
        assert torch.equal(held.load(1, 3, slice(1, 2)), value[1:, :, :, 1:3])


@pytest.mark.parametrize("neuron", [LIF(), IF(), PaperLIF(), MSLIF(), LIF(v_reset=0.25)], ids=lambda n: repr(n))
def test_stepped_neurons_go_on_where_they_were(neuron):
    x = torch.randn(5, 3, 40, dtype=torch.float64) * 2
    membranes: dict[nn.Module, torch.Tensor] = {}
    stepped = SteppedNeuron(neuron.dynamics, membranes)
    for _ in range(2):
        assert torch.equal(torch.cat([stepped(x[:2]), stepped(x[2:3]), stepped(x[3:])]), neuron(x))
        membranes.clear()


def test_the_buffer_stays_and_membranes_do_not():
    model = build("spikformer_4_384")
    compiled, images = compile_for_inference(model), images_for(model)
    compiled.forward_features(images)
    buffer = compiled._buffer
    assert not compiled._membranes
    compiled.forward_features(images[:1])
    assert compiled._buffer is buffer


def test_the_model_is_left_as_it_was():
    model = build("spikformer_4_384")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    compile_for_inference(model)(images_for(model))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(p.requires_grad for p in model.parameters())


@pytest.fixture
def stand_ins(monkeypatch):
    """In place of CUDA graphs, whose memory they do not know."""
    cuda = {
        "CUDAGraph": Mock,
        "Stream": lambda *_: Mock(),
        "current_stream": lambda *_: Mock(),
        "stream": lambda *_: nullcontext(),
        "graph": lambda *_, **__: nullcontext(),
        "graph_pool_handle": lambda: (0, 1),
    }
    for name, fake in cuda.items():
        monkeypatch.setattr(torch.cuda, name, fake)


class OnGPU(torch.Tensor):
    """Says so."""

    is_cuda = True


def test_every_call_replays_the_graph_of_its_shape_which_was_warmed_up(stand_ins, monkeypatch):
    model = build("spikformer_4_384")
    compiled = compile_for_inference(model, images_at_once=3)
    runs, captured = [], []
    run = compiled._run
    monkeypatch.setattr(compiled, "_run", lambda given: runs.append(len(given)) or run(given))
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: captured.append(len(runs)) or nullcontext())
    images = images_for(model, 3)
    for count in (3, 3, 2, 3):
        compiled(images[:count].as_subclass(OnGPU))
    assert [graph.replay.call_count for graph, *_ in compiled._captured.values()] == [3, 1]
    first, second = captured
    # Kernels are compiled before, for the same shape, and the last run of each is the captured one.
    assert runs == [3] * (first + 1) + [2] * (second - first)
    assert first >= 1
    assert second >= first + 2


def test_a_graph_keeps_the_state_of_its_shape_and_no_graph_outlives_its_weights(stand_ins):
    """A graph of streaming layers goes on to write the state it was captured with, also after another shape came."""
    model = build("spikformer_4_384")
    compiled = compile_for_inference(model, mixing="streaming", images_at_once=3)
    images = images_for(model, 3)
    captured = compiled._captured[images.shape, images.dtype] = compiled._capture(images)
    _, _, logits, streams = captured
    (layer, *_) = [module for module in compiled.modules() if isinstance(module, StreamingAttention)]
    assert streams[0] is layer.stream is not None
    compiled(images[:2])
    assert layer.stream is not streams[0]
    assert torch.equal(logits, compiled(images))
    compiled.float()
    assert not compiled._captured
    assert compiled(images.float()).dtype == torch.float32


def saved_and_loaded(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("again", [copy.deepcopy, saved_and_loaded])
@pytest.mark.parametrize("host", ["spikformer_4_384", "qkformer_4_384", "sdt_v1_8_512", "sdt_v3_s"])
@torch.no_grad()
def test_copies_stand_alone(host, again):
    """A copy computes with its own weights and membranes, also after the model that it was made from has changed."""
    model = build(host)
    images = images_for(model)
    compiled = compile_for_inference(model, tile_mib=0.02, mixing="streaming")
    expected = compiled(images)
    copied = again(compiled)
    for parameter in compiled.parameters():
        parameter.zero_()
    assert not torch.equal(compiled(images), expected)
    for _ in range(2):
        assert torch.equal(copied(images), expected)


@pytest.mark.parametrize("mixing", ["parallel", "streaming"])
@torch.no_grad()
def test_threads_wait_for_each_other(mixing):
    model = build("spikformer_4_384")
    compiled = compile_for_inference(model, mixing=mixing)
    images = [images_for(model).roll(n, -1) for n in range(4)]
    expected = [compiled(image) for image in images]
    assert not torch.equal(expected[0], expected[1])
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(compiled, images * 5))
    assert all(torch.equal(logits, expected[i % 4]) for i, logits in enumerate(found))


@torch.no_grad()
def test_moved_and_told_to_train():
    """The compiled model follows `to`, and has one mode only."""
    model = build("spikformer_4_384", drop_path=0.5)
    images = images_for(model)
    compiled = compile_for_inference(model.float(), mixing="streaming")
    compiled(images.float())
    compiled.double().train()
    assert not any(module.training for module in compiled.modules())
    torch.testing.assert_close(compiled(images), model.double()(images), rtol=1e-9, atol=1e-9)


def test_logits_are_ordinary_tensors():
    model = build("spikformer_4_384", dtype=torch.float32)
    images = images_for(model)
    compiled = compile_for_inference(model)
    compiled(images).add_(1)
    head = nn.Linear(7, 2)
    head(compiled(images)).sum().backward()
    assert head.weight.grad is not None
    assert compiled.forward_features(images).mul_(2).shape[1] == 3


def test_bad_input():
    model = build("spikformer_4_384", "ssa")
    for options, message in (
        ({"images_at_once": 0}, "images_at_once: expected an integer >= 1, got 0"),
        ({"tile_mib": -1}, "tile_mib: expected a positive number, got -1"),
        ({"tile_mib": 0.0}, "tile_mib: expected a positive number, got 0.0"),
        ({"tile_mib": float("inf")}, "tile_mib: expected a finite number or None, got inf"),
        ({"steps": "single"}, "steps: unknown name 'single'"),
        ({"mixing": "stream"}, "mixing: unknown name 'stream'; did you mean streaming"),
        ({"mixing": "streaming"}, "mixing: attention 'ssa' has no streaming form"),
    ):
        with pytest.raises(LrfdynError, match=message):
            compile_for_inference(model, **options)
    with pytest.raises(
        LrfdynError, match="model: expected an object of type SpikingModel, got an object of type Identity"
    ):
        compile_for_inference(nn.Identity())  # type: ignore[arg-type]
    with pytest.raises(LrfdynError, match="evaluation mode"):
        compile_for_inference(model.train())
    with pytest.raises(LrfdynError, match="images: expected"):
        compile_for_inference(model.eval())(torch.zeros(3, 24, 24))
    with pytest.raises(LrfdynError, match="images: expected"):
        compile_for_inference(model).plan(torch.zeros(3, 24, 24))
    with pytest.raises(LrfdynError, match="images: expected a tensor, got ndarray"):
        compile_for_inference(model)(torch.zeros(1, 3, 24, 24).numpy())  # type: ignore[arg-type]
