"""Options of attentions on the command line, beside those of recipes."""

from __future__ import annotations

import json

import pytest

from lrfdyn.cli import main
from lrfdyn.training.config import ATTENTION_KEYS

CASES = {
    "lrf_dyn": {"dilations": (1, 3), "dendrites": 4, "token": "qkv", "directions": 2, "coupling": "same"},
    "lrf_ssa": {"dilations": (), "norm": True, "scale_lrf": True, "train_qk": False},
}


class WrittenError(Exception):
    """Instead of a file."""


def test_the_cases_have_every_option():
    assert {"attention", *(key for options in CASES.values() for key in options)} == {*ATTENTION_KEYS}


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("dash", ["_", "-"])
def test_export_takes_them_with_the_name_of_a_model(kind, dash, monkeypatch):
    def write(model, *_, **__):
        raise WrittenError(model.config)

    monkeypatch.setattr("lrfdyn.commands.export.export_model", write)
    monkeypatch.setattr("lrfdyn.commands.export.settle_norms", lambda _: None)
    texts = {key.replace("_", dash): json.dumps(value).strip('"') for key, value in CASES[kind].items()}
    given = [part for key, text in texts.items() for part in (f"--{key}", text)]
    with pytest.raises(WrittenError) as found:
        main(["export", f"spikformer_4_384:{kind}", *given, "--out", "x.onnx"])
    (config,) = found.value.args
    assert (config["attention"], config["attention_options"]) == (kind, CASES[kind])


def test_export_refuses_what_the_attention_does_not_take(capsys):
    assert main(["export", "spikformer_4_384:ssa", "--token", "qkv", "--out", "x.onnx"]) == 2
    assert "token: not an option of attention 'ssa', but of lrf_dyn" in capsys.readouterr().err
    assert main(["export", "spikformer_digits_ssa", "--norm", "true", "--out", "x.onnx"]) == 2
    assert "norm: only for the name of a model" in capsys.readouterr().err
