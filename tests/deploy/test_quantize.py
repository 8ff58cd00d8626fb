"""Models in integers: they compute what the same weights compute in real numbers, and what cannot be exact is refused.

`quantize_with_twin` gives the integers and a float64 model with the weights that they stand for. Where all arithmetic
is exact the two send the same spikes; dendrites and potentials on shortcuts are rounded, and stay close.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from lrfdyn.cli import main
from lrfdyn.data.preprocess import Preprocessing
from lrfdyn.deploy import IntegerModel, Predictor, load_integer, quantize, write_integer_onnx
from lrfdyn.deploy.export.formats import OnnxRunner
from lrfdyn.deploy.integer import onnx_graph
from lrfdyn.deploy.integer.operations import (
    Conv,
    Dendrites,
    Fire,
    Head,
    Levels,
    RangeError,
    Rescale,
    ScaleAdd,
    Stencils,
)
from lrfdyn.deploy.integer.program import random_pictures
from lrfdyn.deploy.integer.quantize import quantize_with_twin
from lrfdyn.deploy.integer.reference import run
from lrfdyn.deploy.integer.weights import quantize_dendrites, quantize_rows
from lrfdyn.errors import LrfdynError
from lrfdyn.models import SpikingModel
from lrfdyn.nn.neurons import LIF, IntegerSpike, Neuron
from lrfdyn.ops.dendrite import dendrite
from tests.deploy.programs import Builder
from tests.deploy.small import KINDS, side, small

MEAN, STD = 102 / 255, 0.25  # a colour that is a whole level, so that the border is exact
EXACT = [
    *(("spikformer", kind) for kind in KINDS if kind != "vsa" and not kind.startswith("lrf_dyn")),
    ("qkformer", "ssa"),
    ("qkformer_dvs", "ssa"),
    ("spikformer_dvs", "ssa"),
    ("sew_resnet", None),
]
ROUNDED = [
    *(("spikformer", kind) for kind in KINDS if kind.startswith("lrf_dyn")),
    ("qkformer", "lrf_dyn"),
    ("sdt_v1", "sdsa"),
    ("sdt_v2", "lrf_ssa"),
    ("sdt_v3", "lrf_dyn"),
    ("ms_resnet", None),
]


def trained(host: str, attention: str | None, **options: Any) -> SpikingModel:
    model = small(host, attention, **options)
    model.preprocessing = Preprocessing(side(host, model)[0], (MEAN,) * 3, (STD,) * 3)
    return model


def pictures(model: SpikingModel, count: int = 3) -> tuple[Tensor, Tensor]:
    """Levels, and the numbers that a model in float64 takes."""
    assert model.preprocessing is not None
    size = model.preprocessing.size
    levels = torch.randint(0, 256, (count, 3, size, size), generator=torch.Generator().manual_seed(3))
    return levels.to(torch.uint8), (levels.double() / 255 - MEAN) / STD


def spikes_of(model: SpikingModel, x: Tensor) -> dict[str, Tensor]:
    """What every neuron sends, by name, in whole numbers `[T, B, C, H, W]`."""
    found: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        def hook(module: Any, _: Any, out: Tensor) -> None:
            divided = isinstance(module, IntegerSpike) and module.normalize
            found[name] = (out * (module.levels if divided else 1)).round().long()

        return hook

    neurons = [(name, module) for name, module in model.named_modules() if isinstance(module, Neuron)]
    handles = [neuron.register_forward_hook(keep(name)) for name, neuron in neurons]
    with torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    return found


def firing_differs(host: str, attention: str | None) -> tuple[dict[str, float], dict[str, float]]:
    """For every neuron the share of spikes that integers and real numbers disagree on, and the share that fires."""
    model = trained(host, attention)
    integer, twin = quantize_with_twin(model)
    levels, x = pictures(model)
    kinds = {i + 1: op.name for i, op in enumerate(integer.operations) if isinstance(op, Fire | Levels)}
    values = dict(zip(kinds, integer.run(levels, keep=tuple(kinds)), strict=False))
    expected = spikes_of(twin, x)
    assert set(expected) == set(kinds.values())
    differs, fires = {}, {}
    for i, name in kinds.items():
        want = expected[name].reshape(expected[name].shape[0], len(x), *values[i].shape[2:])
        differs[name], fires[name] = float((values[i] != want).double().mean()), float((want > 0).double().mean())
    with torch.no_grad():
        close = torch.allclose(integer(levels).double() * integer.scale, twin(x), atol=1e-6)
    assert close or any(differs.values())  # where all spikes are the same, so are the logits
    return differs, fires


@pytest.mark.parametrize(("host", "attention"), EXACT)
def test_every_spike_is_that_of_the_real_numbers(host: str, attention: str | None) -> None:
    differs, fires = firing_differs(host, attention)
    assert not any(differs.values()), differs
    assert sum(0 < rate < 1 for rate in fires.values()) > 0.6 * len(fires)  # silent neurons would prove nothing


@pytest.mark.parametrize(("host", "attention"), ROUNDED)
def test_spikes_of_rounded_numbers_are_nearly_those(host: str, attention: str | None) -> None:
    differs, fires = firing_differs(host, attention)
    first = next(iter(differs.values()))
    assert first == 0
    assert max(differs.values()) < 0.02, differs
    assert sum(0 < rate < 1 for rate in fires.values()) > 0.4 * len(fires)


def test_all_options_of_an_attention_go_into_its_integers() -> None:
    options = {"token": "qkv", "directions": 2, "coupling": "same", "dilations": ()}
    model = trained("spikformer", "lrf_dyn", attention_options=options)
    integer, twin = quantize_with_twin(model)
    made = [op for op in integer.operations if isinstance(op, Dendrites)]
    assert [(op.reverse, op.real) for op in made] == [(False, True), (True, True)]
    levels, x = pictures(model)
    with torch.no_grad():
        assert (integer(levels).double() * integer.scale - twin(x)).abs().max() < 0.05 * twin(x).abs().max()


def test_stencils_beyond_the_grid_cost_nothing() -> None:
    """Only the centre of a stencil with a dilation of 50,000 is on a grid of 4 x 4."""
    model = trained("spikformer", "lrf_ssa", attention_options={"dilations": (1, 50_000)})
    integer, twin = quantize_with_twin(model)
    (made,) = (op for op in integer.operations if isinstance(op, Stencils))
    assert max(made.dilations) == 4
    assert (made.weight[1] != 0).sum() == (made.weight[1, :, 1, 1] != 0).sum() > 0
    levels, x = pictures(model)
    with torch.no_grad():
        assert torch.allclose(integer(levels).double() * integer.scale, twin(x), atol=1e-6)


@pytest.mark.parametrize("kind", ["lrf_dyn", "lrf_dyn_qkv"])
def test_a_channel_of_which_only_the_shift_is_left(kind: str) -> None:
    """Training may leave hardly anything of a norm's gain: the channel then fires always or never."""
    model = trained("spikformer", kind)
    norm: Any = model.blocks[0].attn.norm  # type: ignore[index, union-attr]
    with torch.no_grad():
        norm.weight[:3] = torch.tensor([1e-9, 1e-9, 1e-6])
        norm.bias[:3] = torch.tensor([4.0, -4.0, 4.0])
    integer = quantize(model)
    (fire,) = (i + 1 for i, op in enumerate(integer.operations) if op.name == "blocks.0.attn.fire")
    spikes = integer.run(pictures(model)[0], keep=[fire])[0]
    assert [spikes[:, :, c].double().mean() for c in range(3)] == [1, 0, 1]
    assert 0 < spikes[:, :, 3:].double().mean() < 1


