"""What SDT-V1 alone has: dropped keys, shortcuts inside the MLP, its own attention, its form for event cameras."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import lrfdyn
from lrfdyn.models.official import load_official_state
from lrfdyn.models.sdt_v1 import MLP
from lrfdyn.models.transformer import CIFAR_POOLING
from lrfdyn.training.tasks import Classification, build_loss
from tests.golden_rule import filled, images, load, official_state
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


@pytest.mark.parametrize("name", ["sdt_v1_dvs_2_256", "sdt_v1_gesture_2_256"])
def test_switches_of_the_event_forms(name):
    with torch.device("meta"):
        model = lrfdyn.create_model(name)
    official = load(f"params_{name}_c{model.num_classes}")["config"]
    assert [str(int(pool)) for pool in model.config["pooling"]] == list(official["pooling_stat"])
    assert [block.attn.host.window_maxima for block in model.blocks] == [official["dvs_mode"]] * 2


def test_window_maxima_survive_a_swap_of_attention():
    model = small_model("sdt_v1_dvs").eval()
    frames = torch.randn(2, 3, 2, 32, 32)
    expected = model(frames)
    for kind in ("lrf_dyn", "sdsa"):
        lrfdyn.swap_attention(model, kind)
    assert all(block.attn.host.window_maxima for block in model.blocks)
    assert torch.equal(model(frames), expected)


@torch.no_grad()
def test_temporal_efficient_training_on_the_official_numbers():
    """The logits of every step in evaluation too, and the loss of those in training."""
    fixture = load("sdt_v1_dvs_small")
    model = filled(golden_model(fixture), fixture).eval()
    model.step_logits = True
    official = fixture["variants"]["official"]
    wanted = {mode: torch.tensor(official[mode]["logits"], dtype=torch.float64) for mode in official}
    frames = images(fixture)
    steps = model.head(model.head_input(model.forward_features(frames), each_step=True))
    torch.testing.assert_close(steps, wanted["eval"], rtol=0, atol=1e-9)
    torch.testing.assert_close(model(frames), wanted["eval"].mean(0), rtol=0, atol=1e-9)

    labels, logits = [3, 7], wanted["train"]
    log = logits - logits.exp().sum(-1, keepdim=True).log()
    entropy = -sum(log[t, b, label] for t in range(4) for b, label in enumerate(labels)) / 8
    loss = build_loss(Classification(), 0.001)(model.train()(frames), F.one_hot(torch.tensor(labels), 10).double())
    torch.testing.assert_close(loss, 0.999 * entropy + 0.001 * ((logits - 1) ** 2).sum() / 80, rtol=0, atol=1e-9)


def test_pooling_of_the_cifar_form():
    with torch.device("meta"):
        model = lrfdyn.create_model("sdt_v1_2_512")
        maps = model.feature_maps(torch.empty(2, 3, 32, 32))
    assert model.config["pooling"] == CIFAR_POOLING
    assert [info.stride for info in model.feature_info] == [1, 1, 2, 4]
    assert [tuple(m.shape[2:]) for m in maps] == [(64, 32, 32), (128, 32, 32), (256, 16, 16), (512, 8, 8)]
    assert model.forward_head(maps[-1]).shape == (2, 100)
