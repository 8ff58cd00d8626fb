"""What SDT-V1 alone has: dropped keys, shortcuts inside the MLP, its own attention."""

from __future__ import annotations

import torch

import lrfdyn
from lrfdyn.models.official import load_official_state
from lrfdyn.models.sdt_v1 import MLP
from lrfdyn.models.transformer import CIFAR_POOLING
from tests.golden_rule import load, official_state
from tests.models.host_checks import check_trains, golden_model, small_model


def test_unused_talking_heads_are_dropped():
    fixture = load("sdt_v1_small")
    report = load_official_state(golden_model(fixture), official_state(fixture))
    assert report.dropped == ("block.0.attn.talking_heads.weight", "block.1.attn.talking_heads.weight")


def test_inner_shortcut_where_the_mlp_keeps_the_width():
    torch.manual_seed(0)
    x = 2 * torch.randn(3, 2, 8, 4, 4)
    same, wider = MLP(8, 8), MLP(8, 16)
    inner = x + same.fc1(x)
    torch.testing.assert_close(x + same(x), inner + same.fc2(inner))
    assert torch.equal(wider(x), wider.fc2(wider.fc1(x)))
    check_trains(small_model("sdt_v1", mlp_ratio=1), (32, 32))


def test_sdsa_is_the_attention_unless_told():
    assert type(small_model("sdt_v1").blocks[0].attn) is lrfdyn.ATTENTIONS["sdsa"]


def test_pooling_of_the_cifar_form():
    with torch.device("meta"):
        model = lrfdyn.create_model("sdt_v1_2_512")
        maps = model.feature_maps(torch.empty(2, 3, 32, 32))
    assert model.config["pooling"] == CIFAR_POOLING
    assert [info.stride for info in model.feature_info] == [1, 1, 2, 4]
    assert [tuple(m.shape[2:]) for m in maps] == [(64, 32, 32), (128, 32, 32), (256, 16, 16), (512, 8, 8)]
    assert model.forward_head(maps[-1]).shape == (2, 100)
