"""Spike-driven Transformer V1 against the official code's numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lrfdyn
from lrfdyn.models.official import load_official_state
from lrfdyn.models.sdt_v1 import MLP, SDTV1
from lrfdyn.models.transformer import CIFAR_POOLING
from tests.golden_rule import check_behaviour, check_layout, load, official_state
from tests.models.host_checks import (
    check_drop_path,
    check_event_frames,
    check_feature_maps,
    check_rule,
    check_trains,
)


def build(fixture: dict[str, Any]) -> SDTV1:
    config = fixture["config"]
    return SDTV1(
        dim=config["embed_dim"],
        depth=config["depth"],
        heads=config["num_heads"],
        mlp_ratio=config["mlp_ratio"],
        pooling=[digit == "1" for digit in config["pooling_stat"]],
        image_size=config["image_size"],
        num_classes=config["num_classes"],
        time_steps=config["T"],
    )


def small(**options: Any) -> SDTV1:
    preset = {"dim": 32, "depth": 2, "heads": 4, "mlp_ratio": 2, "image_size": 32, "num_classes": 5, "time_steps": 2}
    return SDTV1(**{**preset, **options})


def test_rule_draws_the_fixture_s_numbers():
    check_rule(load("sdt_v1_small"))


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_numbers_of_the_official_code(mode):
    fixture = load("sdt_v1_small")
    check_layout(build(fixture), fixture)
    check_behaviour(lambda: build(fixture), fixture, "official", mode)


@pytest.mark.parametrize("model", ["sdt_v1_8_384", "sdt_v1_8_512", "sdt_v1_8_768"])
def test_layout_of_the_full_sizes(model):
    with torch.device("meta"):
        built = lrfdyn.create_model(model)
    want = load(f"params_{model}")
    check_layout(built, want)
    assert built.config["heads"] == want["config"]["num_heads"]
    assert built.config["time_steps"] == want["config"]["T"]


def test_unused_talking_heads_are_dropped():
    fixture = load("sdt_v1_small")
    report = load_official_state(build(fixture), official_state(fixture))
    assert report.dropped == ("block.0.attn.talking_heads.weight", "block.1.attn.talking_heads.weight")


def test_inner_shortcut_where_the_mlp_keeps_the_width():
    torch.manual_seed(0)
    x = 2 * torch.randn(3, 2, 8, 4, 4)
    same, wider = MLP(8, 8), MLP(8, 16)
    inner = x + same.fc1(x)
    torch.testing.assert_close(x + same(x), inner + same.fc2(inner))
    assert torch.equal(wider(x), wider.fc2(wider.fc1(x)))
    check_trains(small(mlp_ratio=1), (32, 32))


@pytest.mark.parametrize("time_steps", [1, 4])
@pytest.mark.parametrize("attention", lrfdyn.ATTENTIONS)
def test_every_attention_trains(attention, time_steps):
    torch.manual_seed(0)
    check_trains(small(attention=attention, time_steps=time_steps), (32, 32))


def test_sdsa_is_the_attention_unless_told():
    assert type(small().blocks[0].attn) is lrfdyn.ATTENTIONS["sdsa"]


@pytest.mark.parametrize("attention", ["sdsa", "lrf_dyn"])
def test_odd_sizes_and_other_channels_train(attention):
    torch.manual_seed(0)
    check_trains(small(in_channels=2, image_size=37, attention=attention), (37, 21))


@pytest.mark.parametrize("size", [(32, 32), (33, 47)])
def test_feature_maps(size):
    model = small()
    assert [info.stride for info in model.feature_info] == [2, 4, 8, 16]
    assert [info.channels for info in model.feature_info] == [4, 8, 16, 32]
    check_feature_maps(model, size)


def test_pooling_of_the_cifar_form():
    with torch.device("meta"):
        model = lrfdyn.create_model("sdt_v1_2_512")
        maps = model.feature_maps(torch.empty(2, 3, 32, 32))
    assert model.config["pooling"] == CIFAR_POOLING
    assert [info.stride for info in model.feature_info] == [1, 1, 2, 4]
    assert [tuple(m.shape[2:]) for m in maps] == [(64, 32, 32), (128, 32, 32), (256, 16, 16), (512, 8, 8)]
    assert model.forward_head(maps[-1]).shape == (2, 100)


def test_event_frames():
    torch.manual_seed(0)
    check_event_frames(small(time_steps=3), (32, 32))


def test_drop_path():
    torch.manual_seed(0)
    check_drop_path(small, (32, 32))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim": 36}, "dim: expected a multiple of 8"),
        ({"heads": 5}, "heads: expected a divisor of the width 32"),
        ({"depth": 0}, "depth: expected an integer >= 1"),
        ({"pooling": (True, True)}, "pooling: expected four booleans"),
        ({"mlp_ratio": 0}, "mlp_ratio: expected a positive"),
        ({"image_size": 15}, "image_size: expected at least 16"),
        ({"drop_path": 1.0}, "drop_path: expected a rate"),
        ({"attention": "sdsa2"}, "did you mean sdsa"),
    ],
)
def test_errors_name_the_argument(options, message):
    with pytest.raises(lrfdyn.LrfdynError, match=message):
        small(**options)


def test_images_below_the_smallest_are_refused():
    with pytest.raises(lrfdyn.LrfdynError, match="at least 16 pixels"):
        small()(torch.zeros(1, 3, 32, 15))