def test_rows_keep_to_their_units() -> None:
    weight = torch.tensor([[3.0, -1.0, 0.5], [0.0, 0.0, 0.0], [1e-9, 0.0, 0.0]], dtype=torch.float64)
    whole, unit = quantize_rows(weight, 127, least=torch.tensor([0.0, 0.0, 1e-3], dtype=torch.float64))
    assert whole.abs().amax() <= 127
    assert unit[1] == 1
    assert unit[2] == 1e-3
    assert (whole[0] * unit[0] - weight[0]).abs().amax() < 0.02


@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("real", [False, True])
def test_dendrites_in_integers_are_those_of_the_modes(directions: int, real: bool) -> None:
    """Within three thousandths of the largest potential, for time constants from one token to four rows."""
    generator = torch.Generator().manual_seed(0)
    shape, width = (5, 4), 8
    modes: list[Any] = []
    for _ in range(directions):
        decay = 1 / torch.logspace(0, 1.5, 4, dtype=torch.float64).expand(shape)
        frequency = None if real else 6.3 * torch.rand(shape, dtype=torch.float64, generator=generator)
        weight = torch.randn(*shape, 2, dtype=torch.float64, generator=generator)
        modes.append((decay.unsqueeze(-1).expand(*shape, 2) if real else decay, frequency, weight))
    u = (torch.rand(2, 1, 5, width, width, dtype=torch.float64, generator=generator) < 0.2).long()
    units, high = torch.full((5,), 0.5, dtype=torch.float64), torch.ones(5, dtype=torch.int64)
    quantized, unit = quantize_dendrites(modes, units, high, width * width, 2**15 - 1, 0 * units)
    total = torch.zeros(2, 64, 5, dtype=torch.float64)
    expected = torch.zeros_like(total)
    for reverse, (tensors, mode) in enumerate(zip(quantized, modes, strict=True)):
        operation = Dendrites("d", (0,), *tensors, real, reverse == 1)
        tokens = 0.5 * u.flatten(0, 1).flatten(2).mT.double()
        soma = run(operation, u, time_steps=2).flatten(0, 1).flatten(2).mT
        total += soma * unit
        potential, _ = dendrite(tokens.flip(1) if reverse else tokens, *mode, form="step")
        expected += potential.flip(1) if reverse else potential
    assert (total - expected).abs().amax() < 3e-3 * expected.abs().amax()


