"""SDT-V2 against the official code's numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lrfdyn
from lrfdyn.models.official import load_official_state
from lrfdyn.models.sdt_v2 import SDTV2, RepConv
from tests.golden_rule import check_behaviour, check_layout, filled, images, load, official_state
from tests.models.host_checks import (
    check_drop_path,
    check_event_frames,
    check_feature_maps,
    check_rule,
    check_trains,
)

SMALL = ["sdt_v2_small", "sdt_v2_small_t1"]


def build(fixture: dict[str, Any], **options: Any) -> SDTV2:
    config = fixture["config"]
    return SDTV2(
        widths=config["embed_dim"],
        heads=config["num_heads"],
        mlp_ratio=config["mlp_ratio"],
        image_size=config["image_size"],
        num_classes=config["num_classes"],
        time_steps=config["T"],
        **options,
    )


def small(**options: Any) -> SDTV2:
    preset = {"widths": (8, 16, 24, 32), "depths": (1, 1, 1, 2, 1), "heads": 4, "image_size": 32, "num_classes": 5}
    return SDTV2(**{**preset, **options})


@pytest.mark.parametrize("name", SMALL)
def test_rule_draws_the_fixture_s_numbers(name):
    check_rule(load(name))


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("name", SMALL)
def test_numbers_of_the_official_code(name, mode):
    fixture = load(name)
    check_layout(build(fixture), fixture)
    check_behaviour(lambda: build(fixture), fixture, "official", mode)


@pytest.mark.parametrize(
    ("fixture", "model"),
    [
        ("params_sdt_v2_15m", "sdt_v2_15m"),
        ("params_sdt_v2_8_384", "sdt_v2_31m"),
        ("params_sdt_v2_8_512", "sdt_v2_55m"),
    ],
)
def test_layout_of_the_full_sizes(fixture, model):
    with torch.device("meta"):
        built = lrfdyn.create_model(model)
    want = load(fixture)
    check_layout(built, want)
    assert built.config["heads"] == want["config"]["num_heads"]
    assert built.config["time_steps"] == want["config"]["T"]


@pytest.mark.parametrize("time_steps", [1, 4])
@pytest.mark.parametrize("attention", lrfdyn.ATTENTIONS)
def test_every_attention_trains(attention, time_steps):
    torch.manual_seed(0)
    check_trains(small(attention=attention, time_steps=time_steps), (32, 32))


@pytest.mark.parametrize("size", [(32, 32), (33, 47)])
def test_feature_maps(size):
    model = small(time_steps=2)
    assert [info.stride for info in model.feature_info] == [2, 4, 8, 16]
    assert [info.channels for info in model.feature_info] == [4, 8, 16, 32]
    check_feature_maps(model, size)


def test_event_frames():
    torch.manual_seed(0)
    check_event_frames(small(time_steps=3), (32, 32))


@pytest.mark.parametrize("attention", ["ssa", "lrf_dyn"])
def test_odd_sizes_and_other_channels_train(attention):
    torch.manual_seed(0)
    check_trains(small(in_channels=2, image_size=37, time_steps=2, attention=attention), (37, 37))


def test_drop_path():
    torch.manual_seed(0)
    check_drop_path(small, (32, 32))


def test_attention_options_reach_the_attention():
    model = lrfdyn.create_model("sdt_v2_15m", attention="lrf_dyn", token="qkv", dilations=(1,), image_size=32)
    assert isinstance(model, SDTV2)
    attention = [m for m in model.modules() if isinstance(m, lrfdyn.ATTENTIONS["lrf_dyn"])]
    assert len(attention) == 8
    assert all(m.token == "qkv" and m.lrf.dilations == (1,) and m.grid == (2, 2) for m in attention)


def test_rep_conv_is_one_convolution_with_zero_padding():
    """Zeros around the image change nothing: the border stands for them."""
    torch.manual_seed(0)
    layer = RepConv(5, 7).double().eval()
    for bn in (layer.bn1, layer.bn2):
        for tensor in (bn.weight, bn.bias, bn.running_mean):
            assert tensor is not None
            nn.init.normal_(tensor)
    x = torch.randn(2, 5, 6, 4, dtype=torch.float64)
    y = layer(x)
    assert y.shape == (2, 7, 6, 4)
    torch.testing.assert_close(layer(F.pad(x, (2, 2, 2, 2)))[..., 2:-2, 2:-2], y)


def test_distillation_head():
    fixture = load("sdt_v2_small_t1")
    model, plain = build(fixture, distillation=True), build(fixture)
    state = official_state(fixture)
    second = {"head_kd.weight": torch.randn(10, 96).double(), "head_kd.bias": torch.randn(10).double()}
    assert not load_official_state(model.double(), {**state, **second}).dropped
    filled(plain, fixture)
    x = images(fixture)

    with torch.no_grad():
        average, logits = model.eval()(x), plain.eval()(x)
        spikes = plain.head_input(plain.forward_features(x))
        distilled = F.linear(spikes, second["head_kd.weight"], second["head_kd.bias"]).mean(0)
        torch.testing.assert_close(average, (logits + distilled) / 2)
    both = model.train()(x)
    assert isinstance(both, tuple)
    torch.testing.assert_close(both[0], plain.train()(x))
    sum(y.sum() for y in both).backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"widths": (8, 16, 24)}, "widths: expected four"),
        ({"widths": (9, 16, 24, 32)}, "widths: expected an even first width"),
        ({"depths": (1, 1, 2, 6)}, "depths: expected five"),
        ({"depths": (1, 1, 0, 6, 2)}, "depths: expected five"),
        ({"heads": 5}, "heads: expected a divisor of the width 24"),
        ({"heads": 0}, "heads: expected an integer >= 1"),
        ({"mlp_ratio": 0}, "mlp_ratio: expected a positive"),
        ({"image_size": 15}, "image_size: expected at least 16"),
        ({"drop_path": 1.0}, "drop_path: expected a rate"),
        ({"attention": "lrf-dyn"}, "did you mean lrf_dyn"),
    ],
)
def test_errors_name_the_argument(options, message):
    with pytest.raises(lrfdyn.LrfdynError, match=message):
        small(**options)


def test_images_below_the_smallest_are_refused():
    with pytest.raises(lrfdyn.LrfdynError, match="at least 16 pixels"):
        small()(torch.zeros(1, 3, 32, 15))
