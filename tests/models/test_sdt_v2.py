"""What SDT-V2 alone has: re-parametrised convolutions and a second classifier."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import lrfdyn
from lrfdyn.models.official import load_official_state
from lrfdyn.models.sdt_v2 import SDTV2, RepConv
from tests.golden_rule import filled, images, load, official_state
from tests.models.host_checks import golden_model


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
    model, plain = golden_model(fixture, distillation=True), golden_model(fixture)
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
        torch.testing.assert_close(model.forward_steps(x).mean(0), average)
    both = model.train()(x)
    assert isinstance(both, tuple)
    torch.testing.assert_close(both[0], plain.train()(x))
    sum(y.sum() for y in both).backward()
    assert all(p.grad is not None for p in model.parameters())
