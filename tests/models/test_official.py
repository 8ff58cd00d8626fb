"""Checkpoints in the layout of the official code, from files."""

from __future__ import annotations

import argparse
import pickle
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import lrfdyn
from lrfdyn.models import official
from lrfdyn.models.base import SpikingModel
from lrfdyn.models.official import OfficialReport
from tests.golden_rule import images, load, official_state
from tests.models.host_checks import HOSTS, golden_model

VARIANTS = {f"{host}_small": "legacy" if "qkformer" in host else "official" for host in HOSTS}
VARIANTS["sdt_v1_dvs_small"] = "tet_off"  # the mean of the logits over time
UNUSED = ("norm.", "norm1.", "norm2.", "pos_embed", "talking_heads")
SPIKFORMER = load("spikformer_cifar_small")
ARGUMENTS = argparse.Namespace(
    lr=5e-4, batch_size=16, data="imagenet", flags=[1, None, "a"], device=torch.device("cpu")
)


def build(**options: Any) -> SpikingModel:
    """The model of the fixture, with another attention or another number of classes."""
    model = golden_model(SPIKFORMER)
    return type(model)(**{**model.config, **options}).double()


def state() -> dict[str, Tensor]:
    return official_state(SPIKFORMER)


def check_logits(model: SpikingModel, fixture: dict[str, Any], variant: str) -> None:
    with torch.no_grad():
        logits = model.eval()(images(fixture))
    expected = torch.tensor(fixture["variants"][variant]["eval"]["logits"], dtype=torch.float64)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_of_the_official_code_from_a_file(name, tmp_path):
    fixture = load(name)
    options = {"legacy_neuron_axis": True} if "qkformer" in name else {}
    weights = official_state(fixture)
    torch.save({"model": weights, "epoch": 299, "optimizer": {"state": {}}, "args": ARGUMENTS}, tmp_path / "best.pth")
    model = golden_model(fixture, **options).double()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = lrfdyn.load_official(model, tmp_path / "best.pth")
    assert report.source_key == "model"
    assert not report.missing
    assert not report.unexpected
    assert list(report.dropped) == [key for key in weights if any(name in key for name in UNUSED)]
    check_logits(model, fixture, VARIANTS[name])


@pytest.mark.parametrize(
    ("wrap", "source_key"),
    [
        (lambda s: s, ""),
        (lambda s: {"model": s}, "model"),
        (lambda s: {"state_dict": s, "arch": "spikformer", "metric": 81.0}, "state_dict"),
        (lambda s: {"model_state": s, "epoch": 3}, "model_state"),
        (lambda s: {"model_state_dict": s}, "model_state_dict"),
        (lambda s: {"net": s, "acc": 0.5}, "net"),
        (lambda s: {"state_dict_ema": s, "epoch": 3}, "state_dict_ema"),
        (lambda s: {"model_ema": {k: v + 1 for k, v in s.items()}, "model": s}, "model"),
        (lambda s: {"state_dict_ema": {k: v + 1 for k, v in s.items()}, "state_dict": s}, "state_dict"),
        (lambda s: {"model": None, "model_ema": s}, "model_ema"),
        (lambda s: {f"module.{k}": v for k, v in s.items()}, ""),
        (lambda s: {"model": {f"module._orig_mod.{k}": v for k, v in s.items()}}, "model"),
        (lambda s: {"state_dict": {f"model.{k}": v for k, v in s.items()}, "args": ARGUMENTS}, "state_dict"),
    ],
)
def test_wrappers_and_prefixes(wrap, source_key, tmp_path):
    torch.save(wrap(state()), tmp_path / "file.pth.tar")
    model = build()
    report = lrfdyn.load_official(model, str(tmp_path / "file.pth.tar"))
    assert report.source_key == source_key
    check_logits(model, SPIKFORMER, "official")
    assert f"loaded official weights from {source_key or 'the whole file'}" in str(report)
    assert "dropped: block.0.norm1.weight, block.0.norm1.bias, block.0.norm2.weight and" in str(report)


