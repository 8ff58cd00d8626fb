"""Models by name, and clear words for what cannot be built or run."""

from __future__ import annotations

import pytest
import torch

import lrfdyn
from lrfdyn.errors import LrfdynError
from lrfdyn.models.spikformer import Spikformer


def test_options_reach_host_and_attention():
    model = lrfdyn.create_model(
        "spikformer_4_384", dim=32, heads=4, depth=1, attention="lrf_dyn", dendrites=4, dilations=(1,), token="qkv"
    )
    attention = model.blocks[0].attn
    assert attention.token == "qkv"
    assert attention.dendrites.raw_decay.shape == (32, 2)
    assert attention.lrf.dilations == (1,)
    assert type(model)(**model.config).state_dict().keys() == model.state_dict().keys()


def test_patterns():
    assert lrfdyn.list_models("spikformer_8_*") == ["spikformer_8_384", "spikformer_8_512", "spikformer_8_768"]


def test_largest_spikformer_runs_forward_and_backward():
    model = lrfdyn.create_model("spikformer_8_512", attention="lrf_dyn")
    logits = model(torch.randn(1, 3, 32, 32))
    logits.sum().backward()
    assert logits.shape == (1, 1000)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "spikformer_8_521"}, "model: unknown name 'spikformer_8_521'; did you mean spikformer_8_512"),
        ({"attention": "lrfdyn"}, "attention: unknown name 'lrfdyn'; did you mean lrf_dyn"),
        ({"attention": "lrf_ssa", "dilation": (1,)}, "'dilation'; did you mean dilations"),
        ({"token": "value"}, "option of spikformer_4_384: unknown name 'token'"),
        ({"attention": "lrf_dyn", "token": "key"}, "token: unknown name 'key'"),
        ({"attention": "lrf_dyn", "dendrites": 3}, "dendrites: expected an even number >= 2"),
        ({"attention": "lrf_ssa", "dilations": (0,)}, "dilations: expected different integers >= 1"),
        ({"heads": 7}, "heads: expected a divisor of the width 384, got 7"),
        ({"time_steps": 0}, "time_steps: expected an integer >= 1, got 0"),
        ({"num_classes": -1}, "num_classes: expected an integer >= 0, got -1"),
        ({"image_size": 2}, "image_size: expected at least 4"),
        ({"dim": 12}, "dim: expected a multiple of 8"),
        ({"depth": 0}, "depth: expected an integer >= 1"),
        ({"drop_path": 1.0}, "drop_path: expected a rate in [0, 1)"),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
def test_bad_options_name_the_argument(options, message):
    with pytest.raises(LrfdynError) as error:
        lrfdyn.create_model(**{"name": "spikformer_4_384", **options})
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((3, 32, 32), "images: expected [B, C, H, W] or [T, B, C, H, W], got 3 dimensions"),
        ((2, 1, 32, 32), "images: expected 3 channels, got 1"),
        ((2, 3, 3, 32), "images: expected at least 4 pixels a side, got [3, 32]"),
        ((0, 3, 32, 32), "images: expected no empty dimension"),
        ((0, 2, 3, 32, 32), "images: expected no empty dimension"),
    ],
    ids=str,
)
def test_bad_images_name_the_argument(shape, message):
    model = Spikformer(dim=8, depth=1, heads=1, pooling=(False, False, True, True), image_size=32, num_classes=2)
    with pytest.raises(LrfdynError) as error:
        model(torch.zeros(shape))
    assert message in str(error.value)
