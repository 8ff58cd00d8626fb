"""`lrfdyn profile` and the measurements behind it."""

from __future__ import annotations

import json
import re
import sys
from argparse import Namespace

import pytest
import torch
from torch import nn

from lrfdyn import LrfdynError, create_model
from lrfdyn.analysis.measure.inference import (
    attention_peak,
    attention_state,
    held_state_bytes,
    layer_states,
    measure_inference,
    profile_model,
    resident_growth,
    span_peaks,
)
from lrfdyn.analysis.report.plots import plot_memory
from lrfdyn.attention.row_stream import BUFFERS
from lrfdyn.cli import main
from lrfdyn.commands.profile import show_sizes

FORMS = ("parallel", "streaming")
SMALL = ["profile", "sdt_v3_t", "--image-size", "64", "--batch", "1", "--device", "cpu", "--repeats", "1"]


def test_parts_of_a_run_have_their_own_peaks():
    class Part(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            big = torch.zeros(250_000)
            return x + big[0]

    def run(span) -> None:
        held = torch.zeros(1_000_000)  # before both, so of neither
        span("small")(nn.Identity())(held)
        with span("large"):
            Part()(held[:1])

    peaks = span_peaks(run, torch.device("cpu"))
    assert peaks["small"] == 0
    assert 1_000_000 <= peaks["large"] <= 1_010_000


@pytest.mark.skipif(sys.platform != "linux", reason="read from /proc")
def test_resident_growth_sees_memory_that_is_touched():
    grown = resident_growth(lambda: torch.ones(16 * 2**20).sum())
    assert grown is not None
    assert 60 * 2**20 <= grown <= 90 * 2**20


def test_states_of_all_layers():
    model = create_model("qkformer_4_384", attention="lrf_dyn", dim=32, depth=4, heads=2, image_size=32).eval()
    states = layer_states(model)
    assert list(states) == ["stages.2.blocks.0.attn", "stages.2.blocks.1.attn"]
    for buffers in BUFFERS:
        assert held_state_bytes(model, buffers) == sum(term["bytes"] for term in attention_state(model, buffers))
    assert held_state_bytes(create_model("spikformer_4_384", dim=16, depth=1, heads=1)) is None


def test_both_implementations_are_measured():
    options = {"dim": 32, "depth": 1, "heads": 2, "image_size": 96, "num_classes": 5}
    torch.manual_seed(0)
    model = create_model("spikformer_8_512", attention="lrf_dyn", **options).eval()
    images = torch.randn(4, 3, 96, 96)
    eager, low = (measure_inference(name, model, images, 1) for name in ("eager", "low-memory"))
    assert low["peak_bytes"] < 0.3 * eager["peak_bytes"]
    assert set(eager["layers"]) == set(low["layers"])
    assert not any("forward" in vars(module) for module in model.modules())  # as it was
    # Nothing in a layer can exceed what the run held in all; the largest layer is most of it.
    for run in (eager, low):
        assert 0.5 * run["peak_bytes"] < max(run["layers"].values()) <= run["peak_bytes"]
        assert run["latency_ms"] > 0


def test_latency_is_the_shortest_in_milliseconds(monkeypatch):
    spent = iter((0.5, 0.25, 0.75))
    monkeypatch.setattr("lrfdyn.analysis.measure.inference.seconds_of", lambda *_: next(spent))
    model = create_model("spikformer_4_384", dim=8, depth=1, heads=1, image_size=8).eval()
    assert measure_inference("eager", model, torch.randn(1, 3, 8, 8), repeats=3)["latency_ms"] == 250


def test_command_prints_tables(capsys):
    assert main([*SMALL, "--attention", "ssa", "lrf_dyn"]) == 0
    text = capsys.readouterr().out
    for words in ("What attention must hold", "k^T v matrix", "token spikes", "allocated by streaming", "low-memory"):
        assert words in text
    for layer in ("stages.0.down", "stages.3.blocks.0.attn", "stages.4.blocks.1.mlp"):
        assert layer in text


def test_command_prints_json_and_draws(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    plot = tmp_path / "memory.png"
    assert main([*SMALL, "--attention", "lrf_dyn", "--batch", "1", "2", "--json", "--plot", str(plot)]) == 0
    (profile,) = json.loads(capsys.readouterr().out)
    runs = [(run["implementation"], run["batch"]) for run in profile["runs"]]
    assert runs == [("eager", 1), ("low-memory", 1), ("eager", 2), ("low-memory", 2)]
    largest = max(sum(term["bytes"] for term in terms) for terms in profile["layers"].values())
    assert profile["held_state_bytes"] == largest
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_plot_without_matplotlib_names_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(LrfdynError, match=r"pip install 'lrfdyn\[analysis\]'"):
        plot_memory({}, [], tmp_path / "x.png")


def test_one_attention_layer_takes_at_least_what_it_must_hold():
    layer = create_model("spikformer_4_384", attention="lrf_dyn", dim=32, depth=1, heads=2).blocks[0].attn
    parallel, streaming = (attention_peak(layer, (6, 2), 2, streaming=streams) for streams in (False, True))
    output, state = 4 * 2 * 32 * 6 * 2, 2 * sum(term.bytes for term in layer.state_terms((6, 2)))
    assert output + state <= streaming < parallel
    assert layer.training


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grid": (8,)}, "grid: expected the rows and columns"),
        ({"grid": (8, 0)}, "grid: expected the rows and columns"),
        ({"time_steps": 0}, "time_steps: expected an integer >= 1"),
        ({"batch": 0}, "batch: expected an integer >= 1"),
        ({"streaming": True}, "attention: 'ssa' has no streaming form"),
    ],
)
def test_peak_of_an_attention_layer_refuses(options, message):
    layer = create_model("spikformer_4_384", dim=16, depth=1, heads=1).blocks[0].attn
    with pytest.raises(LrfdynError, match=re.escape(message)):
        attention_peak(layer, **{"grid": (4, 4), **options})