def test_older_files_and_safetensors(tmp_path):
    torch.save({"model": state()}, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    save_file({f"module.{k}": v for k, v in state().items()}, tmp_path / "new.safetensors")
    for path in tmp_path.iterdir():
        model = build()
        assert lrfdyn.load_official(model, path).source_key in ("model", "")
        check_logits(model, SPIKFORMER, "official")


def test_weights_take_the_type_of_the_model(tmp_path):
    torch.save({k: v.half() if v.is_floating_point() else v for k, v in state().items()}, tmp_path / "half.pth")
    model = build().float()
    lrfdyn.load_official(model, tmp_path / "half.pth")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert torch.equal(model.head.bias, state()["head.bias"].half().float())


class Code:
    """Runs when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return exec, (f"open({str(self.marker)!r}, 'w').close()",)


@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_a_file_is_refused_and_does_not_run(zipped, tmp_path):
    content = {"model": state(), "args": argparse.Namespace(hidden=Code(tmp_path / "ran"))}
    torch.save(content, tmp_path / "bad.pth", _use_new_zipfile_serialization=zipped)
    with pytest.raises(lrfdyn.LrfdynError, match=r"path: .*bad\.pth is refused.* it asks for (\w+\.)?exec;"):
        lrfdyn.load_official(build(), tmp_path / "bad.pth")
    assert not (tmp_path / "ran").exists()
    torch.load(tmp_path / "bad.pth", weights_only=False)
    assert (tmp_path / "ran").exists(), "the file would have run code"


def test_a_bare_pickle_does_not_run_either(tmp_path):
    (tmp_path / "bad.pth").write_bytes(pickle.dumps(Code(tmp_path / "ran")))
    (tmp_path / "bad.safetensors").write_bytes(pickle.dumps(Code(tmp_path / "ran")))
    for name in ("bad.pth", "bad.safetensors"):
        with pytest.raises(lrfdyn.LrfdynError, match=f"path: .*{name} is "):
            lrfdyn.load_official(build(), tmp_path / name)
    assert not (tmp_path / "ran").exists()


class Arguments(argparse.Namespace):
    """Anything else than a plain Namespace."""


@pytest.mark.parametrize(
    ("beside", "name"),
    [
        (Path("data"), "pathlib"),
        (np.float64(81.2), "numpy"),
        (Arguments(lr=1), "tests.models.test_official.Arguments"),
        (torch.nn.Linear(1, 1), "torch.nn.modules.linear.Linear"),
    ],
)
def test_other_objects_are_refused_by_name(beside, name, tmp_path):
    torch.save({"model": state(), "beside": beside}, tmp_path / "file.pth")
    with pytest.raises(lrfdyn.LrfdynError, match=f"it asks for {name}"):
        lrfdyn.load_official(build(), tmp_path / "file.pth")


def test_the_allowance_for_namespaces_ends_with_the_call(tmp_path):
    torch.save({"model": state(), "args": ARGUMENTS}, tmp_path / "file.pth")
    lrfdyn.load_official(build(), tmp_path / "file.pth")
    assert argparse.Namespace not in torch.serialization.get_safe_globals()


def test_honest_files_are_taken_in_many_threads(tmp_path):
    """PyTorch's list of safe types is one for the process: a call that ended took it from those that were reading."""
    torch.save({"model": {"x": torch.ones(2)}, "args": ARGUMENTS}, tmp_path / "file.pth")

    def read_often(_: int) -> list[argparse.Namespace]:
        return [official._read(tmp_path / "file.pth")["args"] for _ in range(20)]

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(read_often, range(8))) == [[ARGUMENTS] * 20] * 8
    assert argparse.Namespace not in torch.serialization.get_safe_globals()


def other_values(model: SpikingModel) -> list[Tensor]:
    return [value.clone() for value in model.state_dict().values()]


def refused(model: SpikingModel, path: Path, message: str) -> str:
    before = other_values(model)
    with pytest.raises(lrfdyn.LrfdynError, match=message) as error:
        lrfdyn.load_official(model, path)
    assert all(torch.equal(a, b) for a, b in zip(other_values(model), before, strict=True))
    assert str(error.value).startswith("path: ")
    assert str(path) in str(error.value)
    return str(error.value)


def test_missing_and_damaged_files(tmp_path):
    torch.save(state(), tmp_path / "file.pth")
    save_file(state(), tmp_path / "file.safetensors")
    for path in sorted(tmp_path.iterdir()):
        whole = path.read_bytes()
        for content in (whole[: len(whole) // 2], whole[:10], b"", b"<html>not found</html>"):
            path.write_bytes(content)
            message = refused(build(), path, "is damaged or not a")
            assert "weights_only" not in message
    refused(build(), tmp_path / "none.pth", "no such file")
    refused(build(), tmp_path, "no such file")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"epoch": 3, "args": ARGUMENTS}, "has no state dict.*found the keys epoch, args"),
        ({}, "has no state dict.*found dict"),
        ([1, 2], "has no state dict.*found list"),
        (torch.zeros(3), "has no state dict.*found Tensor"),
        ({"model": {}}, "has no state dict.*found the keys model"),
        ({"weight": torch.zeros(3)}, "no key is known, the first are weight; another kind of model"),
    ],
)
def test_files_without_weights(content, message, tmp_path):
    torch.save(content, tmp_path / "file.pth")
    refused(build(), tmp_path / "file.pth", message)


