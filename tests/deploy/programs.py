"""Random integer models: all kinds of operations, odd shapes and weights as large as they can be."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from lrfdyn.deploy.integer.operations import (
    Add,
    Conv,
    Dendrites,
    Fire,
    Gate,
    Head,
    Levels,
    MaxPool,
    Operation,
    RangeError,
    Rescale,
    ScaleAdd,
    Ssa,
    Stencils,
    SumChannels,
    SumTokens,
    Value,
)
from lrfdyn.deploy.integer.program import IntegerModel, infer_values


class Builder:
    """A model that grows by operations whose weights are drawn."""

    def __init__(self, seed: int, time_steps: int, shape: tuple[int, int, int]) -> None:
        self.draw = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.time_steps, self.shape = time_steps, shape
        self.operations: list[Operation] = []
        self.values: tuple[Value, ...] = infer_values(shape, time_steps, [])

    def numbers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.randint(low, high + 1, shape, generator=self.generator).to(dtype)

    def add(self, kind: type[Operation], inputs: tuple[int, ...], *given: Any, **options: Any) -> int:
        operation = kind(f"{len(self.operations)}.{kind.__name__}", inputs, *given, **options)
        self.values = infer_values(self.shape, self.time_steps, [*self.operations, operation])
        self.operations.append(operation)
        return len(self.operations)

    def conv(self, x: int, out: int, kernel: int = 3, stride: int = 1, groups: int = 1, wide: bool = False) -> int:
        each = self.values[x].channels // groups
        large, dtype = (999, torch.int16) if wide else (127, torch.int8)
        weight = self.numbers(-large, large, out, each, kernel, kernel, dtype=dtype)
        border = self.numbers(0, 255, self.values[0].channels, dtype=torch.uint8) if x == 0 else None
        bias = self.numbers(-500, 500, out)
        return self.add(Conv, (x,), weight, bias, stride, kernel // 2, groups, border)

    def fire(self, x: int, strict: bool | None = None) -> int:
        """About one in four fires: the threshold is at what an image leads to."""
        strict = self.draw.random() < 0.5 if strict is None else strict
        shift = self.draw.choice((0, 1, 1))
        seen = self.seen(x).double().permute(2, 0, 1, 3, 4).flatten(1)
        level = seen.quantile(0.75, dim=1).ceil().long() << shift * (self.time_steps - 1)
        return self.add(Fire, (x,), level.clamp(-(2**31), 2**31 - 1).int(), shift, strict)

    def seen(self, x: int) -> Tensor:
        """A value of one random image."""
        head = Head("head", (x,), torch.zeros(1, self.values[x].channels, dtype=torch.int16), torch.zeros(1).int())
        model = IntegerModel(self.shape, self.time_steps, 1.0, [*self.operations, head])
        return model.run(self.numbers(0, 255, 1, *self.shape, dtype=torch.uint8), keep=[x])[0]

    def levels(self, x: int, depth: int = 4) -> int:
        seen = self.seen(x).double().permute(2, 0, 1, 3, 4).flatten(1)
        thresholds = torch.stack([seen.quantile(0.3 + 0.6 * i / depth, dim=1) for i in range(depth)], 1)
        return self.add(Levels, (x,), thresholds.ceil().int())

    def dendrites(self, x: int, real: bool, reverse: bool = False) -> int:
        channels, modes = self.values[x].channels, 3
        coefficient = self.numbers(-16000, 16000, channels, modes, 2, dtype=torch.int16)
        weight = self.numbers(-800, 800, channels, modes, 2, dtype=torch.int16)
        shift, out_shift = self.numbers(4, 9, channels, modes), self.numbers(8, 12, channels)
        return self.add(Dendrites, (x,), coefficient, shift, weight, out_shift, real, reverse)

    def stencils(self, x: int, dilations: tuple[int, ...] = (1, 3)) -> int:
        channels = self.values[x].channels
        weight = self.numbers(-60, 60, len(dilations), channels, 3, 3, dtype=torch.int16)
        return self.add(Stencils, (x,), weight, self.numbers(-300, 300, channels), dilations)

    def rescale(self, x: int) -> int:
        channels = self.values[x].channels
        multiplier, shift = self.numbers(0, 2**15, channels), self.numbers(0, 20, channels)
        return self.add(Rescale, (x,), multiplier, shift, self.draw.choice((3000, 20000)))

    def done(self, x: int, classes: int = 7) -> IntegerModel:
        """With a convolution and a neuron in front of the head, so that it matters where things are."""
        x = self.fire(self.conv(x, 9)) if self.values[x].kind != "int" else self.fire(x)
        weight = self.numbers(-99, 99, classes, self.values[x].channels, dtype=torch.int16)
        self.add(Head, (x,), weight, self.numbers(-999, 999, classes))
        return IntegerModel(self.shape, self.time_steps, 0.5, self.operations)


def attention(seed: int, time_steps: int) -> IntegerModel:
    """A network of spikes with every kind of attention, one after the other."""
    b = Builder(seed, time_steps, (3, 9, 7))
    x = b.add(MaxPool, (b.fire(b.conv(b.fire(b.conv(0, 20)), 48)),))
    x = b.add(Add, (x, b.fire(b.conv(x, 48))))
    q, k, v = (b.fire(b.conv(x, 24, kernel=1)) for _ in range(3))
    mixed = b.fire(b.add(Ssa, (q, k, v), 3, seed % 2 == 0))
    x = b.add(Add, (x, b.fire(b.conv(mixed, 48, kernel=1))))
    v = b.fire(b.conv(x, 24, kernel=1))
    somas = b.dendrites(v, real=seed % 2 == 0)
    both = b.add(Add, (somas, b.dendrites(v, real=seed % 2 == 1, reverse=True)))
    x = b.add(Add, (x, b.fire(b.conv(b.fire(b.stencils(both)), 48, kernel=1))))
    scaled = b.add(ScaleAdd, (b.add(Ssa, (q, k, v), 4, False), b.stencils(v)), b.numbers(0, 5, 24))
    gated = b.add(Gate, (b.fire(scaled), b.fire(b.add(SumTokens, (b.add(Gate, (q, k)),)))))
    token = b.add(Gate, (gated, b.fire(b.add(SumChannels, (q,), 4))))
    return b.done(b.add(Add, (x, b.fire(b.conv(token, 48, kernel=1)))))


def membranes(seed: int, time_steps: int) -> IntegerModel:
    """A network whose shortcuts carry potentials, with integer spikes."""
    b = Builder(seed, time_steps, (1, 8, 11))
    x = b.rescale(b.conv(0, 18, stride=2))
    x = b.add(Add, (x, b.rescale(b.conv(b.levels(x), 18))))
    x = b.add(MaxPool, (b.rescale(b.conv(b.levels(x, 9), 18, groups=18)),))
    x = b.add(Add, (b.rescale(b.conv(b.fire(x), 18, groups=3)), x))
    x = b.add(Add, (x, b.rescale(b.conv(b.rescale(b.conv(b.fire(x), 6, kernel=1)), 18, kernel=1))))
    x = b.add(Add, (b.rescale(b.conv(b.fire(x), 18, kernel=1, wide=True)), x))
    gate = b.numbers(-99, 99, 18)
    x = b.add(Gate, (b.rescale(x), b.fire(x)), gate)
    return b.done(x)


def any_model(seed: int, time_steps: int) -> IntegerModel:
    """Of either kind; drawn anew where 32 bits are too few."""
    for attempt in range(20):
        try:
            return (attention, membranes)[seed % 2](seed + 1000 * attempt, time_steps)
        except RangeError:
            continue
    raise AssertionError("no model fits 32 bits")