def test_command_measures_one_layer_on_several_sizes(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    options = {"dim": 16, "depth": 1, "heads": 2, "image_size": 16, "time_steps": 1}
    create_model("spikformer_4_384", attention="lrf_dyn", **options).save_pretrained(tmp_path)
    given, plot = ["profile", str(tmp_path), "--batch", "1", "--device", "cpu"], tmp_path / "sizes.png"
    assert main([*given, "--sizes", "16", "29", "--json", "--plot", str(plot)]) == 0
    records = json.loads(capsys.readouterr().out)
    found = [(r["form"], r["image_size"], r["grid"]) for r in records]
    assert found == [(form, size, grid) for size, grid in ((16, [4, 4]), (29, [8, 8])) for form in FORMS]
    assert all(r["peak_bytes"] > r["state_bytes"] for r in records)
    assert plot.read_bytes().startswith(b"\x89PNG")
    show_sizes(records, Namespace(plot=None, json=False, sizes=[16, 29]))
    table = capsys.readouterr().out
    assert all(f"{r['peak_bytes'] / 2**20:.2f}" in table for r in records)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*SMALL, "--sizes", "0"], "sizes: expected an integer >= 1, got 0"),
        ([*SMALL, "--sizes", "64", "8"], "sizes: sdt_v3_t takes images of at least 16 pixels a side, got 8"),
        (["profile", "spikformer"], "model: 'spikformer' is no file or folder here"),
        (["profile", "sew_resnet18"], "model: expected one with attention, got sew_resnet18"),
        ([*SMALL, "--batch", "0"], "batch: expected integers >= 1, got 0"),
        ([*SMALL, "--attention", "lrf"], "attention: unknown name 'lrf'"),
        ([*SMALL, "--plot", "memory.xyz"], "plot: expected a name that ends in one of"),
        ([*SMALL, "--plot", "/dev/null/memory.png"], "plot: cannot write in the folder /dev/null"),
        ([*SMALL, "--device", "tpu"], "device: cannot use 'tpu'"),
        ([*SMALL, "--device", "meta"], "device: cannot use 'meta'"),
        (
            [*SMALL, "--attention", "ssa", "sdsa", "--token", "qkv"],
            "token: not an option of attention 'ssa', but of lrf_dyn",
        ),
        ([*SMALL, "--directions", "two"], "directions: expected an integer, got 'two'"),
        ([*SMALL, "--coupling", "sam"], "coupling: unknown name 'sam'; did you mean same?"),
    ],
)
def test_bad_input(capsys, arguments, message):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_on_a_cpu_it_is_one_image_unless_told(capsys, tmp_path):
    create_model("spikformer_4_384", dim=16, depth=1, heads=2, image_size=16).save_pretrained(tmp_path)
    assert main(["profile", str(tmp_path), "--repeats", "1", "--device", "cpu", "--json"]) == 0
    (profile,) = json.loads(capsys.readouterr().out)
    assert [run["batch"] for run in profile["runs"]] == [1, 1]


