"""The segmentation network: any host below, the published number of parameters in the head."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lrfdyn import from_pretrained
from lrfdyn.errors import LrfdynError
from lrfdyn.io.hub import build_trained, model_config
from lrfdyn.models import create_model
from lrfdyn.models.base import FeatureInfo
from lrfdyn.models.summary import count_parameters
from lrfdyn.nn.neurons import IntegerSpike
from lrfdyn.segmentation import Segmenter, create_segmenter
from lrfdyn.segmentation.model import FPNHead, enlarge
from tests.segmentation.make import CLASSES, tiny_model

SMALL = {
    "spikformer_8_384": {"dim": 16, "heads": 2, "depth": 1},
    "qkformer_10_384": {"dim": 32, "heads": 2},
    "sdt_v1_8_384": {"dim": 16, "heads": 2, "depth": 1},
    "sdt_v2_15m": {"widths": (8, 16, 16, 16), "heads": 2, "depths": (1, 1, 1, 1, 1)},
    "sew_resnet34": {},
}


@pytest.mark.parametrize("size", ["s", "m", "l"])
@pytest.mark.parametrize("kind", ["ssa", "lrf_ssa", "lrf_dyn"])
def test_head_has_the_published_parameters(size, kind):
    with torch.device("meta"):
        model = create_segmenter(f"sdt_v3_{size}", attention=kind)
        alone = create_model(f"sdt_v3_{size}", attention=kind, num_classes=0)
    assert round(count_parameters(model.head) / 1e6, 1) == 1.4
    assert count_parameters(model.backbone) == count_parameters(alone)
    assert [info.stride for info in model.feature_info] == [2, 4, 8, 16]


def test_head_of_the_published_code():
    """Counted by hand: 4 laterals, 4 + 7 convolutions of 3x3, norms, the classifier."""
    with torch.device("meta"):
        model = create_segmenter("sdt_v3_s", head_options={"output_stride": 2})
    laterals = (16 + 32 + 64 + 192) * 128 + 4 * 128
    convolutions = 11 * 128 * 128 * 9 + 4 * 128
    assert count_parameters(model.head) == laterals + convolutions + 15 * 2 * 128 + 128 * 150 + 150


@pytest.mark.parametrize("name", SMALL)
def test_every_host(name):
    model = create_segmenter(name, num_classes=5, image_size=64, head_options={"width": 8}, **SMALL[name])
    images = torch.randn(2, 3, 64, 96)
    logits = model(images)
    assert logits.shape == (2, 5, 64, 96)
    logits.square().sum().backward()
    assert all(p.grad is not None for p in model.parameters()), "a parameter that takes no part"


@pytest.mark.parametrize("kind", ["ssa", "lrf_ssa", "lrf_dyn"])
def test_size_of_the_output(kind):
    model = tiny_model(attention=kind).eval()
    for size in ((32, 32), (48, 80), (33, 47)):
        assert model(torch.randn(1, 3, *size)).shape == (1, CLASSES, *size)
    assert model.head(model.feature_maps(torch.randn(1, 3, 48, 80))).shape == (1, CLASSES, 12, 20)


def test_a_constant_map_stays_constant_inside():
    """Nearest and bilinear resizing of the pyramid keep what is the same everywhere; only borders see the padding."""
    head = FPNHead([FeatureInfo(4, 2), FeatureInfo(6, 8)], 3, IntegerSpike, width=8).eval()
    maps = [torch.full((1, 1, 4, 32, 32), 2.0), torch.full((1, 1, 6, 8, 8), 1.0)]
    logits = head(maps)
    inner = logits[0, :, 6:-6, 6:-6]
    assert torch.allclose(inner, inner[:, :1, :1].expand_as(inner), atol=1e-6)


@pytest.mark.parametrize(("size", "new"), [((4, 6), (16, 24)), ((5, 3), (7, 12)), ((1, 2), (4, 4))])
def test_enlarging_by_products_is_interpolation(size, new):
    x = torch.randn(2, 3, *size, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 3, *new, dtype=torch.float64)
    products, usual = enlarge(x, new), F.interpolate(x, size=new, mode="bilinear")
    assert torch.allclose(products, usual, rtol=0, atol=1e-6)
    (a,), (b,) = (torch.autograd.grad((y * weight).sum(), x) for y in (products, usual))
    assert torch.allclose(a, b, rtol=0, atol=1e-5)


def test_integer_spikes_everywhere():
    """Whatever a convolution of the head takes is made of D binary steps."""
    model = tiny_model()
    seen = []

    def note(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen.append(args[0])

    for module in model.head.modules():
        if isinstance(module, nn.Conv2d) and module is not model.head.classifier:
            module.register_forward_pre_hook(note)
    model(torch.randn(2, 3, 32, 32))
    assert len(seen) == 4 + 4 + 5
    for spikes in seen:
        assert torch.equal(spikes * 4, (spikes * 4).round())
        assert 0 <= spikes.min() <= spikes.max() <= 1


def test_saved_and_loaded(tmp_path):
    model = tiny_model(attention="lrf_dyn", dilations=(1,), token="qkv").eval()
    images = torch.randn(1, 3, 32, 48)
    model.save_pretrained(tmp_path)
    loaded = from_pretrained(tmp_path)
    assert isinstance(loaded, Segmenter)
    assert loaded.config["attention_options"] == {"dilations": (1,), "token": "qkv"}
    assert torch.equal(loaded(images), model(images))


def test_wrong_options():
    with pytest.raises(LrfdynError, match=r"unknown name 'sdt_v3_x'"):
        create_segmenter("sdt_v3_x")
    with pytest.raises(LrfdynError, match="output_stride: expected a power of two"):
        tiny_model(head_options={"output_stride": 3})
    with pytest.raises(LrfdynError, match="dilations"):
        create_segmenter("sdt_v3_t", attention="ssa", dilations=(1,))
    with pytest.raises(LrfdynError, match="num_classes: expected an integer >= 1"):
        tiny_model(num_classes=0)


class FakeNet(nn.Module):
    """What timm gives with features_only: maps of five stages."""

    def __init__(self, in_chans: int) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            nn.Conv2d(a, b, 3, 2, 1) for a, b in ((in_chans, 8), (8, 8), (8, 16), (16, 24), (24, 32))
        )
        channels, strides = [8, 8, 16, 24, 32], [2, 4, 8, 16, 32]
        self.feature_info = SimpleNamespace(channels=lambda: channels, reduction=lambda: strides)

    def forward(self, x: Tensor) -> list[Tensor]:
        maps = []
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        return maps


def test_ann_through_timm(monkeypatch):
    timm = ModuleType("timm")
    asked = {}

    def build(name, *, pretrained, features_only, in_chans):
        asked.update(name=name, pretrained=pretrained, features_only=features_only)
        return FakeNet(in_chans)

    timm.create_model = build  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "timm", timm)
    model = create_segmenter("timm/resnet18", num_classes=4, image_size=64, pretrained=True)
    assert asked == {"name": "resnet18", "pretrained": True, "features_only": True}
    assert model.config["backbone_options"] is None, "a saved model must not fetch weights again"
    assert [info.stride for info in model.feature_info] == [4, 8, 16, 32]
    assert not any(isinstance(module, IntegerSpike) for module in model.modules())
    assert model(torch.randn(1, 3, 64, 96)).shape == (1, 4, 64, 96)
    neck = 256 * (8 + 16 + 24 + 32) + 4 * 256 + 4 * (256 * 256 * 9 + 256)
    paths = 4 * 256 * 128 * 9 + 3 * 128 * 128 * 9 + 7 * 2 * 128
    assert count_parameters(model.head) == neck + paths + 128 * 4 + 4


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("resnet18", {"checkpoint_path": "/tmp/evil.pth"}, "option of timm/resnet18: unknown name 'checkpoint_path'"),
        ("resnet18", {"pretrained_cfg_overlay": {"file": "/tmp/evil.pth"}}, "unknown name 'pretrained_cfg_overlay'"),
        ("resnet18", {"pretrained_cfg": {"hf_hub_id": "some/one"}}, "unknown name 'pretrained_cfg'"),
        ("resnet18", {"cache_dir": "/tmp"}, "unknown name 'cache_dir'"),
        ("resnet18", {"img_size": "/tmp/evil.pth"}, "img_size: expected a number or several, got '/tmp/evil.pth'"),
        ("resnet18", {"out_indices": [1, {"file": "x"}]}, "out_indices: expected a number or several"),
        ("hf-hub:some/one", {}, "model: expected a name in timm's registry, got 'hf-hub:some/one'"),
        ("local-dir:/tmp/evil", {}, "expected a name in timm's registry"),
    ],
)
def test_a_file_cannot_make_timm_read_another(name, options, message, monkeypatch):
    """The options of a backbone come from config.json, and timm unpickles or fetches what some of them name."""
    monkeypatch.setitem(sys.modules, "timm", SimpleNamespace(create_model=pytest.fail))
    with pytest.raises(LrfdynError, match=message):
        Segmenter(backbone=f"timm/{name}", backbone_options=options)


def test_a_file_cannot_make_timm_fetch_weights(monkeypatch, tmp_path):
    asked = []

    def build(name, *, pretrained, features_only, in_chans, drop_path_rate):
        asked.append((pretrained, drop_path_rate))
        return FakeNet(in_chans)

    monkeypatch.setitem(sys.modules, "timm", SimpleNamespace(create_model=build))
    model = create_segmenter("timm/resnet18", num_classes=2, drop_path_rate=0.1)
    config = model_config(model)
    config["options"]["backbone_options"]["pretrained"] = True
    build_trained(config, model.state_dict(), tmp_path, tmp_path, host=Segmenter)
    assert asked == [(False, 0.1), (False, 0.1)]


def test_without_timm(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(LrfdynError, match=r"needs timm; pip install 'lrfdyn\[timm\]'"):
        create_segmenter("timm/resnet18")


def test_resnet18_of_the_table():
    """15.5 M with its head, as published; 15.43 M counted."""
    pytest.importorskip("timm")
    with torch.device("meta"):
        model = create_segmenter("timm/resnet18")
    assert count_parameters(model) == pytest.approx(15.5e6, rel=0.01)
