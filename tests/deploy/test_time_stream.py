"""Models that run along: after every frame what the parallel pass gives for the frames until then, bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import lrfdyn
from lrfdyn.attention.ssa import SSA
from lrfdyn.deploy import StreamingAttention, TimeStream
from lrfdyn.errors import LrfdynError
from lrfdyn.models.base import SpikingModel
from lrfdyn.nn.layers import SpikingConv
from lrfdyn.nn.neurons import LIF, PaperLIF
from tests.conftest import random
from tests.deploy.small import HOSTS, KINDS, live, side, small
from tests.models.host_checks import digits_model
from tests.segmentation.make import tiny_model

CASES = [(host, kind) for host in HOSTS for kind in ((None,) if "resnet" in host else (None, "lrf_dyn"))]
CASES += [("spikformer_dvs", kind) for kind in KINDS if kind not in ("ssa", "lrf_dyn")]


def frames_for(host: str, model: SpikingModel, steps: int, batch: int) -> Tensor:
    return random(steps, batch, model.in_channels, *side(host, model))


@torch.no_grad()
def check(model: SpikingModel, frames: Tensor) -> None:
    """Logits after every step, and those of every step by itself, whose mean they are."""
    stream, own = TimeStream(model), []
    for t, frame in enumerate(frames, 1):
        logits = stream.step(frame)
        assert torch.equal(logits, model(frames[:t])), t
        assert stream.steps == t
        assert stream.step_logits is not None
        own.append(stream.step_logits)
        torch.testing.assert_close(torch.stack(own).mean(0), logits, rtol=0, atol=1e-12)
    assert len({tuple(x.flatten().tolist()) for x in own}) > 1, "the steps must matter"


@pytest.mark.parametrize(("host", "kind"), CASES)
def test_equals_the_parallel_pass(host, kind):
    model = small(host, kind).double()
    for batch in (1, 2):
        check(model, frames_for(host, model, 3, batch))


def test_many_steps_and_every_neuron():
    """The membranes of neurons whose leak and gain are no powers of two round at every step."""
    model = small("spikformer_dvs", "lrf_dyn").double()
    neurons = [(path, m) for path, m in model.named_modules() if isinstance(m, LIF)]
    for i, (path, neuron) in enumerate(neurons):
        other = (LIF(tau=3.0), PaperLIF(decay=0.3), LIF(tau=1.7, v_reset=0.1))[i % 3]
        model.set_submodule(path, other if neuron.dynamics.threshold == 1 else neuron)
    check(model, frames_for("spikformer_dvs", model, 20, 1))


def test_neurons_that_run_over_the_batch():
    model = small("qkformer", "ssa", legacy_neuron_axis=True).double()
    frames = frames_for("qkformer", model, 3, 3)
    check(model, frames)
    with torch.no_grad():
        alone = TimeStream(model).step(frames[0, 2:])
        assert not torch.equal(alone, model(frames[:1])[2:])  # the images of the batch do matter


def test_two_classifiers():
    """The mean over time of two means is rounded in another order."""
    model = small("sdt_v2", distillation=True).double()
    frames, stream = frames_for("sdt_v2", model, 3, 2), TimeStream(model)
    with torch.no_grad():
        logits = [stream.step(frame) for frame in frames]
        torch.testing.assert_close(logits[-1], model(frames), rtol=1e-14, atol=1e-14)


def test_static_images_and_reset():
    model = small("spikformer", "lrf_dyn", time_steps=3).double()
    image = random(2, 3, 16, 16)
    stream = TimeStream(model)
    with torch.no_grad():
        for _ in range(2):
            for _ in range(3):
                logits = stream.step(image)
            assert torch.equal(logits, model(image))
            stream.reset()
    assert stream.steps == stream.nbytes == 0
    assert stream.step_logits is None
    assert stream.step(image[:1]).shape == (1, 5)  # of another batch, after a reset


class Twice(SpikingModel):
    """A host that calls one neuron in two places, which in a parallel pass both start from rest."""

    def __init__(self, **options):
        super().__init__(lrfdyn.models.base.ModelConfig(**options))
        self.describe_stages([4], [1])
        neuron = LIF()
        self.stem = nn.Sequential(SpikingConv(self.in_channels, 4, neuron, kernel=3), SpikingConv(4, 4, neuron))
        self.stages = nn.ModuleList([nn.Identity()])
        self.head = nn.Linear(4, self.num_classes)


def test_a_neuron_in_two_places():
    torch.manual_seed(0)
    model = live(Twice(num_classes=3, time_steps=4), 6)
    frames, stream = random(5, 2, 3, 6, 6), TimeStream(model)
    assert isinstance(model.stem[0], SpikingConv)
    assert model.stem[0].neuron is model.stem[1].neuron
    with torch.no_grad():
        for t, frame in enumerate(frames, 1):
            torch.testing.assert_close(stream.step(frame), model(frames[:t]), rtol=0, atol=1e-14)


@pytest.mark.parametrize("host", HOSTS)
def test_state_is_what_is_derived(host):
    model = small(host)
    size, stream = side(host, model), TimeStream(model)
    derived = sum(term.bytes for term in stream.state_terms(2, size))
    for _ in range(2):
        stream.step(torch.zeros(2, model.in_channels, *size))
        assert stream.nbytes == derived > 0


def test_state_by_hand():
    """Of the digits model every neuron: stem, position, v, the soma, its projection and the MLP; 16 sums of spikes."""
    model = digits_model()
    terms = TimeStream(model.eval()).state_terms()
    channels = [2, 4, 8, 16, 16, 16, 16, 16, 16, 16]
    assert [term.elements for term in terms] == [64 * c for c in channels] + [16]
    assert sum(term.bytes for term in terms) == 4 * (64 * sum(channels) + 16)
    double = TimeStream(model.double())
    double.step(random(3, 1, 8, 8))
    assert double.nbytes == 3 * 8 * (64 * sum(channels) + 16)
    legacy = small("qkformer", "ssa", legacy_neuron_axis=True)
    one, two = ({t.name: t.elements for t in TimeStream(legacy).state_terms(batch)} for batch in (1, 2))
    same = [name for name in one if one[name] == two[name]]
    assert same == ["stages.2.blocks.0.attn.proj.neuron"]  # one membrane for the whole batch
    assert math.prod(legacy.grid) * 16 == one[same[0]]


def test_weights_are_shared_and_the_model_stays_as_it_is():
    model = small("spikformer", "ssa").double()
    before = {name: type(module) for name, module in model.named_modules()}
    stream, image = TimeStream(model), random(1, 3, 16, 16)
    with torch.no_grad():
        first = stream.step(image)
        model.head.bias.add_(1)
        stream.reset()
        assert torch.equal(stream.step(image), model(image[None]))
        assert not torch.equal(first, model(image[None]))
    assert before == {name: type(module) for name, module in model.named_modules()}


def test_an_error_leaves_the_stream_as_it_was():
    model = small("spikformer").double()
    frames, stream = frames_for("spikformer", model, 2, 1), TimeStream(model)
    stream.step(frames[0])
    wrong = [
        (frames, r"frame: expected one frame \[B, C, H, W\], got \[2, 1, 3, 16, 16\]"),
        (frames[0].repeat(2, 1, 1, 1), r"frame: expected \[1, 3, 16, 16\] as before, got \[2, 3, 16, 16\]"),
        (frames[0].float(), "images: expected torch.float64"),
        (None, "frame: expected a tensor, got NoneType"),
    ]
    for frame, message in wrong:
        with pytest.raises(LrfdynError, match=message):
            stream.step(frame)  # type: ignore[arg-type]
    handle = stream.network.blocks[0].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        stream.step(frames[1])
    handle.remove()
    with torch.no_grad():
        assert torch.equal(stream.step(frames[1]), model(frames))


class OverTime(SSA):
    """Every step takes the values of all steps, those to come among them."""

    kind = "over_time"

    def mix(self, *spikes):
        q, k, v = spikes
        return super().mix(q, k, v.mean(0, keepdim=True).expand_as(v))


class OwnNeuron(LIF):
    def forward(self, x):
        return super().forward(x.flip(0)).flip(0)


def test_what_cannot_run_along():
    def refused(model, message):
        with pytest.raises(LrfdynError, match=message):
            TimeStream(model)

    refused(small("spikformer").train(), "model: expected evaluation mode")
    refused(tiny_model().eval(), "model: expected a classifier|model: expected an object of type SpikingModel")
    vit = lrfdyn.create_model("vit_4_384", dim=16, heads=2, depth=1).eval()
    refused(vit, "model: a network without spikes has no membranes")
    model = small("spikformer", "ssa")
    attn = model.blocks[0].attn
    other = OverTime(attn.dim, attn.heads, attn.grid, attn.host)
    model.set_submodule("blocks.0.attn", other)
    refused(model.eval(), "model: attention 'over_time' looks at later time steps")
    model = small("spikformer", "lrf_dyn")
    model.set_submodule("blocks.0.attn", StreamingAttention(model.blocks[0].attn))
    refused(model.eval(), r"model: blocks.0.attn runs over rows")
    model = small("spikformer", "ssa")
    model.set_submodule("blocks.0.mlp.fc1.bn", nn.BatchNorm2d(16, track_running_stats=False))
    refused(model.eval(), "model: blocks.0.mlp.fc1.bn takes its statistics from all time steps")
    model = small("spikformer", "ssa")
    model.set_submodule("blocks.0.mlp.fc1.neuron", OwnNeuron())
    refused(model, "model: neuron OwnNeuron cannot be run step by step")
    with pytest.raises(LrfdynError, match="model: expected an object of type SpikingModel"):
        TimeStream(nn.Linear(2, 2))
