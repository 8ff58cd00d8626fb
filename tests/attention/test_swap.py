"""Another attention in a model that is already built."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lrfdyn
from lrfdyn.attention import Attention
from lrfdyn.models.base import SpikingModel
from tests.models.host_checks import check_trains, randomize, small_model


def spikformer(**options: Any) -> SpikingModel:
    preset = {"dim": 32, "depth": 2, "heads": 4, "image_size": 32, "num_classes": 5, "time_steps": 2}
    return lrfdyn.create_model("spikformer_8_512", **{**preset, **options})


HOSTS = {
    "spikformer": spikformer,
    "qkformer": partial(small_model, "qkformer_imagenet"),
    "sdt_v1": partial(small_model, "sdt_v1"),
    "qkformer_dvs": partial(small_model, "qkformer_dvs", in_channels=3),
    "sdt_v1_dvs": partial(small_model, "sdt_v1_dvs", in_channels=3),
    "sdt_v2": partial(small_model, "sdt_v2"),
    "sdt_v3": partial(small_model, "sdt_v3"),
}


def images(size: int = 64) -> Tensor:
    return torch.randn(2, 3, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def busy(model: SpikingModel) -> SpikingModel:
    """In float64, with the statistics of real activity, so that the attention matters in evaluation too."""
    model = randomize(model).double().train()
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = 1.0
    with torch.no_grad():
        model(images())
    for norm in norms:
        norm.momentum = 0.1
    return model


def layers(model: nn.Module) -> list[Attention]:
    return [module for module in model.modules() if isinstance(module, Attention)]


@pytest.mark.parametrize("kind", lrfdyn.ATTENTIONS)
@pytest.mark.parametrize("host", HOSTS)
def test_every_host_takes_every_attention(host, kind):
    torch.manual_seed(0)
    model = busy(HOSTS[host]())
    before = layers(model)
    report = lrfdyn.swap_attention(model, kind)
    assert len(report.layers) == len(before) > 0
    assert {type(layer) for layer in layers(model)} == {lrfdyn.ATTENTIONS[kind]}
    assert not set(layers(model)) & set(before)

    # Saved and built again from its configuration, it is the swapped model.
    again = type(model)(**model.config).double()
    again.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(again.eval()(images()), model.eval()(images()))
    check_trains(model.float(), (32, 32))


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("host", HOSTS)
def test_lrf_ssa_without_dilations_is_ssa_bit_by_bit(host, mode):
    torch.manual_seed(0)
    model = busy(HOSTS[host](attention="ssa")).train(mode == "train")
    swapped, other = copy.deepcopy(model), copy.deepcopy(model)
    lrfdyn.swap_attention(swapped, "lrf_ssa", dilations=())
    lrfdyn.swap_attention(other, "lrf_ssa", dilations=(1,))
    assert torch.equal(swapped(images()), model(images()))
    assert not torch.equal(other(images()), model(images()))


def test_there_and_back_is_the_same_model():
    torch.manual_seed(0)
    model = busy(spikformer()).eval()
    expected = model(images())
    before = dict(model.named_parameters())
    lrfdyn.swap_attention(model, "lrf_ssa")
    assert not torch.equal(model(images()), expected)
    lrfdyn.swap_attention(model, "ssa")
    assert torch.equal(model(images()), expected)
    assert {name: id(p) for name, p in model.named_parameters()} == {name: id(p) for name, p in before.items()}


def test_the_report_says_what_became_of_the_parameters():
    model = spikformer()
    before = dict(model.named_parameters())
    report = lrfdyn.swap_attention(model, "lrf_dyn", dendrites=4)
    after = dict(model.named_parameters())
    assert report.layers == ("blocks.0.attn", "blocks.1.attn")
    assert all(after[name] is before[name] for name in report.kept)
    assert {name.split(".")[3] for name in report.kept} == {"v", "proj"}
    assert {name.split(".")[3] for name in report.dropped} == {"q", "k"}
    assert {name.split(".")[3] for name in report.new} == {"dendrites", "lrf", "norm"}
    inside = {name for name in after if ".attn." in name}
    assert inside == {*report.kept, *report.new}
    assert str(report).splitlines() == [
        "swapped to lrf_dyn: blocks.0.attn, blocks.1.attn",
        "kept: v.conv.weight, v.bn.weight, v.bn.bias, proj.conv.weight, proj.conv.bias, proj.bn.weight, proj.bn.bias",
        "dropped: q.conv.weight, q.bn.weight, q.bn.bias, k.conv.weight, k.bn.weight, k.bn.bias",
        "new: dendrites.raw_decay, dendrites.turns, dendrites.weight, lrf.weight, norm.weight, norm.bias",
    ]
    assert "dropped: nothing" in str(lrfdyn.swap_attention(model, "lrf_dyn", dendrites=4))


@pytest.mark.parametrize(
    ("first", "second", "kept", "new"),
    [
        (("lrf_ssa", {}), ("lrf_dyn", {}), {"lrf"}, {"dendrites", "norm"}),
        (("lrf_dyn", {}), ("lrf_ssa", {}), {"lrf"}, {"q", "k"}),
        (("lrf_dyn", {}), ("lrf_dyn", {"token": "qkv"}), {"lrf", "dendrites", "norm"}, {"q", "k"}),
        (("lrf_dyn", {}), ("lrf_dyn", {"dendrites": 4}), {"lrf", "norm"}, {"dendrites"}),
        (("lrf_dyn", {}), ("lrf_dyn", {"dilations": (1, 3)}), {"dendrites", "norm"}, {"lrf"}),
        (("lrf_dyn", {"dendrites": 16}), ("lrf_dyn", {"directions": 2}), {"lrf", "norm"}, {"dendrites"}),
        (("lrf_dyn", {"token": "qkv"}), ("sdsa", {}), {"q", "k"}, set()),
        (("vsa", {}), ("lrf_dyn", {"dilations": ()}), set(), {"dendrites", "norm"}),
        (("lrf_ssa", {}), ("lrf_ssa", {"norm": True}), {"q", "k"}, {"lrf"}),
        (("lrf_ssa", {"norm": True}), ("lrf_ssa", {"norm": True, "scale_lrf": True}), {"q", "k", "lrf"}, set()),
        (("lrf_dyn", {}), ("lrf_dyn", {"coupling": "same"}), {"lrf", "norm"}, {"dendrites"}),
    ],
)
def test_what_two_kinds_share_is_kept(first, second, kept, new):
    model = spikformer(attention=first[0], attention_options=first[1])
    report = lrfdyn.swap_attention(model, second[0], **second[1])
    assert {name.split(".")[3] for name in report.kept} == {"v", "proj", *kept}
    assert {name.split(".")[3] for name in report.new} == new


def test_mode_dtype_and_frozen_parameters_stay():
    model = spikformer().to(torch.bfloat16).train()
    model.blocks[1].attn.eval()
    model.blocks[0].attn.v.bn.eval()
    model.blocks[0].attn.v.conv.weight.requires_grad_(False)
    lrfdyn.swap_attention(model, "lrf_dyn")
    first, second = layers(model)
    assert (first.training, first.norm.training, first.v.bn.training, first.proj.bn.training) == (
        True,
        True,
        False,
        True,
    )
    assert not any(module.training for module in second.modules())
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {"blocks.0.attn.v.conv.weight"}


def test_a_swap_freezes_queries_and_keys_or_frees_them():
    model = spikformer()
    for kind, options, trained in (
        ("lrf_ssa", {"train_qk": False}, False),
        ("ssa", {"train_qk": False}, False),
        ("lrf_dyn", {"token": "qkv"}, True),
        ("vsa", {"train_qk": False}, False),
        ("ssa", {}, True),
    ):
        lrfdyn.swap_attention(model, kind, **options)
        found = {name.split(".")[3]: p.requires_grad for name, p in model.named_parameters() if ".attn." in name}
        assert found["q"] == found["k"] == trained
        assert all(on for part, on in found.items() if part not in "qk")


def test_device_stays():
    with torch.device("meta"):
        model = spikformer()
    lrfdyn.swap_attention(model, "lrf_dyn")
    assert {t.device.type for t in model.state_dict().values()} == {"meta"}


def test_new_projections_start_like_those_of_a_new_model():
    torch.manual_seed(0)
    model = spikformer(attention="lrf_dyn")
    lrfdyn.swap_attention(model, "ssa")
    assert model.blocks[0].attn.q.conv.weight.std().item() == pytest.approx(0.02, rel=0.2)


def test_a_layer_in_two_places_stays_one_layer():
    model = spikformer()
    model.blocks[1].attn = model.blocks[0].attn
    report = lrfdyn.swap_attention(model, "lrf_ssa")
    assert report.layers == ("blocks.0.attn", "blocks.1.attn")
    assert len(layers(model)) == 1


def test_the_configuration_of_a_model_inside_another_is_updated():
    backbone = spikformer()
    config = backbone.config
    lrfdyn.swap_attention(nn.Sequential(backbone, nn.Identity()), "lrf_dyn", dilations=(1,))
    assert (backbone.config["attention"], backbone.config["attention_options"]) == ("lrf_dyn", {"dilations": (1,)})
    assert config["attention"] == "ssa", "what others hold is not changed under their hands"
    lrfdyn.swap_attention(backbone, "ssa")
    assert (backbone.config["attention"], backbone.config["attention_options"]) == ("ssa", None)


@pytest.mark.parametrize("host", HOSTS)
def test_models_are_copied_and_pickled(host):
    torch.manual_seed(0)
    model = busy(HOSTS[host]()).eval()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(images()), model(images()))
        lrfdyn.swap_attention(other, "lrf_dyn")
        assert not {id(p) for p in other.parameters()} & {id(p) for p in model.parameters()}
    assert model.config["attention"] != "lrf_dyn"
    # A layer does not hold on to the model around it.
    assert len(pickle.dumps(layers(model)[0])) < len(pickle.dumps(model)) / 2


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("lrf-dyn", {}, "attention: unknown name 'lrf-dyn'; did you mean lrf_dyn"),
        ("lrf_dyn", {"dilation": (1,)}, "did you mean dilations"),
        ("ssa", {"dilations": (1,)}, "option of attention 'ssa'"),
        ("lrf_dyn", {"dendrites": 3}, "dendrites: expected an even number"),
        ("lrf_dyn", {"token": "values"}, "did you mean value"),
        ("lrf_ssa", {"dilations": (1, 1)}, "dilations: expected different"),
        ("lrf_dyn", {"grid": (2, 2)}, "grid: expected none"),
    ],
)
def test_an_error_leaves_the_model_as_it_was(kind, options, message):
    model = spikformer()
    modules, config = list(model.modules()), dict(model.config)
    with pytest.raises(lrfdyn.LrfdynError, match=message):
        lrfdyn.swap_attention(model, kind, **options)
    assert list(model.modules()) == modules
    assert model.config == config


def test_an_error_in_a_later_layer_leaves_the_earlier_ones():
    model = spikformer()
    model.blocks[1].attn.heads = 5
    modules = list(model.modules())
    with pytest.raises(lrfdyn.LrfdynError, match="heads"):
        lrfdyn.swap_attention(model, "lrf_dyn")
    assert list(model.modules()) == modules


def test_a_kind_with_capitals_is_the_kind():
    model = spikformer()
    assert lrfdyn.swap_attention(model, "LRF_Dyn").kind == model.config["attention"] == "lrf_dyn"


def test_models_without_attention_are_refused():
    with pytest.raises(lrfdyn.LrfdynError, match="found none in SEWResNet"):
        lrfdyn.swap_attention(lrfdyn.create_model("sew_resnet18", widths=(8, 8, 8, 8)), "lrf_dyn")
    with pytest.raises(lrfdyn.LrfdynError, match="pass the model around it"):
        lrfdyn.swap_attention(spikformer().blocks[0].attn, "lrf_dyn")
