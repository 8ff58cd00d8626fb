"""A program in the making, the units of its values, and how modules are looked up."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from lrfdyn.data.preprocess import Preprocessing
from lrfdyn.deploy.integer import operations as ops
from lrfdyn.deploy.integer.operations import MOST, MOST16, Operation, Value, level_threshold, threshold_for
from lrfdyn.deploy.integer.weights import quantize_rows
from lrfdyn.errors import LrfdynError
from lrfdyn.nn.neurons import fused_dynamics
from lrfdyn.ops.lif import Dynamics

INT8 = 127
NARROW = 2.0**-8  # the unit of potentials in 16 bits
HEADROOM = 18  # bits that a bias may have, in the unit of its channel


@dataclass(frozen=True)
class Signal:
    """Value `index` of the program, and the unit of each channel `[C]`, in float64."""

    index: int
    unit: Tensor


class Lowering:
    """A program in the making. `potential_bits` are those behind the point of potentials on shortcuts, `pixel_weight`
    is the largest weight of the first layer. The weights of the modules are replaced by what the integers stand for."""

    def __init__(
        self, shape: Sequence[int], time_steps: int, colours: Preprocessing, potential_bits: int, pixel_weight: int
    ) -> None:
        zero = torch.zeros(shape[0], dtype=torch.int64)
        self.time_steps, self.colours, self.potential_unit = time_steps, colours, 2.0**-potential_bits
        self.pixel_weight = pixel_weight
        self.operations: list[Operation] = []
        self.values = [Value(zero, zero + 255, shape[1], shape[2], timed=False)]
        self.scale = 1.0

    def emit(self, operation: Operation, unit: Tensor) -> Signal:
        self.operations.append(operation)
        self.values.append(operation.infer([self.values[i] for i in operation.inputs], self.time_steps))
        return Signal(len(self.operations), unit)

    def value(self, x: Signal) -> Value:
        return self.values[x.index]

    def pixels(self) -> Signal:
        return Signal(0, 1 / (255 * torch.tensor(self.colours.std, dtype=torch.float64)))

    def conv(self, name: str, x: Signal, conv: Any) -> Signal:
        """A convolution with its norm folded in."""
        plain = type(conv) is nn.Conv2d and conv.padding_mode == "zeros" and not isinstance(conv.padding, str)
        square = plain and conv.dilation == (1, 1) and all(a == b for a, b in (conv.stride, conv.padding))
        refuse(square, name, conv, "it is no plain convolution with the same stride and padding both ways")
        if self.value(x).kind == "int":
            x = self.narrow(name, x)
        width = conv.weight.shape[1]
        units = x.unit.unflatten(0, (conv.groups, width)).repeat_interleave(len(conv.weight) // conv.groups, 0)
        weight = conv.weight * units[..., None, None]
        bias = conv.weight.new_zeros(len(weight)) if conv.bias is None else conv.bias.clone()
        border, dark, largest = None, torch.zeros(()), INT8
        if x.index == 0:
            largest = self.pixel_weight
            mean, std = (torch.tensor(v, dtype=torch.float64) for v in (self.colours.mean, self.colours.std))
            border = (255 * mean).round().to(torch.uint8)
            refuse(conv.groups == 1, name, conv, "the first convolution has groups")
            bias -= (conv.weight.sum((2, 3)) * (mean / std)).sum(1)
        whole, unit = quantize_rows(weight, largest, least=bias.abs() * 2.0**-HEADROOM)
        offset = (bias / unit).round()
        conv.weight.copy_(whole * unit.reshape(-1, 1, 1, 1) / units[..., None, None])
        if x.index == 0:
            dark = (conv.weight.sum((2, 3)) * (mean / std)).sum(1)
        conv.bias = nn.Parameter(offset * unit + dark, requires_grad=False)
        stored = whole.to(torch.int8 if largest <= INT8 else torch.int16)
        made = ops.Conv(name, (x.index,), stored, offset.int(), conv.stride[0], conv.padding[0], conv.groups, border)
        return self.emit(made, unit)

    def fire(self, name: str, x: Signal, neuron: nn.Module) -> Signal:
        """The spikes of a neuron."""
        dynamics = fused_dynamics(neuron)
        if dynamics is None:
            raise refusal(name, neuron, "its class has no integer form")
        if not isinstance(dynamics, Dynamics):
            units = x.unit.tolist()
            rows = [[level_threshold(d, unit) for d in range(1, dynamics.levels + 1)] for unit in units]
            levels = ops.Levels(name, (x.index,), torch.tensor(rows, dtype=torch.int32))
            return self.emit(levels, torch.full_like(x.unit, dynamics.scale))
        kept = 1.0 if self.time_steps == 1 else dynamics.leak * dynamics.decay
        shift = -math.log2(kept) if kept > 0 else 0.5
        known = shift >= 0 and shift == int(shift) and dynamics.v_reset == 0 and dynamics.gain > 0
        what = "an integer neuron keeps 1, 1/2, 1/4, ... of its membrane and resets to 0"
        refuse(known, name, neuron, f"{what}; this one keeps {kept:g} and resets to {dynamics.v_reset:g}")
        bits = int(shift) * (self.time_steps - 1)
        level = Fraction(dynamics.threshold) / Fraction(dynamics.gain) * 2**bits
        threshold = [threshold_for(level, unit, dynamics.strict) for unit in x.unit.tolist()]
        made = ops.Fire(name, (x.index,), torch.tensor(threshold, dtype=torch.int32), int(shift), dynamics.strict)
        return self.emit(made, torch.ones_like(x.unit))

    def spare_bits(self, neuron: nn.Module) -> int:
        """How many of 31 bits a neuron's input may take: the others are its fraction and what it keeps."""
        dynamics = fused_dynamics(neuron)
        if not isinstance(dynamics, Dynamics) or self.time_steps == 1:
            return 30
        kept = max(dynamics.leak * dynamics.decay, 2.0**-30)
        grows = math.log2(sum(kept**n for n in range(self.time_steps)))
        return 30 - math.ceil(-math.log2(kept) * (self.time_steps - 1) + grows)

    def rescale(self, name: str, x: Signal, unit: float, limit: int = MOST) -> Signal:
        """`x` in one unit for all channels."""
        ratio = x.unit / unit
        shift = (23 - ratio.log2().floor()).clamp(0, 60)
        multiplier = (ratio * 2**shift).round()
        made = ops.Rescale(name, (x.index,), multiplier.int(), shift.int(), limit)
        return self.emit(made, torch.full_like(x.unit, unit))

    def narrow(self, name: str, x: Signal) -> Signal:
        """Potentials in 16 bits, for a convolution without a neuron before it."""
        value = self.value(x)
        if int(torch.maximum(-value.low, value.high).max()) <= MOST16:
            return x
        return self.rescale(f"{name}.input", x, NARROW, MOST16)

    def add(self, name: str, x: Signal, y: Signal) -> Signal:
        """The sum of spikes, or of potentials in their common unit."""
        if not torch.equal(x.unit, y.unit):
            x, y = (self.to_potential(name, each) for each in (x, y))
        return self.emit(ops.Add(name, (x.index, y.index)), x.unit)

    def to_potential(self, name: str, x: Signal) -> Signal:
        same = bool((x.unit == self.potential_unit).all())
        return x if same else self.rescale(name, x, self.potential_unit)

    def pool(self, name: str, x: Signal) -> Signal:
        return self.emit(ops.MaxPool(name, (x.index,)), x.unit)

    def gate(self, name: str, x: Signal, y: Signal, bias: Tensor | None = None) -> Signal:
        channels = max(len(x.unit), len(y.unit))
        unit, other = (each.unit.repeat_interleave(channels // len(each.unit)) for each in (x, y))
        offset = None if bias is None else (bias / (unit * other)).round().int()
        return self.emit(ops.Gate(name, (x.index, y.index), offset), unit * other)

    def sum_tokens(self, name: str, x: Signal) -> Signal:
        return self.emit(ops.SumTokens(name, (x.index,)), x.unit)

    def head(self, name: str, x: Signal, heads: Sequence[Any]) -> None:
        """The classifier on the mean over tokens and time, or the mean of several."""
        for layer in heads:
            refuse(type(layer) is nn.Linear, name, layer, "the classifier is no linear layer")
        weight = torch.stack([layer.weight for layer in heads]).mean(0)
        bias = torch.stack([layer.bias for layer in heads]).mean(0)
        value, unit = self.value(x), float(x.unit[0])
        assert torch.equal(x.unit, torch.full_like(x.unit, unit))
        count = value.tokens * (self.time_steps if value.timed else 1)
        largest = (weight.abs() * value.high).sum(1) * count + bias.abs() * count / unit
        step = max(float(weight.abs().max()) / MOST16, float(largest.max()) / (0.99 * MOST), 1e-30)
        self.scale = step * unit / count
        whole, offset = (weight / step).round(), (bias / self.scale).round()
        for layer in heads:
            layer.weight.copy_(whole * step)
            layer.bias.copy_(offset * self.scale)
        self.emit(ops.Head(name, (x.index,), whole.to(torch.int16), offset.int()), x.unit)


Lower = Callable[..., Signal]
LOWERINGS: dict[type[nn.Module], Lower] = {}


def lowers(*kinds: type[nn.Module]) -> Callable[[Lower], Lower]:
    """Registers how modules of exactly these classes are lowered: `(lowering, module, name, x)` to a signal."""

    def register(function: Lower) -> Lower:
        LOWERINGS.update(dict.fromkeys(kinds, function))
        return function

    return register


def lower(b: Lowering, module: nn.Module, name: str, x: Signal) -> Signal:
    """What a module makes of `x`."""
    if type(module) not in LOWERINGS:
        raise refusal(name, module, "its class has no integer form")
    return LOWERINGS[type(module)](b, module, name, x)


def refusal(name: str, module: nn.Module, reason: str) -> LrfdynError:
    return LrfdynError(f"model: {name} ({type(module).__name__}) cannot be computed in integers: {reason}")


def refuse(fits: bool, name: str, module: nn.Module, reason: str) -> None:
    if not fits:
        raise refusal(name, module, reason)
