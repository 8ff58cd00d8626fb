"""Every integer operation against a plain loop, its interval at the extremes, and the file of a model."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lrfdyn.deploy.integer import operations as ops
from lrfdyn.deploy.integer import program
from lrfdyn.deploy.integer.operations import Operation, RangeError, Value, level_threshold, threshold_for
from lrfdyn.deploy.integer.program import IntegerModel, load_integer
from lrfdyn.deploy.integer.reference import run
from lrfdyn.errors import LrfdynError
from lrfdyn.nn.neurons import IF, LIF, MSLIF, PaperLIF, SpikingNeuron

STEPS = 3


def integers(*shape: int, low: int = 0, high: int = 1, seed: int = 0, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.randint(low, high + 1, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def interval(x: Tensor, low: int | None = None, high: int | None = None) -> Value:
    """The facts of a value that `x` is an example of; its interval holds all of `x`, or is the one given."""
    channels = x.transpose(0, 2).flatten(1)
    least = channels.amin(1) if low is None else torch.full((x.shape[2],), low)
    most = channels.amax(1) if high is None else torch.full((x.shape[2],), high)
    return Value(least, most, *x.shape[3:], timed=x.shape[0] > 1)


def checked_run(operation: Operation, *inputs: Tensor, steps: int = STEPS) -> Tensor:
    """What an operation gives, after a check of the shape and the interval that it says."""
    said = operation.infer([interval(x) for x in inputs], steps)
    out = run(operation, *inputs, time_steps=steps)
    assert out.dtype == torch.int64
    assert tuple(out.shape[2:]) == (said.channels, said.height, said.width)
    assert (out.shape[0] > 1) == (said.timed and steps > 1)
    channels = out.transpose(0, 2).flatten(1)
    assert (channels.amin(1) >= said.low).all()
    assert (channels.amax(1) <= said.high).all()
    return out


@pytest.mark.parametrize(
    ("groups", "stride", "padding", "border"), [(1, 1, 1, True), (2, 2, 1, False), (4, 1, 0, False)]
)
def test_convolution_is_the_plain_sum(groups: int, stride: int, padding: int, border: bool) -> None:
    x = integers(1 if border else STEPS, 2, 4, 5, 6, high=255)
    weight, bias = (
        integers(8, 4 // groups, 3, 3, low=-127, high=127, dtype=torch.int8),
        integers(8, low=-9, high=9).int(),
    )
    outside = integers(4, high=255, seed=1).to(torch.uint8) if border else None
    out = checked_run(ops.Conv("c", (0,), weight, bias, stride, padding, groups, outside), x)
    for t, b, o, i, j in itertools.product(*map(range, out.shape)):
        total = int(bias[o])
        for c, di, dj in itertools.product(range(4 // groups), range(3), range(3)):
            channel, y, z = o // (8 // groups) * (4 // groups) + c, i * stride + di - padding, j * stride + dj - padding
            inside = 0 <= y < 5 and 0 <= z < 6
            pixel = int(x[t, b, channel, y, z]) if inside else 0 if outside is None else int(outside[channel])
            total += int(weight[o, c, di, dj]) * pixel
        assert out[t, b, o, i, j] == total


def test_stencils_are_the_plain_sum() -> None:
    x, dilations = integers(STEPS, 1, 2, 5, 4, low=-300, high=300), (1, 3)
    weight, bias = integers(2, 2, 3, 3, low=-999, high=999, dtype=torch.int16), integers(2, low=-9, high=9).int()
    out = checked_run(ops.Stencils("s", (0,), weight, bias, dilations), x)
    for t, c, i, j in itertools.product(range(STEPS), range(2), range(5), range(4)):
        total = int(bias[c])
        for n, a, b in itertools.product(range(2), range(3), range(3)):
            y, z = i + (a - 1) * dilations[n], j + (b - 1) * dilations[n]
            total += int(weight[n, c, a, b]) * int(x[t, 0, c, y, z]) if 0 <= y < 5 and 0 <= z < 4 else 0
        assert out[t, 0, c, i, j] == total


NEURONS: list[tuple[SpikingNeuron, int]] = [(LIF(), 1), (IF(), 0), (PaperLIF(), 1), (MSLIF(), 2), (LIF(0.5), 1)]


@given(
    currents=st.lists(st.integers(-3000, 3000), min_size=1, max_size=6),
    unit=st.floats(1e-4, 1e-2),
    which=st.sampled_from(range(len(NEURONS))),
)
def test_neuron_is_exact(currents: list[int], unit: float, which: int) -> None:
    """As the neuron is with numbers that have no end."""
    neuron, kept = NEURONS[which]
    d, steps = neuron.dynamics, len(currents)
    assert Fraction(d.leak) * Fraction(d.decay) == Fraction(1, 2**kept)
    threshold = threshold_for(d.threshold / d.gain * 2 ** (kept * (steps - 1)), unit, d.strict)
    fire = ops.Fire("f", (0,), torch.tensor([threshold], dtype=torch.int32), kept, d.strict)
    spikes = checked_run(fire, torch.tensor(currents).reshape(-1, 1, 1, 1, 1), steps=steps).flatten().tolist()
    held, exact = Fraction(0), []
    for current in currents:
        u = Fraction(d.leak) * held + Fraction(d.gain) * Fraction(unit) * current
        exact.append(int(u > Fraction(d.threshold) if d.strict else u >= Fraction(d.threshold)))
        held = Fraction(0) if exact[-1] else Fraction(d.decay) * u
    assert spikes == exact


def test_neuron_repeats_what_has_no_time() -> None:
    x = integers(1, 2, 3, 2, 2, low=-9, high=9)
    fire = ops.Fire("f", (0,), torch.tensor([8, 20, 40], dtype=torch.int32), 1, False)
    assert torch.equal(checked_run(fire, x), checked_run(fire, x.repeat(STEPS, 1, 1, 1, 1)))


@given(x=st.integers(-3000, 3000), denominator=st.integers(1, 400), levels=st.integers(1, 5))
def test_integer_spike_is_exact(x: int, denominator: int, levels: int) -> None:
    """Ties included, which PyTorch rounds to even."""
    unit = Fraction(1, denominator)
    thresholds = [level_threshold(d, unit) for d in range(1, levels + 1)]
    fired = checked_run(
        ops.Levels("l", (0,), torch.tensor([thresholds], dtype=torch.int32)), torch.tensor(x).reshape(1, 1, 1, 1, 1)
    )
    assert int(fired) == round(max(Fraction(0), min(Fraction(levels), x * unit)))


def test_sums_products_and_pools_are_plain() -> None:
    x, y = integers(STEPS, 2, 4, 3, 5, low=-50, high=50), integers(1, 2, 4, 3, 5, low=-7, high=7, seed=1)
    m = torch.tensor([0, 1, 5, 900], dtype=torch.int32)
    assert torch.equal(checked_run(ops.Add("a", (0, 1)), x, y), x + y)
    assert torch.equal(checked_run(ops.ScaleAdd("a", (0, 1), m), x, y), x * m.long().reshape(4, 1, 1) + y)
    assert torch.equal(checked_run(ops.SumTokens("t", (0,)), x), x.sum((3, 4), keepdim=True))
    assert torch.equal(
        checked_run(ops.SumChannels("c", (0,), 2), x), torch.stack((x[:, :, :2].sum(2), x[:, :, 2:].sum(2)), 2)
    )
    narrow, bias = y[:, :, :2, :1, :1], torch.tensor([1, -2, 3, -4], dtype=torch.int32)
    widened = narrow[:, :, [0, 0, 1, 1]]
    assert torch.equal(checked_run(ops.Gate("g", (0, 1), bias), narrow, x), widened * x + bias.long().reshape(4, 1, 1))
    pooled = checked_run(ops.MaxPool("p", (0,)), x)
    for i, j in itertools.product(range(2), range(3)):
        window = x[..., max(0, 2 * i - 1) : 2 * i + 2, max(0, 2 * j - 1) : 2 * j + 2]
        assert torch.equal(pooled[..., i, j], window.amax((3, 4)))


@given(x=st.integers(-(2**31), 2**31 - 1), multiplier=st.integers(0, 2**24), shift=st.integers(0, 40))
def test_rescale_rounds_to_the_nearest(x: int, multiplier: int, shift: int) -> None:
    limit = 2**20
    tensors = (torch.tensor([v], dtype=torch.int32) for v in (multiplier, shift))
    out = int(checked_run(ops.Rescale("r", (0,), *tensors, limit), torch.tensor(x).reshape(1, 1, 1, 1, 1)))
    assert out == max(
        -limit, min(limit, math.floor(Fraction(x * multiplier, 2**shift) + (Fraction(1, 2) if shift else 0)))
    )


@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_the_plain_sum(causal: bool) -> None:
    q, k, v = (
        integers(STEPS, 1, 4, 2, 3),
        integers(STEPS, 1, 4, 2, 3, high=3, seed=1),
        integers(STEPS, 1, 8, 2, 3, seed=2),
    )
    out = checked_run(ops.Ssa("s", (0, 1, 2), 2, causal), q, k, v).flatten(3)
    q, k, v = (x.flatten(3) for x in (q, k, v))
    for t, n, c in itertools.product(range(STEPS), range(6), range(8)):
        head = slice(c // 4 * 2, c // 4 * 2 + 2)
        total = sum(
            int(q[t, 0, head, n] @ k[t, 0, head, j]) * int(v[t, 0, c, j]) for j in range(n + 1 if causal else 6)
        )
        assert out[t, 0, c, n] == total


@pytest.mark.parametrize("real", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
def test_dendrites_are_the_plain_recurrence(real: bool, reverse: bool) -> None:
    x = integers(STEPS, 1, 2, 3, 4)
    coefficient = integers(2, 2, 2, low=-20000, high=20000, dtype=torch.int16)
    weight, shift = (
        integers(2, 2, 2, low=-30000, high=30000, seed=1, dtype=torch.int16),
        integers(2, 2, low=3, high=9).int(),
    )
    out_shift = torch.tensor([12, 13], dtype=torch.int32)
    out = checked_run(ops.Dendrites("d", (0,), coefficient, shift, weight, out_shift, real, reverse), x).flatten(3)
    order = list(reversed(range(12))) if reverse else list(range(12))
    for t, c in itertools.product(range(STEPS), range(2)):
        states = [(0, 0), (0, 0)]
        for n in order:
            total, u = 0, int(x[t, 0, c].flatten()[n])
            for m in range(2):
                (re, im), (a, b), enters = states[m], coefficient[c, m].tolist(), u << int(shift[c, m])
                if real:
                    re, im = (re * a + 2**14 >> 15) + enters, (im * b + 2**14 >> 15) + enters
                else:
                    turned = (re * b + 2**14 >> 15) + (im * a + 2**14 >> 15)
                    re, im = (re * a + 2**14 >> 15) - (im * b + 2**14 >> 15) + enters, turned
                assert max(abs(re), abs(im)) < 2**15
                states[m] = re, im
                total += int(weight[c, m, 0]) * re + int(weight[c, m, 1]) * im
            assert out[t, 0, c, n] == total + (1 << int(out_shift[c]) >> 1) >> int(out_shift[c])


@given(data=st.data(), real=st.booleans(), tokens=st.integers(1, 40))
def test_dendrites_stay_within_their_bounds(data: Any, real: bool, tokens: int) -> None:
    """Slow, resonant and unstable modes, driven by the input that is worst for them."""
    number = st.integers(-32767, 32767)
    a, b, w, x = (data.draw(number) for _ in range(4))
    if not real and math.hypot(a, b) > 2**15:
        a, b = int(a / 1.5), int(b / 1.5)
    response = ops.impulse(torch.tensor([[[a, b]]]), tokens, real)[:, 0, 0].flip(0)
    for wanted in (response[:, 0], response[:, 1], response @ torch.tensor([w, x]).double()):
        for sign in (1, -1):
            u = (wanted * sign > 0).long().reshape(1, 1, 1, 1, -1)
            some = torch.tensor([[[a, b]]], dtype=torch.int16), torch.tensor([[[w, x]]], dtype=torch.int16)
            shift, out_shift = torch.tensor([[2]], dtype=torch.int32), torch.tensor([10], dtype=torch.int32)
            operation = ops.Dendrites("d", (0,), some[0], shift, some[1], out_shift, real, False)
            try:
                said = operation.infer([interval(u, 0, 1)], 1)
            except RangeError:
                return
            soma = run(operation, u, time_steps=1)
            assert said.low[0] <= soma.min()
            assert soma.max() <= said.high[0]


def head(channels: int = 2, classes: int = 3) -> ops.Head:
    weight = integers(classes, channels, low=-30000, high=30000, dtype=torch.int16)
    return ops.Head("head", (1,), weight, integers(classes, low=-99, high=99).int())


def test_head_is_the_plain_sum() -> None:
    x, layer = integers(STEPS, 2, 2, 3, 3, high=5), head()
    out = checked_run(layer, x, steps=STEPS).reshape(2, 3)
    assert torch.equal(out, x.sum((0, 3, 4)) @ layer.weight.long().T + layer.bias.long())


@given(data=st.data())
def test_convolution_reaches_its_interval(data: Any) -> None:
    """The worst image gives the bound itself, so that no tighter one would be right."""
    weight = torch.tensor(data.draw(st.lists(st.integers(-127, 127), min_size=3, max_size=3))).reshape(1, 3, 1, 1)
    operation = ops.Conv("c", (0,), weight.to(torch.int8), torch.tensor([data.draw(st.integers(-50, 50))]).int())
    said = operation.infer([interval(torch.zeros(1, 1, 3, 1, 1), 0, 255)], 1)
    for sign, bound in ((1, said.high), (-1, said.low)):
        worst = 255 * (sign * weight > 0).long().reshape(1, 1, 3, 1, 1)
        assert run(operation, worst, time_steps=1).item() == bound.item()


@pytest.mark.parametrize(
    ("operation", "value"),
    [
        (ops.Conv("c", (0,), torch.full((1, 1, 1, 1), 127, dtype=torch.int8), torch.zeros(1).int()), 2**25),
        (ops.Stencils("c", (0,), torch.full((1, 1, 3, 3), 999).short(), torch.zeros(1).int(), (1,)), 2**18),
        (ops.Fire("f", (0,), torch.ones(1).int(), 1, False), 2**30),
        (ops.Fire("f", (0,), torch.ones(1).int(), 40, False), 1),
        (ops.Add("a", (0, 0)), 2**30),
        (ops.ScaleAdd("a", (0, 0), torch.full((1,), 2**20).int()), 2**12),
        (ops.Gate("g", (0, 0)), 2**16),
        (ops.SumTokens("t", (0,)), 2**30),
        (ops.Ssa("s", (0, 0, 0), 1, False), 255),
        (ops.Head("h", (0,), torch.full((1, 1), 2**14).short(), torch.zeros(1).int()), 2**15),
    ],
)  # fmt: skip
def test_what_could_leave_32_bits_is_refused(operation: Operation, value: int) -> None:
    grid = (999, 1) if isinstance(operation, ops.Ssa) else (2, 1)
    given = Value(torch.zeros(1).long(), torch.tensor([value]), *grid, timed=True)
    with pytest.raises(RangeError, match="32 bits"):
        operation.infer([given] * operation.arity, STEPS)


@pytest.mark.parametrize(
    "operation",
    [
        ops.Fire("f", (0,), torch.zeros(1).int(), -1, False),
        ops.Fire("f", (0,), torch.zeros(1).int(), 32, False),
        ops.Conv("c", (0,), torch.zeros(1, 1, 0, 1).to(torch.int8), torch.zeros(1).int()),
        ops.Conv("c", (0,), torch.zeros(0, 1, 1, 1).to(torch.int8), torch.zeros(0).int()),
        ops.Levels("l", (0,), torch.zeros(1, 0).int()),
        ops.Stencils("s", (0,), torch.zeros(0, 1, 3, 3).short(), torch.zeros(1).int(), ()),
        ops.Ssa("a", (0, 1, 1), 1, False),
    ],
)
def test_what_no_runtime_has_is_refused(operation: Operation) -> None:
    held = [Value(torch.zeros(1).long(), torch.ones(1).long(), 2, 1, timed) for timed in (False, True)]
    with pytest.raises(LrfdynError, match=rf"^operation {operation.name} \({type(operation).__name__}\): "):
        operation.infer([held[i] for i in operation.inputs], 1)


def small_model() -> IntegerModel:
    weight, bias = integers(2, 1, 3, 3, low=-127, high=127, dtype=torch.int8), integers(2, low=-9, high=9).int()
    conv = ops.Conv("conv", (0,), weight, bias, padding=1, border=torch.tensor([7], dtype=torch.uint8))
    fire = ops.Fire("neuron", (1,), torch.tensor([4000, 9000], dtype=torch.int32), 1, False)
    layer = head()
    return IntegerModel(
        (1, 4, 5), STEPS, 0.25, [conv, fire, ops.Head("head", (2,), layer.weight, layer.bias)], {"a": 1}
    )


def test_model_is_the_chain_of_its_operations(tmp_path: Path) -> None:
    model, images = small_model(), integers(37, 1, 4, 5, high=255).to(torch.uint8)
    x = images.long().unsqueeze(0)
    for operation in model.operations:
        x = run(operation, x, time_steps=STEPS)
    logits = model(images)
    assert logits.dtype == torch.int32
    assert torch.equal(logits, x.reshape(37, 3).int())
    assert [value.kind for value in model.values] == ["small", "int", "bits", "int"]
    model.save(tmp_path / "model.safetensors")
    again = load_integer(tmp_path / "model.safetensors")
    assert torch.equal(again(images), logits)
    assert (again.shape, again.time_steps, again.scale, again.facts) == ((1, 4, 5), STEPS, 0.25, {"a": 1})
    assert again.bytes == model.bytes


@pytest.mark.parametrize(
    "images",
    [
        torch.zeros(1, 1, 4, 4).byte(),
        torch.zeros(1, 4, 5).byte(),
        torch.zeros(1, 1, 4, 5),
        "a",
        torch.zeros(0, 1, 4, 5).byte(),
    ],
)
def test_other_pictures_are_refused(images: Any) -> None:
    with pytest.raises(LrfdynError, match="images: expected"):
        small_model()(images)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    small_model().save(path)
    whole = path.read_bytes()
    for at in (0, 9, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:at])
        with pytest.raises(LrfdynError, match="damaged"):
            load_integer(path)
    for at in range(8, len(whole), 23):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(LrfdynError):
            load_integer(path)
    with pytest.raises(LrfdynError, match="no such file"):
        load_integer(tmp_path / "other.safetensors")


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "Nothing"}, {"inputs": [9]}, {"inputs": [1, 1]}, {"inputs": 0}, {"stride": "a"}, {"stride": 0},
        {"padding": 1.5}, {"other": 1}, {"name": 4}, {"groups": -1},
    ],
)  # fmt: skip
def test_edited_files_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    """Also where somebody made the checksum fit."""
    path = tmp_path / "model.safetensors"
    small_model().save(path)
    tensors, meta = program.load_tensors(path)
    meta["operations"][0] |= change
    meta["checksum"] = program.checksum(tensors, {k: v for k, v in meta.items() if k != "checksum"})
    program.save_tensors(path, tensors, meta)
    with pytest.raises(LrfdynError, match="is not the file of an integer model"):
        load_integer(path)
