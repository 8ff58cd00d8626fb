"""Models by name, and clear words for what cannot be built or run."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import lrfdyn
from lrfdyn import register_model
from lrfdyn.attention import ATTENTIONS
from lrfdyn.deploy import compile_for_inference
from lrfdyn.errors import LrfdynError
from lrfdyn.models import ModelConfig, SpikingModel, registry
from lrfdyn.models.base import classifier
from lrfdyn.models.spikformer import Spikformer
from lrfdyn.nn.layers import SpikingConv
from lrfdyn.nn.neurons import LIF
from lrfdyn.registry import Registry


def small() -> Spikformer:
    return Spikformer(dim=8, depth=1, heads=1, pooling=(False, False, True, True), image_size=32, num_classes=2)


def test_options_reach_host_and_attention():
    model = lrfdyn.create_model(
        "spikformer_4_384", dim=32, heads=4, depth=1, attention="lrf_dyn", dendrites=4, dilations=(1,), token="qkv"
    )
    attention = model.blocks[0].attn
    assert attention.token == "qkv"
    assert attention.dendrites.raw_decay.shape == (32, 2)
    assert attention.lrf.dilations == (1,)
    assert type(model)(**model.config).state_dict().keys() == model.state_dict().keys()


@dataclass
class OwnConfig(ModelConfig):
    width: int = 4


class OwnHost(SpikingModel):
    """A host of another package: one spiking convolution."""

    config_class = OwnConfig

    def __init__(self, **options: Any) -> None:
        config = OwnConfig(**options)
        super().__init__(config)
        self.describe_stages([config.width], [2])
        self.conv = SpikingConv(config.in_channels, config.width, LIF(), kernel=3, stride=2)
        self.head = classifier(config.width, config.num_classes)

    def forward_stages(self, x: Tensor, only_last: bool = False) -> list[Tensor]:
        return [self.conv(x)]

    def head_input(self, x: Tensor) -> Tensor:
        return x.mean((0, 3, 4))


def test_own_host_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "_HOSTS", Registry("model"))  # other tests go through all models
    register_model("own_host_wide", width=6)(OwnHost)
    register_model("own_host")(OwnHost)
    assert lrfdyn.list_models("own_*") == ["own_host", "own_host_wide"]
    model = lrfdyn.create_model("own_host_wide", num_classes=3).eval()
    assert (model.name, model.num_features, model.config["width"]) == ("own_host_wide", 6, 6)
    images = torch.randn(2, 3, 8, 8)
    logits = model(images)
    assert logits.shape == (2, 3)
    model.save_pretrained(tmp_path)
    assert torch.equal(lrfdyn.from_pretrained(tmp_path)(images), logits)
    torch.testing.assert_close(compile_for_inference(model)(images), logits)
    with pytest.raises(LrfdynError, match="option of own_host: unknown name 'widht'; did you mean width"):
        lrfdyn.create_model("own_host", widht=3)
    with pytest.raises(LrfdynError, match="model: the name 'own_host' is taken"):
        register_model("own_host")(Spikformer)


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
        ({"tokens": "value"}, "option of spikformer_4_384: unknown name 'tokens'"),
        ({"token": "value"}, "token: not an option of attention 'ssa', but of lrf_dyn"),
        ({"dilations": (1,)}, "dilations: not an option of attention 'ssa', but of "),
        ({"attention_options": {"dilations": (1,)}}, "dilations: not an option of attention 'ssa', but of "),
        ({"name": "sew_resnet18", "attention_options": {"dilations": (1,)}}, "unknown name 'attention_options'"),
        ({"name": "sew_resnet18", "dilations": (1,)}, "option of sew_resnet18: unknown name 'dilations'"),
        ({"attention": "lrf_dyn", "token": "key"}, "token: unknown name 'key'"),
        ({"attention": "lrf_dyn", "dendrites": 3}, "dendrites: expected an even number (pairs are coupled), got 3"),
        ({"attention": "lrf_dyn", "dendrites": 8.0}, "dendrites: expected an integer >= 2, got 8.0"),
        ({"attention": "lrf_ssa", "dilations": (0,)}, "dilations: expected different integers >= 1"),
        ({"attention": "lrf_ssa", "dilations": 3}, "dilations: expected a sequence of integers, got 3"),
        ({"attention": "lrf_dyn", "dilations": "35"}, "dilations: expected a sequence of integers, got '35'"),
        ({"attention": "lrf_dyn", "dilations": (1.5,)}, "dilations: expected a sequence of integers, got (1.5,)"),
        ({"heads": 7}, "heads: expected a divisor of the width 384, got 7"),
        ({"time_steps": 0}, "time_steps: expected an integer >= 1, got 0"),
        ({"num_classes": -1}, "num_classes: expected an integer >= 0, got -1"),
        ({"image_size": 2}, "image_size: expected at least 4"),
        ({"dim": 12}, "dim: expected a multiple of 8"),
        ({"depth": 0}, "depth: expected an integer >= 1"),
        ({"depth": (4,)}, "depth: expected an integer >= 1, got (4,)"),
        ({"time_steps": 2.0}, "time_steps: expected an integer >= 1, got 2.0"),
        ({"time_steps": True}, "time_steps: expected an integer >= 1, got True"),
        ({"num_classes": "10"}, "num_classes: expected an integer >= 0, got '10'"),
        ({"in_channels": 0}, "in_channels: expected an integer >= 1, got 0"),
        ({"image_size": 32.0}, "image_size: expected an integer >= 1, got 32.0"),
        ({"image_size": (32, 32)}, "image_size: expected an integer >= 1, got (32, 32)"),
        ({"dim": 384.0}, "dim: expected an integer >= 1, got 384.0"),
        ({"heads": 12.0}, "heads: expected an integer >= 1, got 12.0"),
        ({"heads": 0}, "heads: expected an integer >= 1, got 0"),
        ({"name": "sdt_v2_15m", "heads": 8.0}, "heads: expected an integer >= 1, got 8.0"),
        ({"name": "sdt_v3_s", "widths": (32, 64, 128, 192.0)}, "widths: expected a sequence of integers"),
        ({"name": "sdt_v3_s", "levels": 4.0}, "levels: expected an integer >= 1, got 4.0"),
        ({"name": "sew_resnet18", "depths": 2}, "depths: expected a sequence of integers, got 2"),
        ({"drop_path": 1.0}, "drop_path: expected a rate in [0, 1)"),
        ({"drop_path": -0.1}, "drop_path: expected a rate in [0, 1)"),
        ({"drop_path": 1.0, "depth": 1}, "drop_path: expected a rate in [0, 1)"),
        ({"drop_path": "0.1"}, "drop_path: expected a finite number, got '0.1'"),
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
        ((3, 32, 32), "images: expected [B, C, H, W] or [T, B, C, H, W], got [3, 32, 32]"),
        ((2, 1, 32, 32), "images: expected 3 channels, got 1"),
        ((2, 3, 3, 32), "images: expected at least 4 pixels a side, got [3, 32]"),
        ((0, 3, 32, 32), "images: expected no empty dimension"),
        ((0, 2, 3, 32, 32), "images: expected no empty dimension"),
    ],
    ids=str,
)
def test_bad_images_name_the_argument(shape, message):
    model = small()
    with pytest.raises(LrfdynError) as error:
        model(torch.zeros(shape))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        (torch.uint8, "images: expected floating-point numbers, got torch.uint8"),
        (torch.complex64, "images: expected floating-point numbers, got torch.complex64"),
        (torch.float64, "images: expected torch.float32, as the model is, or autocast, got torch.float64"),
        (torch.bfloat16, "images: expected torch.float32, as the model is, or autocast, got torch.bfloat16"),
    ],
    ids=str,
)
def test_images_of_another_dtype_are_refused(dtype, message):
    with pytest.raises(LrfdynError) as error:
        small()(torch.zeros(1, 3, 32, 32, dtype=dtype))
    assert message in str(error.value)


def test_reduced_precision_runs():
    images = torch.rand(1, 3, 32, 32)
    assert small().bfloat16()(images.bfloat16()).dtype == torch.bfloat16
    for x in (images, images.bfloat16()):
        with torch.autocast("cpu", torch.bfloat16):
            assert small()(x).shape == (1, 2)


@pytest.mark.parametrize("name", ["spikformer_4_384", "qkformer_4_384", "sdt_v3_t", "sew_resnet18", "ms_resnet18"])
def test_classification_keeps_no_early_maps(name):
    """What the first stages made is let go when it has been read; only `feature_maps` gives it to the caller."""
    model = lrfdyn.create_model(name, num_classes=3).eval()
    images = torch.randn(1, 3, 32, 32)
    early = weakref.WeakSet()
    stages = model.stem.stages if name.startswith("spikformer") else model.stages
    stages[0].register_forward_hook(lambda _, __, out: early.add(out))
    alive = []
    model.head.register_forward_pre_hook(lambda *_: alive.append(len(early)))
    with torch.no_grad():
        model(images)
        assert alive == [0]
        maps = model.feature_maps(images)
        assert len(early) == 1
        assert torch.equal(maps[-1], model.forward_features(images))


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_shapes_without_memory(kind):
    """On the device `meta`, where large models are planned before there is anything to hold them."""
    with torch.device("meta"):
        model = lrfdyn.create_model("spikformer_4_384", attention=kind)
        logits = model(torch.empty(2, 3, 32, 32))
    assert (logits.shape, logits.device.type) == ((2, 100), "meta")