@pytest.mark.parametrize("value", [float("nan"), -1.0])
def test_weights_of_no_use(value, tmp_path):
    weights = state()
    name = next(name for name in weights if name.endswith("running_var"))
    torch.save({**weights, name: torch.full_like(weights[name], value)}, tmp_path / "file.pth")
    model = build()
    before = other_values(model)
    with pytest.raises(lrfdyn.LrfdynError, match=rf"file\.pth is of no use: {name} holds"):
        lrfdyn.load_official(model, tmp_path / "file.pth")
    assert all(torch.equal(a, b) for a, b in zip(other_values(model), before, strict=True))


def test_other_number_of_classes(tmp_path):
    torch.save(state(), tmp_path / "file.pth")
    refused(build(num_classes=7), tmp_path / "file.pth", "for 10 classes, num_classes of the model is 7")
    refused(build(dim=128), tmp_path / "file.pth", r"expected \[16, 3, 3, 3\], got \[8, 3, 3, 3\]")
    with pytest.raises(lrfdyn.LrfdynError, match="num_classes of the model is 7"):
        lrfdyn.load_official(build(num_classes=7), tmp_path / "file.pth", strict=False)


def test_other_depths_and_unknown_keys(tmp_path):
    torch.save({**state(), "total_ops": torch.zeros(1)}, tmp_path / "file.pth")
    refused(build(), tmp_path / "file.pth", "missing in the file: nothing; unknown to the model: total_ops$")
    refused(build(depth=3), tmp_path / "file.pth", r"missing in the file: blocks\.2\..* and \d+ more")
    model = build()
    report = lrfdyn.load_official(model, tmp_path / "file.pth", strict=False)
    assert report.unexpected == ("total_ops",)
    assert "unexpected: total_ops" in str(report)
    check_logits(model, SPIKFORMER, "official")


@pytest.mark.parametrize("kind", ["lrf_ssa", "lrf_dyn"])
def test_other_attention(kind, tmp_path):
    torch.save({"model": state()}, tmp_path / "file.pth")
    advice = rf"attention='ssa': build .* swap_attention\(model, '{kind}'\); .* strict=False"
    assert "missing in the file: blocks.0.attn." in refused(build(attention=kind), tmp_path / "file.pth", advice)

    # As the advice says.
    swapped = build()
    lrfdyn.load_official(swapped, tmp_path / "file.pth")
    swap = lrfdyn.swap_attention(swapped, kind)
    # Or only what is shared.
    model = build(attention=kind)
    report = lrfdyn.load_official(model, tmp_path / "file.pth", strict=False)
    parameters = dict(model.named_parameters())
    assert {name for name in report.missing if name in parameters} == set(swap.new)
    assert {name for name in report.unexpected if name.endswith(("weight", "bias"))} == set(swap.dropped)
    theirs = dict(swapped.named_parameters())
    assert all(torch.equal(parameters[name], theirs[name]) for name in parameters if name not in report.missing)


def test_lrf_ssa_without_dilations_needs_no_swap(tmp_path):
    torch.save(state(), tmp_path / "file.pth")
    model = build(attention="lrf_ssa", attention_options={"dilations": ()})
    lrfdyn.load_official(model, tmp_path / "file.pth")
    check_logits(model, SPIKFORMER, "official")


def test_the_legacy_neuron_of_qkformer_is_pointed_out(tmp_path):
    fixture = load("qkformer_cifar_small")
    torch.save(official_state(fixture), tmp_path / "file.pth")
    model = golden_model(fixture).double()
    with pytest.warns(UserWarning, match="legacy_neuron_axis=True") as caught:
        lrfdyn.load_official(model, tmp_path / "file.pth")
    assert caught[0].filename == __file__
    check_logits(model, fixture, "fixed")


def test_distillation_heads(tmp_path):
    fixture = load("sdt_v2_small_t1")
    second = {"head_kd.weight": torch.randn(10, 96), "head_kd.bias": torch.randn(10)}
    torch.save({"model": {**official_state(fixture), **second}}, tmp_path / "file.pth")
    refused(golden_model(fixture), tmp_path / "file.pth", "unknown to the model: distillation_head.weight")
    model = golden_model(fixture, distillation=True)
    assert lrfdyn.load_official(model, tmp_path / "file.pth") == OfficialReport((), source_key="model")
    assert torch.equal(model.distillation_head.weight, second["head_kd.weight"])
