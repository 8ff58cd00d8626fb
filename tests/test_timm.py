"""The models as timm's users meet them.

Where timm is not installed, a stand-in does what timm's registry does with the four names that `lrfdyn.timm` takes from
it; what needs the real one is skipped.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import lrfdyn
from lrfdyn.errors import LrfdynError
from lrfdyn.models import SDTV2, Spikformer, SpikingModel, list_models
from lrfdyn.models.base import Backbone

HAS_TIMM = importlib.util.find_spec("timm") is not None
needs_timm = pytest.mark.skipif(not HAS_TIMM, reason="timm is not installed")
SMALL = {"dim": 16, "heads": 2, "depth": 1, "img_size": 32}


class StandIn(ModuleType):
    """timm's registry in short: entry points by name, configurations from the entry point's module."""

    def __init__(self) -> None:
        super().__init__("timm")
        self.entry_points: dict[str, Any] = {}
        self.configs: dict[str, dict[str, Any]] = {}
        self.models = ModuleType("timm.models")
        for function in (self.register_model, self.generate_default_cfgs, self.resolve_pretrained_cfg):
            setattr(self.models, function.__name__, function)
        self.models.FeatureInfo = FeatureInfo  # type: ignore[attr-defined]

    def register_model(self, entry: Any) -> Any:
        module = sys.modules[entry.__module__]
        module.__all__.append(entry.__name__)
        self.entry_points[entry.__name__] = entry
        self.configs[entry.__name__] = {**module.default_cfgs[entry.__name__], "architecture": entry.__name__}
        return entry

    def generate_default_cfgs(self, configs: dict[str, Any]) -> dict[str, Any]:
        return configs

    def resolve_pretrained_cfg(self, name: str, pretrained_cfg: Any = None, pretrained_cfg_overlay: Any = None) -> Any:
        config = {**(pretrained_cfg or self.configs[name]), **(pretrained_cfg_overlay or {})}
        return type("Config", (), {"to_dict": lambda _: config})()

    def create_model(self, name: str, pretrained: bool = False, **options: Any) -> Any:
        options = {key: value for key, value in options.items() if value is not None}
        fixed = {"pretrained_cfg": None, "pretrained_cfg_overlay": None, "cache_dir": None}
        if "/" in name:  # timm tells paths from names
            raise ValueError(f"Model name {name!r} looks like a path")
        return self.entry_points[name](pretrained=pretrained, **{**fixed, **options})


class FeatureInfo:
    def __init__(self, info: list[dict[str, Any]], out_indices: tuple[int, ...]) -> None:
        self.info, self.out_indices = info, out_indices

    def channels(self) -> list[int]:
        return [self.info[i]["num_chs"] for i in self.out_indices]

    def reduction(self) -> list[int]:
        return [self.info[i]["reduction"] for i in self.out_indices]


@pytest.fixture(scope="module")
def timm() -> Iterator[Any]:
    if HAS_TIMM:
        import timm

        import lrfdyn.timm

        yield timm
        return
    stand_in = StandIn()
    modules = {"timm": stand_in, "timm.models": stand_in.models}
    sys.modules.update(modules)
    import lrfdyn.timm

    yield stand_in
    for name in (*modules, "lrfdyn.timm"):
        del sys.modules[name]
    del lrfdyn.timm


def images(size: int = 32, channels: int = 3) -> torch.Tensor:
    return torch.randn(2, channels, size, size, generator=torch.Generator().manual_seed(0))


def busy(model: nn.Module, channels: int = 3) -> Any:
    """In evaluation mode, with the statistics of the images and gains that keep the neurons firing."""
    torch.manual_seed(0)
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        nn.init.normal_(norm.weight, 2.5, 0.2)
        nn.init.normal_(norm.bias, std=0.5)
    for momentum in (1.0, 0.1):
        for norm in norms:
            norm.momentum = momentum
        model.train()(images(channels=channels))
    return model.eval()


def test_it_is_the_model_of_this_package(timm):
    torch.manual_seed(0)
    theirs = timm.create_model("spikformer_8_512", attention="lrf_dyn", dilations=(1, 3), **SMALL)
    torch.manual_seed(0)
    options = {"dim": 16, "heads": 2, "depth": 1, "image_size": 32}
    ours = lrfdyn.create_model("spikformer_8_512", attention="lrf_dyn", dilations=(1, 3), **options)
    assert type(theirs) is type(ours)
    assert theirs.config == ours.config
    assert theirs.name == "spikformer_8_512"
    logits = busy(theirs)(images())
    assert logits.std() > 0
    assert torch.equal(logits, busy(ours)(images()))


def test_every_model_is_registered_with_its_configuration(timm):
    from lrfdyn.timm import default_cfgs, default_config

    assert sorted(default_cfgs) == list_models()
    for name in list_models():
        with torch.device("meta"):
            model = timm.create_model(f"{name}")
        config = model.pretrained_cfg
        assert model.default_cfg is config
        assert config["architecture"] == name
        assert tuple(config["input_size"]) == model.input_size
        assert config["num_classes"] == model.num_classes
        first = model.get_submodule(config["first_conv"])
        assert isinstance(first, nn.Conv2d)
        assert first.in_channels == (2 if "dvs" in name or "gesture" in name else 3)
        assert model.get_submodule(config["classifier"]) is model.get_classifier()
        assert len(config["mean"]) == len(config["std"]) == first.in_channels
    assert default_config("spikformer_4_384")["input_size"] == (3, 32, 32)
    assert default_config("qkformer_10_512")["pool_size"] == (14, 14)
    assert default_config("sew_resnet34")["pool_size"] == (7, 7)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("spikformer_8_512", SMALL),
        ("qkformer_10_512", {**SMALL, "depth": 4}),
        ("sdt_v1_8_512", SMALL),
        ("spikformer_dvs_2_256", SMALL),
        ("qkformer_dvs_2_256", {**SMALL, "depth": 2}),
        ("sdt_v1_dvs_2_256", SMALL),
        ("sdt_v2_15m", {"widths": (8, 8, 16, 16), "heads": 2, "img_size": 32}),
        ("sdt_v3_s", {"widths": (8, 8, 16, 16), "heads": 2, "img_size": 32}),
        ("sew_resnet18", {"widths": (4, 8, 8, 16), "img_size": 32}),
        ("ms_resnet18", {"widths": (4, 8, 8, 16), "img_size": 32}),
    ],
)
def test_parts_add_up(timm, name, options):
    model = busy(timm.create_model(name, num_classes=7, in_chans=2, time_steps=2, **options), channels=2)
    x = images(channels=2)
    with torch.no_grad():
        logits = model(x)
        features = model.forward_features(x)
        pooled = model.forward_head(features, pre_logits=True)
        assert logits.shape == (2, model.num_classes) == (2, 7)
        assert features.shape[:3] == (2, 2, model.num_features)
        assert logits.std() > 0
        assert torch.equal(model.forward_head(features), logits)
        assert pooled.shape == (2, model.num_features)
        torch.testing.assert_close(model.get_classifier()(pooled), logits)

        model.reset_classifier(3)
        assert model(x).shape == (2, 3)
        assert model.num_classes == model.config["num_classes"] == 3
        model.reset_classifier(0)
        assert isinstance(model.get_classifier(), nn.Identity)
        assert torch.equal(model(x), pooled)


def test_classifier_follows_type_and_both_heads(timm):
    model = timm.create_model("spikformer_8_512", **SMALL).double()
    model.reset_classifier(4)
    assert model.head.weight.dtype == torch.float64
    twice = SDTV2(widths=(8, 8, 16, 16), heads=2, image_size=32, num_classes=5, distillation=True)
    twice.reset_classifier(4)
    assert [logits.shape for logits in twice.train()(images())] == [(2, 4), (2, 4)]
    with pytest.raises(LrfdynError, match="num_classes"):
        model.reset_classifier(-1)


def test_no_classifier_from_the_start(timm):
    model = timm.create_model("spikformer_8_512", num_classes=0, **SMALL)
    assert model(images()).shape == (2, 16)


def test_options_in_timm_s_words(timm):
    passed_by_scripts = {"drop_rate": 0.0, "global_pool": None, "drop_path_rate": 0.1, "scriptable": None}
    if not HAS_TIMM:
        passed_by_scripts.pop("scriptable")
    options = {**SMALL, "img_size": (48, 48), **passed_by_scripts}
    model = timm.create_model("spikformer_8_512", **options)
    assert model.config["drop_path"] == 0.1
    assert model.config["image_size"] == 48
    for wrong, message in (
        ({"drop_rate": 0.2}, "drop_rate: expected 0.0"),
        ({"global_pool": "max"}, "global_pool: expected 'avg'"),
        ({"img_size": (32, 48)}, "img_size: expected a square"),
        ({"hedas": 3}, "did you mean heads"),
        ({"attention": "lrfdyn"}, "did you mean lrf_dyn"),
        ({"out_indices": (1,)}, "out_indices: is for features_only"),
    ):
        with pytest.raises(LrfdynError, match=message):
            timm.create_model("spikformer_8_512", **{**SMALL, **wrong})


def test_pretrained_weights_that_nobody_has_are_an_error(timm):
    with pytest.raises(LrfdynError, match=r"pretrained: no trained spikformer_8_512 with ssa in the zoo"):
        timm.create_model("spikformer_8_512", pretrained=True)


def test_pretrained_weights_are_those_of_the_zoo(timm, monkeypatch):
    """The model with its own classes and input, whatever those of its name are."""
    asked: list[Any] = []
    trained = Spikformer(dim=16, heads=2, depth=1, image_size=32, num_classes=7)
    monkeypatch.setattr("lrfdyn.timm.create_model", lambda *args, **options: asked.append((args, options)) or trained)
    model = timm.create_model("spikformer_8_512", pretrained=True, in_chans=3)
    assert model is trained
    assert asked == [(("spikformer_8_512",), {"pretrained": True, "in_channels": 3})]
    assert model.pretrained_cfg["num_classes"] == 7
    assert model.pretrained_cfg["input_size"] == (3, 32, 32)


@pytest.mark.parametrize(
    ("name", "options", "channels", "strides"),
    [
        ("spikformer_8_512", SMALL, [2, 4, 8, 16], [2, 4, 8, 16]),
        ("qkformer_10_512", {**SMALL, "depth": 4}, [4, 8, 16], [4, 8, 16]),
        ("sdt_v3_s", {"widths": (8, 8, 12, 16), "heads": 2, "img_size": 32}, [4, 8, 8, 16], [2, 4, 8, 16]),
        ("sew_resnet18", {"widths": (4, 8, 8, 16), "img_size": 32}, [4, 8, 8, 16], [4, 8, 16, 32]),
    ],
)
def test_features_only(timm, name, options, channels, strides):
    net = busy(timm.create_model(f"{name}", features_only=True, **options))
    assert net.feature_info.channels() == channels
    assert net.feature_info.reduction() == strides
    assert "num_classes" not in net.pretrained_cfg
    assert not any("head" in key for key in net.state_dict())
    x = images()
    with torch.no_grad():
        maps = net(x)
        whole = net.model.feature_maps(x)
    assert [tuple(m.shape) for m in maps] == [(2, c, 32 // s, 32 // s) for c, s in zip(channels, strides, strict=True)]
    for averaged, steps in zip(maps, whole, strict=True):
        assert torch.equal(averaged, steps.mean(0))
    assert maps[-1].any()


@pytest.mark.parametrize(
    ("out_indices", "stages"), [((1, 3), [1, 3]), ([-1], [3]), ((0, -2), [0, 2]), (2, [2, 3]), (None, [0, 1, 2, 3])]
)
def test_out_indices(timm, out_indices, stages):
    net = busy(timm.create_model("spikformer_8_512", features_only=True, out_indices=out_indices, **SMALL))
    assert net.feature_info.channels() == [(2, 4, 8, 16)[i] for i in stages]
    with torch.no_grad():
        assert [m.shape[1] for m in net(images())] == net.feature_info.channels()


@pytest.mark.parametrize("wrong", [(4,), (-5,), 5, 0, ()])
def test_stages_that_do_not_exist(wrong):
    with pytest.raises(LrfdynError, match="out_indices: expected some of the 4 stages"):
        Backbone(lrfdyn.create_model("spikformer_8_512", dim=16, heads=2, depth=1), wrong)


def test_backbone_trains(timm):
    net = timm.create_model("spikformer_8_512", features_only=True, attention="lrf_dyn", **SMALL)
    assert isinstance(net, Backbone)
    sum(m.square().mean() for m in net.train()(images())).backward()
    assert all(p.grad is not None for p in net.parameters())


def test_saved_and_loaded(timm, tmp_path):
    model = busy(timm.create_model("spikformer_8_512", attention="lrf_ssa", num_classes=9, **SMALL))
    model.reset_classifier(5)
    model.save_pretrained(tmp_path)
    loaded = SpikingModel.from_pretrained(tmp_path)
    assert torch.equal(loaded(images()), model(images()))


def test_without_timm_the_error_says_what_to_install():
    code = "import sys; sys.modules['timm'] = None; import lrfdyn.timm"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "ImportError: lrfdyn.timm needs timm" in done.stderr
    assert "pip install 'lrfdyn[timm]'" in done.stderr


@needs_timm
def test_timm_s_own_lists(timm):
    assert set(list_models()) <= set(timm.list_models())
    for name in list_models():
        assert timm.is_model(name)
        assert not timm.is_model_pretrained(name)
        assert timm.model_entrypoint(name).__module__ == "lrfdyn.timm"  # no model of timm's is hidden by ours
        assert timm.get_pretrained_cfg(name).architecture == name
    assert timm.list_models("sdt_v3_*") == [name for name in list_models() if name.startswith("sdt_v3_")]


@needs_timm
def test_timm_s_data_configuration(timm):
    from timm.data import resolve_model_data_config

    config = resolve_model_data_config(timm.create_model("spikformer_4_384"))
    assert config["input_size"] == (3, 32, 32)
    assert config["mean"] == (0.4914, 0.4822, 0.4465)


@needs_timm
def test_timm_s_checkpoint_path(timm, tmp_path):
    from safetensors.torch import save_file

    model = busy(timm.create_model("spikformer_8_512", **SMALL))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    path = str(tmp_path / "model.safetensors")
    loaded = timm.create_model("spikformer_8_512", checkpoint_path=path, **SMALL).eval()
    assert torch.equal(loaded(images()), model(images()))


@needs_timm
def test_timm_s_feature_info(timm):
    from timm.models import FeatureInfo as TimmFeatureInfo

    net = timm.create_model("sdt_v3_s", features_only=True, out_indices=(0, 2))
    assert isinstance(net.feature_info, TimmFeatureInfo)
    assert net.feature_info.module_name() == ["stage0", "stage2"]
    assert len(net.feature_info) == 4
