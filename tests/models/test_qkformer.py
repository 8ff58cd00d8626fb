"""What QKFormer alone has: token attention, a neuron over the batch, attention in the last stage."""

from __future__ import annotations

import pytest
import torch

import lrfdyn
from lrfdyn.attention import Attention
from lrfdyn.models.qkformer import TokenAttention
from lrfdyn.nn.neurons import LIF
from tests.golden_rule import filled, images, load
from tests.models.host_checks import check_trains, golden_model, randomize, small_model

SMALL = ["qkformer_imagenet_small", "qkformer_cifar_small", "qkformer_dvs_small"]


@pytest.mark.parametrize("name", SMALL)
def test_only_the_legacy_neuron_depends_on_the_batch(name):
    fixture = load(name)
    x = images(fixture)
    batch = x.dim() - 4  # the axis
    with torch.no_grad():
        fixed, legacy = (
            filled(golden_model(fixture, legacy_neuron_axis=legacy), fixture).eval() for legacy in (False, True)
        )
        one_by_one = torch.cat([fixed(image) for image in x.split(1, batch)])
        torch.testing.assert_close(fixed(x), one_by_one, rtol=0, atol=1e-10)
        # T * B images are T steps where B = 1.
        alone = torch.cat([legacy(image) for image in x.split(1, batch)])
        torch.testing.assert_close(alone, one_by_one, rtol=0, atol=1e-10)
        assert (legacy(x) - one_by_one).abs().max() > 1e-2


def test_token_attention_gates_the_keys_of_a_head():
    torch.manual_seed(0)
    attn = randomize(small_model("qkformer_imagenet")).double().stages[1].blocks[0].attn
    assert isinstance(attn, TokenAttention)
    x = torch.randint(0, 3, (2, 3, 16, 4, 5)).double()
    q, k = attn.q(x), attn.k(x)
    expected = torch.zeros_like(k)
    for head in range(4):
        channels = slice(4 * head, 4 * head + 4)
        expected[:, :, channels] = LIF(threshold=0.5)(q[:, :, channels].sum(2)).unsqueeze(2) * k[:, :, channels]
    assert 0 < expected.mean() < k.mean()  # some gates are open, some closed
    assert torch.equal(attn(x), attn.proj(expected))


@pytest.mark.parametrize(("form", "side"), [("imagenet", 2), ("cifar", 8), ("dvs", 2)])
@pytest.mark.parametrize("attention", lrfdyn.ATTENTIONS)
def test_attention_is_that_of_the_last_stage(attention, form, side):
    model = small_model(f"qkformer_{form}", attention=attention, depth=5)
    *tokens, last = [[type(block.attn) for block in stage.blocks] for stage in model.stages]
    assert {kind for kinds in tokens for kind in kinds} == {TokenAttention}
    assert set(last) == {lrfdyn.ATTENTIONS[attention]}
    assert sum(map(len, tokens)) + len(last) == 5
    assert {m.grid for m in model.modules() if isinstance(m, Attention)} == {(side, side)}


@pytest.mark.parametrize("attention", ["ssa", "lrf_dyn"])
@pytest.mark.parametrize("form", ["imagenet", "cifar", "dvs"])
def test_odd_sizes_other_channels_and_the_legacy_neuron_train(form, attention):
    torch.manual_seed(0)
    options = {"image_size": 37, "attention": attention, "legacy_neuron_axis": True}
    check_trains(small_model(f"qkformer_{form}", in_channels=2, time_steps=1, **options), (37, 21))


def test_attention_options_reach_the_last_stage():
    model = lrfdyn.create_model("qkformer_4_384", attention="lrf_dyn", token="qkv", dilations=(1,), dim=64)
    attention = [m for m in model.modules() if isinstance(m, lrfdyn.ATTENTIONS["lrf_dyn"])]
    assert len(attention) == 2
    assert all(m.token == "qkv" and m.lrf.dilations == (1,) and m.grid == (8, 8) for m in attention)
