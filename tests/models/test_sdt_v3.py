"""SDT-V3 against the official code's numbers, and its integer spikes against binary steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lrfdyn
from lrfdyn.models.sdt_v3 import SDTV3
from lrfdyn.nn.layers import ConvBN, MembraneConv
from lrfdyn.nn.neurons import IntegerSpike
from lrfdyn.ops.lif import integer_to_binary
from tests.golden_rule import check_behaviour, check_layout, load
from tests.models.host_checks import (
    check_drop_path,
    check_event_frames,
    check_feature_maps,
    check_rule,
    check_trains,
    randomize,
)


def build(fixture: dict[str, Any]) -> SDTV3:
    config = fixture["config"]
    return SDTV3(
        widths=config["embed_dim"],
        heads=config["num_heads"],
        mlp_ratio=config["mlp_ratio"],
        image_size=config["image_size"],
        num_classes=config["num_classes"],
    )


def small(**options: Any) -> SDTV3:
    preset = {"widths": (8, 16, 24, 32), "depths": (1, 1, 1, 2, 1), "heads": 4, "image_size": 32, "num_classes": 5}
    return SDTV3(**{**preset, **options})


def test_rule_draws_the_fixture_s_numbers():
    check_rule(load("sdt_v3_small"))


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_numbers_of_the_official_code(mode):
    fixture = load("sdt_v3_small")
    check_layout(build(fixture), fixture)
    check_behaviour(lambda: build(fixture), fixture, "official", mode)


@pytest.mark.parametrize("size", ["t", "s", "m", "l"])
def test_layout_of_the_full_sizes(size):
    with torch.device("meta"):
        built = lrfdyn.create_model(f"sdt_v3_{size}")
    want = load(f"params_sdt_v3_{size}")
    check_layout(built, want)
    assert built.config["heads"] == want["config"]["num_heads"]
    assert built.config["time_steps"] == 1


@pytest.mark.parametrize("time_steps", [1, 4])
@pytest.mark.parametrize("attention", lrfdyn.ATTENTIONS)
def test_every_attention_trains(attention, time_steps):
    torch.manual_seed(0)
    check_trains(small(attention=attention, time_steps=time_steps), (32, 32))


def test_gated_tokens_train_with_wide_values():
    torch.manual_seed(0)
    check_trains(small(attention="lrf_dyn", attention_options={"token": "qkv"}), (32, 32))


def test_neurons_of_lrf_dyn_are_the_ordinary_ones():
    model = small(attention="lrf_dyn", levels=3)
    neurons = [m for m in model.modules() if isinstance(m, IntegerSpike)]
    assert {n.levels for n in neurons} == {3}
    assert [n.normalize for n in neurons].count(False) == 1
    assert model.neuron in neurons
    assert not model.neuron.normalize


@pytest.mark.parametrize("size", [(32, 32), (33, 47)])
def test_feature_maps(size):
    model = small()
    assert [info.stride for info in model.feature_info] == [2, 4, 8, 16]
    assert [info.channels for info in model.feature_info] == [4, 8, 16, 32]
    check_feature_maps(model, size)


def test_event_frames():
    torch.manual_seed(0)
    check_event_frames(small(time_steps=3), (32, 32))


def test_frames_are_independent_and_their_logits_averaged():
    torch.manual_seed(0)
    model = randomize(small()).double().eval()
    frames = torch.randn(3, 2, 3, 32, 32, dtype=torch.float64)
    with torch.no_grad():
        one_by_one = torch.stack([model(frame) for frame in frames])
        torch.testing.assert_close(model(frames), one_by_one.mean(0), rtol=0, atol=1e-10)


@pytest.mark.parametrize("attention", ["ssa", "lrf_dyn"])
def test_odd_sizes_and_other_channels_train(attention):
    torch.manual_seed(0)
    check_trains(small(in_channels=2, image_size=37, attention=attention), (37, 37))


def test_drop_path():
    torch.manual_seed(0)
    check_drop_path(small, (32, 32))


@pytest.mark.parametrize("levels", [1, 3, 4])
def test_an_integer_spike_is_that_many_binary_steps(levels):
    """Every convolution behind an integer neuron, fed with binary steps and averaged, gives what the network has."""
    torch.manual_seed(0)
    model = randomize(small(levels=levels)).double().eval()
    seen: dict[MembraneConv, list[torch.Tensor]] = {}
    for module in model.modules():
        if isinstance(module, MembraneConv):
            module.neuron.register_forward_hook(lambda _m, _args, out, layer=module: seen.update({layer: [out]}))
            module.register_forward_hook(lambda layer, _args, out: seen[layer].append(out))
    with torch.no_grad():
        model(torch.randn(2, 3, 32, 32, dtype=torch.float64))
        assert seen
        for layer, (spikes, output) in seen.items():
            steps = integer_to_binary(spikes, levels)
            assert set(steps.unique().tolist()) == {0, 1}
            averaged = torch.stack([ConvBN.forward(layer, step) for step in steps]).mean(0)
            torch.testing.assert_close(averaged, output, rtol=0, atol=1e-12)


def test_levels_below_one_are_refused():
    with pytest.raises(lrfdyn.LrfdynError, match="levels: expected an integer >= 1"):
        small(levels=0)