def test_saved_integers_give_the_same_logits(tmp_path: Path) -> None:
    model = trained("spikformer", "lrf_dyn")
    integer = quantize(model)
    integer.save(tmp_path / "integer.safetensors")
    levels, _ = pictures(model)
    again = load_integer(tmp_path / "integer.safetensors")
    assert torch.equal(again(levels), integer(levels))
    assert again.facts["num_classes"] == 5
    assert isinstance(again.operations[-1], Head)


def test_model_stays_as_it_was() -> None:
    model = trained("spikformer", "lrf_ssa_norm")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    quantize(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert next(model.parameters()).dtype == torch.float32


def refused(change: str) -> SpikingModel:
    if change == "legacy neurons":
        return trained("qkformer", "ssa", legacy_neuron_axis=True)
    if change == "maxima":
        return trained("sdt_v1_dvs", "sdsa")
    model = trained("spikformer", "vsa" if change == "softmax" else "ssa")
    stem: Any = model.stem
    if change == "leak":
        stem.stages[0].neuron = LIF(tau=3.0)
    elif change == "reset":
        stem.stages[0].neuron = LIF(v_reset=-0.5)
    elif change == "fresh":
        norm = stem.stages[1].bn
        norm.reset_running_stats()
    elif change == "numbers":
        stem.stages[1].conv.weight.data[0] = torch.nan
    elif change == "colours":
        model.preprocessing = Preprocessing(16, (2.0,) * 3, (STD,) * 3)
    elif change == "training":
        model.train()
    elif change == "classes":
        model.reset_classifier(0)
    elif change == "layer":
        stem.stages[1].conv = nn.Conv2d(2, 4, 3, padding=1, padding_mode="reflect")
    elif change == "norm":
        stem.stages[1].bn = nn.GroupNorm(1, 4)
    return model


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("softmax", r"blocks\.0\.attn \(VSA\).*softmax"),
        ("legacy neurons", r"BatchAsTimeLIF\).*no integer form"),
        ("maxima", r"\(SDSA\).*maxima over windows"),
        ("leak", r"stages\.0\.neuron.*keeps 0\.666"),
        ("reset", "resets to -0.5"),
        ("fresh", r"trained.*stem\.stages\.1\.bn"),
        ("training", "evaluation"),
        ("numbers", r"stages\.1\.conv\.weight.*not finite"),
        ("colours", "mean from 0 to 1"),
        ("classes", "classifier"),
        ("layer", "plain convolution"),
        ("norm", "batch norm"),
    ],
)
def test_what_has_no_integer_form_is_refused(change: str, says: str) -> None:
    with pytest.raises(LrfdynError, match=says):
        quantize(refused(change))


