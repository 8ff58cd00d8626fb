"""QKFormer against the official code's numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lrfdyn
from lrfdyn.attention import Attention
from lrfdyn.models.qkformer import QKFormer, TokenAttention
from lrfdyn.nn.neurons import LIF
from tests.golden_rule import check_behaviour, check_layout, filled, images, load
from tests.models.host_checks import (
    check_drop_path,
    check_event_frames,
    check_feature_maps,
    check_rule,
    check_trains,
    randomize,
)

SMALL = ["qkformer_imagenet_small", "qkformer_cifar_small"]
FORMS = ["imagenet", "cifar"]


def build(fixture: dict[str, Any], variant: str = "fixed") -> QKFormer:
    config = fixture["config"]
    return QKFormer(
        dim=config["embed_dim"],
        depth=config["depth"],
        heads=config["num_heads"],
        mlp_ratio=config["mlp_ratio"],
        form=fixture["family"].removeprefix("qkformer_"),
        legacy_neuron_axis=variant == "legacy",
        image_size=config["image_size"],
        num_classes=config["num_classes"],
        time_steps=config["T"],
    )


def small(**options: Any) -> QKFormer:
    preset = {"dim": 32, "depth": 5, "heads": 4, "mlp_ratio": 2, "image_size": 32, "num_classes": 5, "time_steps": 2}
    return QKFormer(**{**preset, **options})


@pytest.mark.parametrize("name", SMALL)
def test_rule_draws_the_fixture_s_numbers(name):
    check_rule(load(name))


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("variant", ["legacy", "fixed"])
@pytest.mark.parametrize("name", SMALL)
def test_numbers_of_the_official_code(name, variant, mode):
    fixture = load(name)
    check_layout(build(fixture, variant), fixture)
    check_behaviour(lambda: build(fixture, variant), fixture, variant, mode)


@pytest.mark.parametrize(
    ("fixture", "model"),
    [
        ("params_qkformer_10_384", "qkformer_10_384"),
        ("params_qkformer_10_512", "qkformer_10_512"),
        ("params_qkformer_10_768", "qkformer_10_768"),
        ("params_qkformer_cifar_4_384_c100", "qkformer_4_384"),
    ],
)
def test_layout_of_the_full_sizes(fixture, model):
    with torch.device("meta"):
        built = lrfdyn.create_model(model)
    want = load(fixture)
    check_layout(built, want)
    assert built.config["heads"] == want["config"]["num_heads"]
    assert built.config["time_steps"] == want["config"]["T"]


@pytest.mark.parametrize("name", SMALL)
def test_only_the_legacy_neuron_depends_on_the_batch(name):
    fixture = load(name)
    x = images(fixture)
    with torch.no_grad():
        fixed, legacy = (filled(build(fixture, variant), fixture).eval() for variant in ("fixed", "legacy"))
        one_by_one = torch.cat([fixed(image) for image in x.split(1)])
        torch.testing.assert_close(fixed(x), one_by_one, rtol=0, atol=1e-10)
        # T * B images are T steps where B = 1.
        torch.testing.assert_close(torch.cat([legacy(image) for image in x.split(1)]), one_by_one, rtol=0, atol=1e-10)
        assert (legacy(x) - one_by_one).abs().max() > 1e-2


def test_token_attention_gates_the_keys_of_a_head():
    torch.manual_seed(0)
    attn = randomize(small()).double().stages[1].blocks[0].attn
    assert isinstance(attn, TokenAttention)
    x = torch.randint(0, 3, (2, 3, 16, 4, 5)).double()
    q, k = attn.q(x), attn.k(x)
    expected = torch.zeros_like(k)
    for head in range(4):
        channels = slice(4 * head, 4 * head + 4)
        expected[:, :, channels] = LIF(threshold=0.5)(q[:, :, channels].sum(2)).unsqueeze(2) * k[:, :, channels]
    assert 0 < expected.mean() < k.mean()  # some gates are open, some closed
    assert torch.equal(attn(x), attn.proj(expected))


@pytest.mark.parametrize("time_steps", [1, 4])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("attention", lrfdyn.ATTENTIONS)
def test_every_attention_trains_in_stage_3(attention, form, time_steps):
    torch.manual_seed(0)
    model = small(attention=attention, form=form, time_steps=time_steps)
    kinds = [[type(block.attn) for block in stage.blocks] for stage in model.stages]
    assert set(kinds[0] + kinds[1]) == {TokenAttention}
    assert set(kinds[2]) == {lrfdyn.ATTENTIONS[attention]}
    assert sum(map(len, kinds)) == 5
    check_trains(model, (32, 32))


@pytest.mark.parametrize("attention", ["ssa", "lrf_dyn"])
@pytest.mark.parametrize("form", FORMS)
def test_odd_sizes_other_channels_and_the_legacy_neuron_train(form, attention):
    torch.manual_seed(0)
    options = {"form": form, "attention": attention, "legacy_neuron_axis": True}
    check_trains(small(in_channels=2, image_size=37, time_steps=1, **options), (37, 21))


@pytest.mark.parametrize("size", [(32, 32), (33, 47)])
@pytest.mark.parametrize(("form", "strides"), [("imagenet", [4, 8, 16]), ("cifar", [1, 2, 4])])
def test_feature_maps(form, strides, size):
    model = small(form=form)
    assert [info.stride for info in model.feature_info] == strides
    assert [info.channels for info in model.feature_info] == [8, 16, 32]
    check_feature_maps(model, size)
    grids = {m.grid for m in model.modules() if isinstance(m, Attention)}
    assert grids == {(32 // strides[-1], 32 // strides[-1])}


@pytest.mark.parametrize("form", FORMS)
def test_event_frames(form):
    torch.manual_seed(0)
    check_event_frames(small(form=form, time_steps=3), (32, 32))


@pytest.mark.parametrize("form", FORMS)
def test_drop_path(form):
    torch.manual_seed(0)
    check_drop_path(lambda **options: small(form=form, **options), (32, 32))


def test_attention_options_reach_stage_3():
    model = lrfdyn.create_model("qkformer_4_384", attention="lrf_dyn", token="qkv", dilations=(1,), dim=64)
    attention = [m for m in model.modules() if isinstance(m, lrfdyn.ATTENTIONS["lrf_dyn"])]
    assert len(attention) == 2
    assert all(m.token == "qkv" and m.lrf.dilations == (1,) and m.grid == (8, 8) for m in attention)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim": 36}, "dim: expected a multiple of 8"),
        ({"heads": 16}, "heads: expected a divisor of stage 1's width 8"),
        ({"heads": 0}, "heads: expected an integer >= 1"),
        ({"depth": 3}, "depth: expected an integer >= 4"),
        ({"depth": 2, "form": "cifar"}, "depth: expected an integer >= 3"),
        ({"form": "cifar100"}, "did you mean cifar"),
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
