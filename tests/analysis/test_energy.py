"""Operations against counts by hand, one layer type at a time, and against SpikingJelly's counter."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import lrfdyn
from lrfdyn.analysis import firing_rates, locality, measure_model, receptive_field
from lrfdyn.analysis.measure.spikes import EnergyModel, conv_uses, energy
from lrfdyn.attention import create_attention, lif_host
from lrfdyn.errors import LrfdynError
from lrfdyn.models.qkformer import TokenAttention
from lrfdyn.nn.neurons import IF, LIF
from tests.deploy.small import small
from tests.models.host_checks import digits_model

GRID = (3, 3)


def spikes_at(*places, channels=2, size=4):
    """One frame `[1, 1, C, H, W]` with spikes at (channel, row, column)."""
    frame = torch.zeros(1, 1, channels, size, size)
    for place in places:
        frame[(0, 0, *place)] = 1
    return frame


def count(layer, frames):
    """Operations of a layer on event frames, whose first layer sees spikes too."""

    class Net(nn.Module):
        time_steps = frames.shape[0]

        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return self.layer(x.flatten(0, 1))

    return energy(Net(), [frames])


@pytest.mark.parametrize("measure", [energy, firing_rates, locality, receptive_field, measure_model])
def test_no_images(measure):
    with pytest.raises(LrfdynError, match="images: expected at least one batch, got none"):
        measure(digits_model(), [])
    for images in (torch.zeros(0, 1, 8, 8), [torch.zeros(2, 0, 1, 8, 8)]):
        with pytest.raises(LrfdynError, match=r"images: expected no empty dimension, got \["):
            measure(digits_model(), images)


def test_no_images_for_a_network_of_another_kind():
    with pytest.raises(LrfdynError, match=r"images: expected no empty dimension, got \[0, 3\]"):
        energy(nn.Linear(3, 2), torch.zeros(0, 3))


def test_outputs_that_an_input_reaches():
    def along_a_row(size, **settings):
        return conv_uses(nn.Conv2d(1, 1, (1, 3), **settings), 1, size).tolist()

    assert along_a_row(4, padding=(0, 1)) == [[2, 3, 3, 2]]
    assert along_a_row(5, stride=(1, 2), padding=(0, 1)) == [[1, 2, 1, 2, 1]]
    assert along_a_row(6, stride=(1, 2)) == [[1, 1, 2, 1, 1, 0]]  # the last input is not read
    assert along_a_row(7, padding=(0, 3), dilation=(1, 3)) == [[2, 2, 2, 3, 2, 2, 2]]
    assert conv_uses(nn.Conv2d(1, 1, 3, padding=1), 2, 3).tolist() == [[4, 6, 4], [4, 6, 4]]


def test_3x3_convolution_by_hand():
    conv = nn.Conv2d(2, 5, 3, padding=1, bias=False)
    # Inside, a spike meets 9 weights of each of the 5 outputs; in a corner 4.
    record = count(conv, spikes_at((0, 1, 1), (1, 0, 0)))
    assert record["accumulates"] == 5 * (9 + 4)
    assert record["multiply_accumulates"] == 0
    assert record["energy_pj"] == pytest.approx(0.9 * 65)
    assert record["layers"][0]["kind"] == "3x3 convolution"


def test_1x1_and_depth_wise_convolution_by_hand():
    assert count(nn.Conv2d(2, 7, 1), spikes_at((0, 1, 1), (1, 0, 0)))["accumulates"] == 2 * 7
    depth_wise = count(nn.Conv2d(2, 2, 3, padding=1, groups=2), spikes_at((0, 1, 1), (1, 0, 0)))
    assert depth_wise["accumulates"] == 9 + 4
    assert depth_wise["layers"][0]["kind"] == "3x3 depth-wise convolution"


def test_an_integer_is_so_many_spikes_and_a_potential_multiplies():
    conv = nn.Conv2d(2, 7, 1)
    assert count(conv, 3 * spikes_at((0, 1, 1)))["accumulates"] == 3 * 7
    record = count(conv, 0.3 * spikes_at((0, 1, 1)))
    assert record["accumulates"] == 0
    assert record["multiply_accumulates"] == 2 * 7 * 16  # every input, zero or not
    assert record["energy_pj"] == pytest.approx(4.6 * 2 * 7 * 16)


def test_first_layer_of_a_static_image_multiplies_once():
    net = lrfdyn.models.Spikformer(dim=8, depth=1, heads=1, image_size=16, in_channels=1, num_classes=3, time_steps=4)
    images = torch.zeros(3, 1, 16, 16)  # zeros are whole numbers, but pixels are not spikes
    first = energy(net, images)["layers"][0]
    edges = 2 + 14 * 3 + 2  # along a row of 16
    assert first["name"] == "stem.stages.0.conv"
    assert first["multiply_accumulates"] == edges**2  # one channel in, one out
    again = energy(net, images, EnergyModel(repeat_first=True))["layers"][0]
    assert again["multiply_accumulates"] == 4 * edges**2


def test_events_that_are_counted_are_so_many_spikes():
    """Also where the spikes of the other layers are integers that are divided by their levels."""
    model = small("sdt_v3", in_channels=2)
    frames = torch.randint(3, (2, 1, 2, 32, 32)).float()
    first, *_ = energy(model, frames)["layers"]
    conv = model.get_submodule(first["name"])
    assert isinstance(conv, nn.Conv2d)
    uses = conv_uses(conv, 32, 32) * conv.out_channels
    assert first["accumulates"] == float((frames * uses).sum())
    assert first["multiply_accumulates"] == 0
    scaled, *_ = energy(model, frames / 4)["layers"]
    assert scaled["accumulates"] == 0
    assert scaled["multiply_accumulates"] == float(4 * uses.sum())  # of every number in both frames


def host_layer(kind, **options):
    """Attention of two heads of two channels on a 3x3 grid."""
    return create_attention(kind, 4, 2, GRID, lif_host(), **options)


def projected(**places):
    """Spikes of q, k and v `[1, 1, 4, 3, 3]`; places are (channel, token)."""
    made = {}
    for name in "qkv":
        frame = torch.zeros(1, 1, 4, 9, dtype=torch.float64)
        for channel, token in places.get(name, []):
            frame[0, 0, channel, token] = 1
        made[name] = frame.unflatten(3, GRID)
    return made


def plain(counts):
    return {name: (float(part.accumulates), part.multiply_accumulates) for name, part in counts.items()}


def test_ssa_by_hand():
    # Token 4: k fires in channels 0, 1 and v in 0 of head 0: two pairs. Token 5: k in head 0 and v in head 1: none.
    spikes = projected(q=[(0, 0), (3, 8)], k=[(0, 4), (1, 4), (0, 5)], v=[(0, 4), (2, 5)])
    for kind in ("ssa", "causal_ssa"):
        counts = plain(host_layer(kind).operation_counts(spikes, GRID))
        assert counts == {"k^T v": (2, 0), "q (k^T v)": (2 * 2, 0)}


def test_vsa_by_hand():
    # The query spike (0, 0) meets k at tokens 4 and 5 in channel 0; (3, 8) meets none. Two v spikes go to 9 queries.
    spikes = projected(q=[(0, 0), (3, 8)], k=[(0, 4), (1, 4), (0, 5)], v=[(0, 4), (2, 5)])
    assert plain(host_layer("vsa").operation_counts(spikes, GRID)) == {"q k^T": (2, 0), "softmax v": (18, 0)}


def test_sdsa_by_hand():
    spikes = projected(q=[(0, 0)], k=[(0, 4), (1, 4), (2, 5)], v=[(0, 4), (2, 5), (3, 5)])
    assert plain(host_layer("sdsa").operation_counts(spikes, GRID)) == {"k * v": (2, 0)}


def test_the_sum_of_token_attention_by_hand():
    """A spike of q is added to its head once, whatever the keys do: all 4 channels fire at 6 tokens and 3 steps."""
    layer = TokenAttention(4, 2, lif_host()).eval()
    for norm, bias in ((layer.q.bn, 100.0), (layer.k.bn, -100.0)):
        nn.init.constant_(norm.bias, bias)
    frames = torch.ones(3, 2, 4, 2, 3)
    parts = {part["name"]: part for part in energy(nn.Sequential(layer), [frames])["layers"]}
    assert parts["0.q sum"]["accumulates"] == 3 * 4 * 6
    assert parts["0.q sum"]["multiply_accumulates"] == 0
    nn.init.constant_(layer.q.bn.bias, -100.0)
    assert {part["accumulates"] for part in energy(layer, [frames])["layers"] if part["name"].endswith("q sum")} == {0}


def test_layers_are_in_the_order_of_the_computation():
    """What an attention computes stands between its projections and its last layer, also after several batches."""
    layers = energy(digits_model("lrf_ssa"), list(torch.randn(4, 1, 8, 8).split(2)))["layers"]
    inside = [layer["name"].removeprefix("blocks.0.attn.") for layer in layers if ".0.attn." in layer["name"]]
    assert inside == ["q.conv", "k.conv", "v.conv", "k^T v", "q (k^T v)", "lrf", "proj.conv"]
    assert layers[-1]["name"] == "head"


def test_lrf_by_hand():
    spikes = projected(v=[(0, 4), (2, 0)])
    counts = plain(host_layer("lrf_ssa", dilations=(1,)).operation_counts(spikes, GRID))
    assert counts["lrf"] == (9 + 4, 0)  # the centre reaches 9 tokens, the corner 4
    wide = plain(host_layer("lrf_ssa", dilations=(1, 2)).operation_counts(spikes, GRID))
    assert wide["lrf"] == (9 + 4 + 1 + 4, 0)  # at dilation 2 the centre reaches itself, a corner the corners


def test_readings_and_frozen_weights_cost_nothing():
    """A norm and a scale go into the stencils; weights are used whether they learn or not."""
    spikes = projected(q=[(0, 0)], k=[(0, 4), (1, 4)], v=[(0, 4), (2, 0)])
    counts = plain(host_layer("lrf_ssa").operation_counts(spikes, GRID))
    for options in ({"norm": True}, {"scale_lrf": True}, {"train_qk": False}):
        assert plain(host_layer("lrf_ssa", **options).operation_counts(spikes, GRID)) == counts


def test_dendrites_by_hand():
    spikes = projected(v=[(0, 4), (2, 0), (3, 8)])
    counts = plain(host_layer("lrf_dyn", dendrites=2, dilations=(1,)).operation_counts(spikes, GRID))
    tokens, channels = 9, 4
    assert counts["dendrites, input"] == (3 * 1, 0)  # one oscillator per two dendrites takes the spike
    assert counts["dendrites, recurrence"] == (0, 4 * tokens * channels)
    assert counts["dendrites, read-out"] == (0, 2 * tokens * channels)
    assert counts["lrf"] == (0, channels * (4 * 4 + 4 * 6 + 9))  # corners, edges, centre
    real = plain(host_layer("lrf_dyn", dendrites=2, dilations=(1,), coupling="same").operation_counts(spikes, GRID))
    products = {"dendrites, recurrence": (0, 2 * tokens * channels)}  # two real modes: each takes the spike, and decays
    assert real == {**counts, "dendrites, input": (3 * 2, 0), **products}
    twice = plain(host_layer("lrf_dyn", dendrites=2, dilations=(1,), directions=2).operation_counts(spikes, GRID))
    assert twice == {part: (2 * a, 2 * b) if part != "lrf" else (a, b) for part, (a, b) in counts.items()}
    gated = plain(host_layer("lrf_dyn", token="qkv").operation_counts(projected(k=[(0, 4)], v=[(0, 4), (1, 4)]), GRID))
    assert gated["dendrites, input"] == (1 * 4, 0)  # k and v both fire once; 8 dendrites are 4 oscillators


@pytest.mark.parametrize("kind", ["ssa", "vsa", "lrf_ssa", "sdsa"])
def test_a_silent_network_accumulates_nothing(kind):
    net = digits_model(kind)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.constant_(module.bias, -100.0)
    record = energy(net, torch.randn(3, 1, 8, 8))
    assert record["accumulates"] == 0
    assert record["multiply_accumulates"] > 0  # the first convolution
    assert {layer["name"] for layer in record["layers"] if layer["multiply_accumulates"]} == {"stem.stages.0.conv"}


def test_options():
    net, images = digits_model("ssa"), torch.randn(2, 1, 8, 8)
    usual = energy(net, images)
    other = energy(net, images, EnergyModel(accumulate_pj=1.0, multiply_accumulate_pj=2.0, mac_layers=("*.mlp.*",)))
    expected = 1.0 * other["accumulates"] + 2.0 * other["multiply_accumulates"]
    assert other["energy_pj"] == pytest.approx(expected)
    moved = [layer["name"] for layer in other["layers"] if layer["multiply_accumulates"]]
    assert any(".mlp." in name for name in moved)
    assert not any(".mlp." in layer["name"] and layer["multiply_accumulates"] for layer in usual["layers"])
    assert "0.9 pJ" in usual["assumptions"][0]
    assert "1 pJ" in other["assumptions"][0]
    assert "*.mlp.*" in " ".join(other["assumptions"])
    with pytest.raises(LrfdynError, match="accumulate_pj: expected a number >= 0"):
        EnergyModel(accumulate_pj=-1)


def test_counts_do_not_depend_on_the_batches():
    net, images = digits_model("lrf_dyn"), torch.randn(6, 1, 8, 8)
    one, three = energy(net, images), energy(net, images.split(2))
    for key in ("accumulates", "multiply_accumulates", "energy_pj"):
        assert one[key] == pytest.approx(three[key], rel=1e-9)


def test_a_long_film_is_one_film():
    net, film = digits_model("lrf_dyn"), torch.randint(0, 2, (70, 1, 1, 8, 8)).float()
    assert energy(net, film) == energy(net, [film])


@pytest.mark.parametrize(
    "name",
    ["spikformer_4_384", "qkformer_4_384", "sdt_v1_2_512", "sdt_v2_15m", "sdt_v3_t", "sew_resnet18", "ms_resnet18",
     "spikformer_dvs_2_256", "qkformer_dvs_2_256", "sdt_v1_dvs_2_256"],
)  # fmt: skip
def test_every_host_is_counted(name):
    small = {"spikformer_4_384": {"dim": 48}, "qkformer_4_384": {"dim": 64}, "sdt_v1_2_512": {"dim": 32}}.get(name, {})
    net = lrfdyn.create_model(name, time_steps=1, **small)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.constant_(module.bias, 1.0)
    record = energy(net, torch.randn(1, net.in_channels, 32, 32))
    weights = [m for m in net.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    chains = sum(type(m).__name__ == "RepConv" for m in net.modules())
    layers = [layer for layer in record["layers"] if layer["kind"] != "attention"]
    assert len(layers) == len(weights) - 2 * chains  # a chain of three is one convolution
    assert record["accumulates"] > 0
    assert record["layers"][0]["multiply_accumulates"] > 0
    assert math.isfinite(record["energy_pj"])


def spiking_jelly():
    counters = pytest.importorskip("spikingjelly.activation_based.op_counter")
    return counters.SynOpCounter, counters.DispatchCounterMode


def busy(net):
    """A model with enough spikes that every rule counts something."""
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.bias, 0.5, 2.0)
    return net.eval()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        # Hosts in which every spike is 0 or 1: SpikingJelly takes sums of spikes for real numbers, we count them.
        ("ms_resnet18", {"widths": (8, 8, 16, 16), "time_steps": 2}),
        ("sdt_v1_2_512", {"dim": 32, "heads": 4, "attention": "ssa", "time_steps": 2}),
        ("sdt_v1_2_512", {"dim": 32, "heads": 4, "attention": "lrf_ssa", "time_steps": 2}),
    ],
    ids=["ms_resnet", "sdt_v1-ssa", "sdt_v1-lrf_ssa"],
)
def test_equals_spikingjelly_where_both_count_the_same(name, options):
    counter_type, mode = spiking_jelly()
    torch.manual_seed(0)
    net = busy(lrfdyn.create_model(name, num_classes=3, **options))
    images = torch.randn(2, 3, 32, 32)
    counter = counter_type()
    with torch.no_grad(), mode([counter]):
        net(images)
    record = energy(net, images)
    assert counter.get_total() > 10_000
    assert record["accumulates"] * 2 == pytest.approx(counter.get_total(), rel=1e-9)


def test_neurons_of_other_kinds_are_no_synapses():
    record = energy(nn.Sequential(LIF(), IF()), torch.rand(2, 2))
    assert record["layers"] == []
    assert record["energy_pj"] == 0