def test_weights_beyond_32_bits_are_refused() -> None:
    """Sixty steps of a neuron that keeps a half take sixty bits."""
    model = trained("spikformer", "ssa", time_steps=2)
    model.time_steps = 60
    with pytest.raises(RangeError, match="32 bits"):
        quantize(model)


def test_a_model_of_another_kind_is_refused() -> None:
    with pytest.raises(LrfdynError, match="model: expected"):
        quantize("spikformer_4_384")  # type: ignore[arg-type]


ONNX = [
    ("spikformer", "lrf_dyn_same"),
    ("spikformer", "causal_ssa"),
    ("qkformer", "lrf_ssa_norm"),
    ("sdt_v1", "sdsa"),
    ("sdt_v2", "lrf_dyn_qkv"),
    ("sdt_v3", "ssa"),
    ("ms_resnet", None),
]


@pytest.mark.parametrize(("host", "attention"), ONNX)
def test_onnx_gives_the_same_bits(tmp_path: Path, host: str, attention: str | None) -> None:
    model = trained(host, attention, **({"time_steps": 2} if host == "sdt_v2" else {}))
    integer = quantize(model)
    onnx_graph.write_graph(integer, tmp_path / "model.onnx")
    levels, _ = pictures(model, 5)
    runner = OnnxRunner(tmp_path / "model.onnx")
    assert runner.facts["scale"] == integer.scale
    logits = runner(levels.numpy())
    assert logits.dtype == np.int32
    assert np.array_equal(logits, integer(levels).numpy())


def test_onnx_that_gives_other_bits_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    integer = quantize(trained("spikformer", "ssa"))
    write = onnx_graph.write_graph

    def with_another_bias(model: Any, path: Path) -> None:
        *others, head = model.operations
        other = replace(head, bias=head.bias + 1)
        write(IntegerModel(model.shape, model.time_steps, model.scale, [*others, other]), path)

    monkeypatch.setattr(onnx_graph, "write_graph", with_another_bias)
    with pytest.raises(LrfdynError, match="other integers"):
        write_integer_onnx(integer, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())
    with pytest.raises(LrfdynError, match=r"ends in \.onnx"):
        write_integer_onnx(integer, tmp_path / "model.pte")