def test_profile_of_a_model():
    model = create_model("spikformer_4_384", dim=16, depth=2, heads=2)
    profile = profile_model(model, "mine", [1], torch.device("cpu"), repeats=1)
    assert (profile["model"], profile["attention"]) == ("mine", "ssa")
    assert len(profile["layers"]) == 2
    assert profile["held_state_bytes"] is None
    assert profile["state_bytes"] == 2 * sum(term["bytes"] for term in profile["layers"]["blocks.0.attn"])


def test_a_saved_model_is_profiled_as_it_is_and_with_other_attentions(capsys, tmp_path):
    options = {"dim": 16, "depth": 1, "heads": 2, "dilations": (1,), "image_size": 16}
    create_model("spikformer_4_384", attention="lrf_dyn", **options).save_pretrained(tmp_path)
    given = ["profile", str(tmp_path), "--batch", "1", "--repeats", "1", "--device", "cpu", "--json"]
    assert main(given) == 0
    (own,) = json.loads(capsys.readouterr().out)
    expected = layer_states(create_model("spikformer_4_384", attention="lrf_dyn", **options))
    assert (own["attention"], own["layers"]) == ("lrf_dyn", expected)
    assert main([*given, "--attention", "ssa", "lrf_dyn"]) == 0
    ssa, again = json.loads(capsys.readouterr().out)
    assert [term["name"] for term in ssa["layers"]["blocks.0.attn"]] == ["k^T v matrix", "q, k spikes", "v spikes"]
    assert again["layers"] == expected
    assert main([*given, "--image-size", "32"]) == 2
    assert "image_size: only for the name of a model" in capsys.readouterr().err
    assert main([*given, "--norm", "true"]) == 2
    assert "norm: only for the name of a model" in capsys.readouterr().err


def test_options_are_of_the_attentions_that_take_them(capsys):
    """Those of the other kinds stay theirs."""
    given = ["--dilations", "1,3,5", "--directions", "2", "--coupling", "same", "--scale-lrf", "true", "--norm", "true"]
    assert main([*SMALL, "--attention", "ssa", "LRF_SSA", "lrf_dyn", *given, "--train_qk", "false", "--json"]) == 0
    records = json.loads(capsys.readouterr().out)
    assert [record["attention_options"] for record in records] == [
        {"train_qk": False},
        {"dilations": [1, 3, 5], "norm": True, "scale_lrf": True, "train_qk": False},
        {"dilations": [1, 3, 5], "directions": 2, "coupling": "same"},
    ]
    model = create_model(
        "sdt_v3_t", attention="lrf_dyn", dilations=(1, 3, 5), directions=2, coupling="same", image_size=64
    )
    assert records[2]["layers"] == layer_states(model)


def test_time_by_piece_and_kernel(capsys):
    from benchmarks.lowmem_profile import main

    main(
        ["--model", "spikformer_4_384", "--image-size", "16", "--batch", "2", "--calls", "1", "--attention", "lrf_dyn"]
    )
    out = capsys.readouterr().out
    assert re.search(r"[1-9]\S*  stem\.stages\.0, \d+ tiles of", out)
    assert re.search(r"[1-9]\S*  blocks\.\*\.attn", out)
    assert "aten::" in out
