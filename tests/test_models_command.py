"""`lrfdyn models`: the list, one model, and what goes wrong."""

from __future__ import annotations

import json
import re

import pytest
import torch

from lrfdyn.attention import ATTENTIONS
from lrfdyn.cli import main
from lrfdyn.models import Spikformer, create_model, list_models
from lrfdyn.models.summary import count_parameters, meta_model, summarize
from lrfdyn.paper import IMAGENET


@pytest.fixture(autouse=True)
def _eighty_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def output(capsys, *arguments: str) -> str:
    assert main(["models", *arguments]) == 0
    return capsys.readouterr().out


def first_words(text: str) -> list[str]:
    words = [line.split()[0] for line in text.splitlines() if line.split()]
    return [word for word in words if word in list_models()]


def test_list_shows_every_model_on_one_line_of_80_columns(capsys):
    text = output(capsys)
    assert first_words(text) == list_models()
    assert max(map(len, text.splitlines())) <= 80
    (line,) = [line for line in text.splitlines() if line.startswith("spikformer_8_512")]
    assert line.split() == ["spikformer_8_512", "29,689,384", "224", "4", "ssa", "73.38", "74.62", "74.51"]
    assert "as the paper reports it, not measured here" in " ".join(text.split())


def test_narrow_terminals_lose_no_column(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    assert re.search("qkformer_4_384 +6,740,884 +32 +4 +ssa", output(capsys, "qkformer*"))


@pytest.mark.parametrize(
    ("sort", "order"),
    [
        ("parameters", ["sdt_v3_t", "sdt_v3_s", "sdt_v3_m", "sdt_v3_l"]),
        ("accuracy", ["sdt_v3_l", "sdt_v3_s", "sdt_v3_m", "sdt_v3_t"]),
        ("name", ["sdt_v3_l", "sdt_v3_m", "sdt_v3_s", "sdt_v3_t"]),
        ("input", ["sdt_v3_l", "sdt_v3_m", "sdt_v3_s", "sdt_v3_t"]),
    ],
)
def test_sort(capsys, sort, order):
    assert first_words(output(capsys, "sdt_v3_*", "--sort", sort)) == order


def test_small_inputs_come_first(capsys):
    assert first_words(output(capsys, "spikformer_*", "--sort", "input"))[0] == "spikformer_4_384"


def test_attention_is_counted_where_there_is_one(capsys):
    rows = {row["name"]: row for row in json.loads(output(capsys, "*3*4", "--attention", "lrf_dyn", "--json"))}
    assert rows["sew_resnet34"]["attention"] is None
    assert rows["sew_resnet34"]["attentions"] == []
    row = rows["spikformer_4_384"]
    assert (row["attention"], row["default_attention"], row["attentions"]) == ("lrf_dyn", "ssa", list(ATTENTIONS))
    assert row["parameters"] == count_parameters(create_model("spikformer_4_384", attention="lrf_dyn"))
    assert row["input_size"] == [3, 32, 32]
    assert row["paper"] == {}


def test_json_has_the_paper_s_rows(capsys):
    (row,) = json.loads(output(capsys, "spikformer_8_51?", "--json"))
    assert row["paper"]["lrf_dyn"] == {"parameters": 29.71, "accuracy": 74.51}
    assert set(IMAGENET) <= set(list_models())


def test_one_model(capsys):
    text = output(capsys, "spikformer_8_512", "--attention", "lrf_dyn")
    assert max(map(len, text.splitlines())) <= 80
    assert ["blocks.7.attn", "LRFDyn", "512x14x14"] in [line.split()[:3] for line in text.splitlines()]
    assert "ssa (default)" in text
    assert "attention='lrf_dyn'" in " ".join(text.split())
    assert "with LRF-Dyn: 29.71 M parameters, 74.51 %" in text


def test_one_model_as_json(capsys):
    found = json.loads(output(capsys, "sew_resnet18", "--json", "--depth", "1"))
    assert [layer["path"] for layer in found["layers"]] == ["stem", *(f"stages.{i}" for i in range(4)), "head"]
    assert found["layers"][-2]["output"] == [512, 7, 7]
    assert found["config"]["depths"] == [2, 2, 2, 2]


@pytest.mark.parametrize("depth", [2, 9])
@pytest.mark.parametrize("name", ["spikformer_4_384", "qkformer_4_384", "sdt_v2_15m", "sew_resnet18"])
def test_layers_hold_every_parameter_once(name, depth):
    model = meta_model(name, **({} if "resnet" in name else {"attention": "lrf_dyn"}))
    layers = summarize(model, depth)
    assert sum(layer.parameters for layer in layers) == count_parameters(model)
    assert layers[-1].output == (model.num_classes,)


def test_shapes_are_those_of_a_real_pass():
    model = Spikformer(dim=16, depth=1, heads=2, image_size=32, num_classes=5, attention="lrf_dyn").eval()
    seen = {}
    for layer in summarize(model, 2):
        model.get_submodule(layer.path).register_forward_hook(
            lambda _m, _a, out, path=layer.path: seen.update({path: tuple(out.shape)})
        )
    model(torch.randn(1, 3, 32, 32))
    for layer in summarize(model, 2):
        assert seen[layer.path][-len(layer.output) :] == layer.output


def test_names_with_capitals(capsys):
    assert main(["Models", "Spikformer_4_384", "--attention", "LRF_DYN"]) == 0
    assert "attention: lrf_dyn; takes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["spikfomer_8_512"], "did you mean spikformer_8_512"),
        (["nothing*"], "no model matches 'nothing*'"),
        (["--attention", "lrfdyn"], "did you mean lrf_dyn"),
        (["sew_resnet34", "--attention", "ssa"], "sew_resnet34 has none"),
        (["sdt_v3_t", "--depth", "0"], "depth: expected an integer >= 1"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, arguments, message):
    assert main(["models", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1