def test_command_writes_integers_that_predict_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, saved = tmp_path / "model.onnx", str(tmp_path / "saved")
    trained("spikformer", "ssa").save_pretrained(saved)
    assert main(["export", saved, "--integer", "--check", "1", "--json", "--out", str(out)]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["bit_exact"]
    Image.fromarray(pictures_of(16)).save(tmp_path / "a.png")
    predictor = Predictor.open(str(out))
    (record,) = predictor.predict([tmp_path / "a.png"], top=5)
    levels = torch.from_numpy(predictor.preprocessing.levels(predictor.preprocessing.load(tmp_path / "a.png")))
    runner = OnnxRunner(out)
    scores = (torch.from_numpy(runner(levels.unsqueeze(0).numpy())).double() * runner.facts["scale"]).softmax(1)
    found = {each["class"]: each["score"] for each in record["predictions"]}
    assert [found[i] for i in range(5)] == pytest.approx(scores[0].tolist())
    assert main(["export", saved, "--integer", "--format", "nir", "--out", str(out)]) == 2
    assert "integer: only for ONNX" in capsys.readouterr().err
    assert main(["export", saved, "--integer", "--dense", "--out", str(out)]) == 2
    assert "dense: only for NIR files" in capsys.readouterr().err


def test_onnx_takes_no_convolution_of_more_than_16_bits(tmp_path: Path) -> None:
    b = Builder(0, 1, (2, 4, 4))
    currents = b.conv(0, 9, kernel=1)
    assert b.values[currents].high.max() > 2**15
    with pytest.raises(LrfdynError, match="expected inputs of 16 bits in ONNX"):
        write_integer_onnx(b.done(b.conv(currents, 4, kernel=1)), tmp_path / "model.onnx")


def test_onnx_takes_no_products_of_more_than_61_bits(tmp_path: Path) -> None:
    b = Builder(0, 1, (1, 1, 1))
    large = b.add(ScaleAdd, (0, 0), torch.tensor([2**23]).int())
    x = b.add(Rescale, (large,), torch.tensor([2**31 - 1]).int(), torch.tensor([50]).int())
    with pytest.raises(LrfdynError, match="products of at most 61 bits in ONNX"):
        write_integer_onnx(b.done(x), tmp_path / "model.onnx")


@pytest.mark.parametrize("large", [127, 4095, 32639])
@pytest.mark.parametrize("groups", [1, 3])
def test_onnx_splits_weights_of_16_bits(tmp_path: Path, large: int, groups: int) -> None:
    b = Builder(0, 1, (3, 4, 3))
    weight = b.numbers(-large, large, 3, 3 // groups, 3, 3, dtype=torch.int16)
    weight[:, :, 0, 0], weight[:, :, 1, 1] = large, -large
    border = torch.tensor([0, 128, 255], dtype=torch.uint8)
    x = b.add(Conv, (0,), weight, b.numbers(-9, 9, 3), 1, 1, groups, border)
    integer = b.done(x)
    path = write_integer_onnx(integer, tmp_path / "model.onnx")
    levels = torch.cat([random_pictures(integer, 4), torch.full((1, 3, 4, 3), 255, dtype=torch.uint8)])
    assert np.array_equal(OnnxRunner(path)(levels.numpy()), integer(levels).numpy())


def test_an_edited_onnx_file_is_refused(tmp_path: Path) -> None:
    """Whichever byte it is, and where the file is cut off: most of it are weights, which ONNX Runtime takes as they
    come."""
    b = Builder(0, 1, (1, 4, 4))
    path = write_integer_onnx(b.done(b.conv(0, 4)), tmp_path / "model.onnx")
    OnnxRunner(path)
    whole = path.read_bytes()
    for place in range(3, len(whole), len(whole) // 40):
        edited = bytearray(whole)
        edited[place] ^= 4
        for data in (bytes(edited), whole[:place]):
            path.write_bytes(data)
            with pytest.raises(LrfdynError, match=r"^model: .*model\.onnx"):
                OnnxRunner(path)


def test_onnx_takes_no_weights_of_more_than_two_bytes(tmp_path: Path) -> None:
    b = Builder(0, 1, (1, 4, 4))
    x = b.add(Conv, (0,), torch.full((1, 1, 1, 1), 32640, dtype=torch.int16), b.numbers(0, 0, 1))
    with pytest.raises(LrfdynError, match="expected smaller weights in ONNX"):
        write_integer_onnx(b.done(x), tmp_path / "model.onnx")


@pytest.mark.parametrize(("time_steps", "largest"), [(4, 4095), (10, 511), (12, 127)])
def test_the_first_layer_has_the_bits_that_its_neuron_leaves(time_steps: int, largest: int) -> None:
    """Pixels have 256 levels: rounding their weights to 8 bits costs more than rounding all others."""
    first, *others = (
        op for op in quantize(trained("spikformer", "ssa", time_steps=time_steps)).operations if isinstance(op, Conv)
    )
    assert 0.5 * largest < first.weight.abs().max() <= largest
    assert all(op.weight.dtype == torch.int8 for op in others)


def test_too_many_time_steps_are_said() -> None:
    message = r"^model: operation stem.stages.0.neuron \(Fire\): .* beyond 32 bits, of which 24 time steps take 23$"
    with pytest.raises(RangeError, match=message):
        quantize(trained("spikformer", "ssa", time_steps=24))


def pictures_of(size: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (size, size, 3)).astype(np.uint8)
