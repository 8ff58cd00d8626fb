"""The operations of an integer model, and the intervals of what they give.

A value is `[T, B, C, H, W]`, or `[1, B, C, H, W]` where it is the same at all time steps. Every value has an interval
per channel, the worst case over all images, computed from the weights. No operation can leave 32 bits: one whose
interval, sums in between included, would, is a `RangeError`. `x >> n` rounds down.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import torch
from torch import Tensor

from lrfdyn.errors import LrfdynError, require

LEAST, MOST = -(2**31), 2**31 - 1
MOST16 = 2**15 - 1
POOL = (3, 2, 1)  # kernel, stride and padding of a max pool


class RangeError(LrfdynError):
    """A model whose integers could leave 32 bits."""


@dataclass(frozen=True, eq=False)
class Value:
    """What an operation gives: `height` and `width`, whether it differs from step to step (`timed`), and for each
    channel the least and the largest integer that any image can lead to, `[C]` in int64."""

    low: Tensor
    high: Tensor
    height: int
    width: int
    timed: bool

    @property
    def channels(self) -> int:
        return len(self.low)

    @property
    def tokens(self) -> int:
        return self.height * self.width

    @property
    def kind(self) -> str:
        """ "bits" (0 and 1), "small" (0 to 255) or "int" (32 bits with a sign)."""
        if len(self.low) == 0 or int(self.low.min()) < 0 or int(self.high.max()) > 255:
            return "int"
        return "bits" if int(self.high.max()) <= 1 else "small"


@dataclass(frozen=True, eq=False)
class Operation:
    """`name` says which part of the network it comes from, `inputs` which values it takes: 0 are the pixels, n is what
    operation n - 1 gives. Tensors are weights."""

    name: str
    inputs: tuple[int, ...]
    arity: ClassVar[int] = 1

    def infer(self, values: Sequence[Value], time_steps: int) -> Value:
        """The shape and interval of what comes out; an error where the inputs do not fit or 32 bits are too few."""
        raise NotImplementedError

    def check(self, fits: bool, what: str) -> None:
        require(fits, f"operation {self.name} ({type(self).__name__}): expected {what}")

    def tensor(self, value: Tensor, what: str, dtype: torch.dtype, *shape: int) -> Tensor:
        """`value` in int64; an error where it is not of this type and shape."""
        self.check(value.dtype == dtype and value.shape == shape, f"{what} {list(shape)} of {dtype}")
        return value.long()

    def within(self, low: Tensor, high: Tensor, most: int = MOST, of: str = "") -> tuple[Tensor, Tensor]:
        """An interval that fits; `of` says more about 32 bits."""
        if len(low) and (int(low.min()) < LEAST or int(high.max()) > most):
            found = f"from {int(low.min())} to {int(high.max())}"
            raise RangeError(
                f"operation {self.name} ({type(self).__name__}): integers could go {found}, beyond 32 bits{of}"
            )
        return low, high

    def same_grid(self, values: Sequence[Value]) -> None:
        same = len({(value.height, value.width) for value in values}) == 1
        self.check(same, "values on one grid")


def _around_zero(value: Value) -> tuple[Tensor, Tensor]:
    """The interval with 0 in it, so that the sum of any part of the terms is bounded too."""
    return value.low.clamp(max=0), value.high.clamp(min=0)


def output_side(side: int, kernel: int, stride: int, padding: int, dilation: int = 1) -> int:
    return (side + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


@dataclass(frozen=True, eq=False)
class Conv(Operation):
    """The exact sum of a convolution: `weight` `[O, I / groups, h, w]` in int8 or int16, `bias` `[O]` in int32. Pixels
    outside are 0, or of `border` `[I]` in uint8: the colour that the network takes for zero."""

    weight: Tensor
    bias: Tensor
    stride: int = 1
    padding: int = 0
    groups: int = 1
    border: Tensor | None = None

    def infer(self, values: Sequence[Value], time_steps: int) -> Value:
        (x,) = values
        self.check(self.weight.dim() == 4 and self.weight.dtype in (torch.int8, torch.int16), "weight of int8 or int16")
        out, each, *kernel = self.weight.shape
        self.check(self.stride >= 1 and self.padding >= 0 and self.groups >= 1, "a stride, padding and groups")
        self.check(out >= 1 and min(kernel) >= 1, "a kernel of at least one weight")
        self.check(each * self.groups == x.channels and out % self.groups == 0, f"{each} x {self.groups} channels")
        bias = self.tensor(self.bias, "bias", torch.int32, out)
        if self.border is not None:
            self.tensor(self.border, "border", torch.uint8, x.channels)
            self.check(x.kind == "small", "pixels where there is a border")
        height, width = (
            output_side(side, k, self.stride, self.padding) for side, k in zip((x.height, x.width), kernel, strict=True)
        )
        self.check(min(height, width) >= 1, f"a grid of at least {kernel}")
        weight = self.weight.long().flatten(2).unflatten(0, (self.groups, -1))
        low, high = (bound.unflatten(0, (self.groups, 1, -1)) for bound in _around_zero(x))
        up, down = weight.clamp(min=0).sum(-1), weight.clamp(max=0).sum(-1)
        most = (up * high + down * low).sum(-1).flatten()
        least = (up * low + down * high).sum(-1).flatten()
        self.within(least + bias.clamp(max=0), most + bias.clamp(min=0))
        return Value(least + bias, most + bias, height, width, x.timed)


@dataclass(frozen=True, eq=False)
class Stencils(Operation):
    """`bias` plus the sum of dilated depth-wise 3x3 convolutions that keep the grid: `weight` `[D, C, 3, 3]` in int16,
    one stencil for each of the `dilations`, zeros outside, `bias` `[C]` in int32."""

    weight: Tensor
    bias: Tensor
    dilations: tuple[int, ...]

    def infer(self, values: Sequence[Value], time_steps: int) -> Value:
        (x,) = values
        self.check(bool(self.dilations) and all(d >= 1 for d in self.dilations), "dilations >= 1")
        weight = self.tensor(self.weight, "weight", torch.int16, len(self.dilations), x.channels, 3, 3)
        bias = self.tensor(self.bias, "bias", torch.int32, x.channels)
        low, high = _around_zero(x)
        up, down = weight.clamp(min=0).sum((0, 2, 3)), weight.clamp(max=0).sum((0, 2, 3))
        most, least = up * high + down * low, up * low + down * high
        self.within(least + bias.clamp(max=0), most + bias.clamp(min=0))
        return Value(least + bias, most + bias, x.height, x.width, x.timed)


@dataclass(frozen=True, eq=False)
class Fire(Operation):
    """A spiking neuron without any rounding. With F = kept_shift * (T - 1), step by step from M = 0:

        M = (M >> kept_shift) + (x << F);  it fires where M >= threshold (`>` if strict);  then M = 0

    No shift drops a bit that is set: what comes in at the first step is shifted F places in all. `threshold` is `[C]`
    in int32. A value that is the same at all steps comes in at every one."""

    threshold: Tensor
    kept_shift: int
    strict: bool

    def fraction_bits(self, time_steps: int) -> int:
        """F."""
        return self.kept_shift * (time_steps - 1)

    def infer(self, values: Sequence[Value], time_steps: int) -> Value:
        (x,) = values
        threshold = self.tensor(self.threshold, "threshold", torch.int32, x.channels)
        bits = self.fraction_bits(time_steps)
        self.check(self.kept_shift >= 0, "kept_shift >= 0")
        taken = f", of which {time_steps} time steps take {bits}"
        if max(bits, self.kept_shift) > 31:
            raise RangeError(f"operation {self.name} (Fire): the membrane is beyond 32 bits{taken}")
        below = threshold if self.strict else threshold - 1  # the largest membrane that does not fire
        low = high = torch.zeros_like(threshold)
        for _ in range(time_steps):
            low, high = (x.low << bits) + (low >> self.kept_shift), (x.high << bits) + (high >> self.kept_shift)
            self.within(low, high, MOST - 1, taken)  # a threshold of MOST is never reached
            low, high = low.clamp(max=0), high.minimum(below).clamp(min=0)
        return Value(torch.zeros_like(low), torch.ones_like(low), x.height, x.width, True)


@dataclass(frozen=True, eq=False)
class Levels(Operation):
    """An integer spike: how many of the channel's `thresholds` `[C, D]` in int32 are at most x."""

    thresholds: Tensor

    def infer(self, values: Sequence[Value], time_steps: int) -> Value:
        (x,) = values
        levels = self.thresholds.shape[1] if self.thresholds.dim() == 2 else 0
        self.check(1 <= levels <= 255, "thresholds [C, D] with D from 1 to 255")
        self.tensor(self.thresholds, "thresholds", torch.int32, x.channels, levels)
        zero = torch.zeros_like(x.low)
        return Value(zero, zero + levels, x.height, x.width, x.timed)


@dataclass(frozen=True, eq=False)
class MaxPool(Operation):
    """The largest of 3x3, with stride 2 and padding 1; what is outside is never the largest."""

    def infer(self, values: Sequence[Value], time_steps: int) -> Value:
        (x,) = values
        return Value(x.low, x.high, output_side(x.height, *POOL), output_side(x.width, *POOL), x.timed)


@dataclass(frozen=True, eq=False)
class Add(Operation):
    """x + y, of one unit."""

    arity: ClassVar[int] = 2

    def infer(self, values: Sequence[Value], time_steps: int) -> Value:
        x, y = values
        self.same_grid(values)
        self.check(x.channels == y.channels, "as many channels in both")
        low, high = self.within(x.low + y.low, x.high + y.high)
        return Value(low, high, x.height, x.width, x.timed or y.timed)


@dataclass(frozen=True, eq=False)
class ScaleAdd(Operation):
    """`multiplier` x + y, with a `multiplier` `[C]` >= 0 in int32."""

    multiplier: Tensor
    arity: ClassVar[int] = 2

    def infer(self, values: Sequence[Value], time_steps: int) -> Value:
        x, y = values
        self.same_grid(values)
        self.check(x.channels == y.channels, "as many channels in both")
        multiplier = self.tensor(self.multiplier, "multiplier", torch.int32, x.channels)
        self.check(bool((multiplier >= 0).all()), "multipliers >= 0")
        low, high = self.within(multiplier * x.low, multiplier * x.high)
        low, high = self.within(low + y.low, high + y.high)
        return Value(low, high, x.height, x.width, x.timed or y.timed)


@dataclass(frozen=True, eq=False)
class Rescale(Operation):
    """`(multiplier x + half) >> shift`, in 64 bits, with half = `(1 << shift) >> 1`, then cut to -`limit` ... `limit`:
    to another unit. `multiplier` >= 0 and `shift` (0 to 62) are `[C]` in int32."""

    multiplier: Tensor
    shift: Tensor
    limit: int = MOST

    def infer(self, values: Sequence[Value], time_steps: int) -> Value:
        (x,) = values
        multiplier = self.tensor(self.multiplier, "multiplier", torch.int32, x.channels)
        shift = self.tensor(self.shift, "shift", torch.int32, x.channels)
        known = bool((multiplier >= 0).all() and (shift >= 0).all() and (shift <= 62).all())
        self.check(known and 1 <= self.limit <= MOST, "multipliers >= 0, shifts from 0 to 62 and a limit >= 1")
        bounds = []
        for bound in (x.low, x.high):
            # Python's integers have no end, and channels are few.
            rows = zip(bound.tolist(), multiplier.tolist(), shift.tolist(), strict=True)
            sums = [(b * m + ((1 << s) >> 1), s) for b, m, s in rows]
            if any(abs(total) >= 2**63 for total, _ in sums):
                raise RangeError(f"operation {self.name} (Rescale): integers could go beyond 64 bits")
            bounds.append(torch.tensor([max(-self.limit, min(self.limit, total >> s)) for total, s in sums]))
        low, high = bounds
        return Value(low, high, x.height, x.width, x.timed)


@dataclass(frozen=True, eq=False)
class Ssa(Operation):
    """sum_j (q_n . k_j) v_j of every head, over all tokens j, or with `causal` over those up to n in raster order. q, k
    and v are its inputs; v may be wider."""

    heads: int
    causal: bool
    arity: ClassVar[int] = 3

    def infer(self, values: Sequence[Value], time_steps: int) -> Value:
        q, k, v = values
        self.same_grid(values)
        self.check(self.heads >= 1 and q.channels == k.channels, "as many channels of q and k")
        self.check(q.channels % self.heads == 0 and v.channels % self.heads == 0, f"channels of {self.heads} heads")
        self.check(all(value.kind != "int" for value in values), "spikes")
        self.check(q.timed == k.timed == v.timed, "all inputs the same at all steps, or none")
        scores = (q.high * k.high).unflatten(0, (self.heads, -1)).sum(1, keepdim=True)
        high = (q.tokens * scores * v.high.unflatten(0, (self.heads, -1))).flatten()
        self.within(torch.zeros_like(high), high)
        return Value(torch.zeros_like(high), high, v.height, v.width, v.timed)


@dataclass(frozen=True, eq=False)
class Gate(Operation):
    """x * y, plus `bias` `[C]` in int32 where there is one. The one with fewer channels has each of them repeated (c,
    c, d, d), and the one with a single token has it everywhere."""

    bias: Tensor | None = None
    arity: ClassVar[int] = 2

    def infer(self, values: Sequence[Value], time_steps: int) -> Value:
        x, y = values
        channels, least = max(x.channels, y.channels), min(x.channels, y.channels)
        self.check(least >= 1 and channels % least == 0, "channels that divide each other")
        grids = {(value.height, value.width) for value in values if value.tokens > 1} or {(1, 1)}
        self.check(len(grids) == 1, "values on one grid, or one token")
        (a, b), (c, d) = (
            [bound.repeat_interleave(channels // len(bound)) for bound in (v.low, v.high)] for v in values
        )
        corners = torch.stack((a * c, a * d, b * c, b * d))
        low, high = self.within(corners.amin(0), corners.amax(0))
        if self.bias is not None:
            bias = self.tensor(self.bias, "bias", torch.int32, channels)
            low, high = self.within(low + bias, high + bias)
        return Value(low, high, *next(iter(grids)), x.timed or y.timed)


@dataclass(frozen=True, eq=False)
class SumTokens(Operation):
    """The sum over all tokens: a grid of 1 x 1."""

    def infer(self, values: Sequence[Value], time_steps: int) -> Value:
        (x,) = values
        low, high = (x.tokens * bound for bound in _around_zero(x))
        self.within(low, high)
        return Value(x.tokens * x.low, x.tokens * x.high, 1, 1, x.timed)


@dataclass(frozen=True, eq=False)
class SumChannels(Operation):
    """The sums over `groups` of neighbouring channels, one channel each."""

    groups: int

    def infer(self, values: Sequence[Value], time_steps: int) -> Value:
        (x,) = values
        self.check(self.groups >= 1 and x.channels % self.groups == 0, f"a multiple of {self.groups} channels")
        low, high = (bound.unflatten(0, (self.groups, -1)).sum(1) for bound in _around_zero(x))
        self.within(low, high)
        return Value(low, high, x.height, x.width, x.timed)


@dataclass(frozen=True, eq=False)
class Dendrites(Operation):
    """Dendrites over the tokens of every time step in raster order, or with `reverse` from the last token to the first.
    A channel has M pairs of numbers (re, im) in 16 bits, which start at 0. With p(a, b) = (a b + 2^14) >> 15, token u:

        re, im = p(re, a) - p(im, b) + (u << shift), p(re, b) + p(im, a)                      a turn
        re, im = p(re, a) + (u << shift), p(im, b) + (u << shift)                             `real`: two decays
        soma   = (sum over M of w re + x im + half) >> out_shift,  half = (1 << out_shift) >> 1

    `coefficient` `[C, M, 2]` holds (a, b), `weight` `[C, M, 2]` holds (w, x), both in int16 and above -2^15; `shift`
    `[C, M]` and `out_shift` `[C]` are in int32. The bounds keep all states and somas within 16 bits."""

    coefficient: Tensor
    shift: Tensor
    weight: Tensor
    out_shift: Tensor
    real: bool
    reverse: bool

    def infer(self, values: Sequence[Value], time_steps: int) -> Value:
        (x,) = values
        self.check(x.kind != "int", "spikes")
        self.check(self.shift.dim() == 2, "shift [C, M]")
        shape = x.channels, self.shift.shape[1]
        coefficient = self.tensor(self.coefficient, "coefficient", torch.int16, *shape, 2)
        weight = self.tensor(self.weight, "weight", torch.int16, *shape, 2)
        shift = self.tensor(self.shift, "shift", torch.int32, *shape)
        out_shift = self.tensor(self.out_shift, "out_shift", torch.int32, x.channels)
        known = min(int(t.min()) for t in (coefficient, weight)) > -(2**15)
        known = known and int(shift.min()) >= 0 and int(shift.max()) <= 15
        self.check(known and int(out_shift.min()) >= 0 and int(out_shift.max()) <= 30, "16-bit modes and shifts")
        states, errors = state_bounds(coefficient, shift, x.high, x.tokens, self.real)
        self.within16(states)
        sums = (weight.abs() * states).sum((1, 2)) + (1 << out_shift)
        self.within(-sums, sums)
        weights = (weight << shift.unsqueeze(-1)).double()
        kernel = (impulse(coefficient, x.tokens, self.real) * weights).sum((2, 3))
        rounding = (weight.abs() * errors).sum((1, 2))
        scale = 0.5 ** out_shift.double()
        high = ((kernel.clamp(min=0).sum(0) * x.high + rounding) * scale + 1).ceil().long()
        low = ((kernel.clamp(max=0).sum(0) * x.high - rounding) * scale - 1).floor().long()
        self.within16(torch.stack((low, high)))
        return Value(low, high, x.height, x.width, x.timed)

    def within16(self, bound: Tensor) -> None:
        if int(bound.abs().max()) > MOST16:
            raise RangeError(f"operation {self.name} (Dendrites): integers could reach {int(bound.abs().max())}")


def impulse(coefficient: Tensor, tokens: int, real: bool) -> Tensor:
    """The states `[N, C, M, 2]` after a single 1, for modes with these coefficients `[C, M, 2]` in units of 2^-15, as
    they would be without rounding."""
    exponent = torch.arange(tokens, dtype=torch.float64).reshape(-1, 1, 1, 1)
    values = coefficient.double() / 2**15
    if real:
        return values**exponent
    number, exponent = torch.view_as_complex(values.contiguous()), exponent.squeeze(-1)
    return torch.view_as_real(torch.polar(number.abs() ** exponent, number.angle() * exponent))


def state_bounds(coefficient: Tensor, shift: Tensor, most: Tensor, tokens: int, real: bool) -> tuple[Tensor, Tensor]:
    """The largest states `[C, M, 2]` of dendrites whose input is from 0 to `most` `[C]`, and how much of them is from
    rounding: a product is off by at most a half, and what it is off by decays like everything else."""
    response = impulse(coefficient, tokens, real).abs()
    modulus = response if real else response.norm(dim=-1, keepdim=True)
    errors = (0.5 if real else math.sqrt(2)) * modulus.sum(0).expand(*coefficient.shape)
    inputs = (most.unsqueeze(1) << shift).unsqueeze(-1)
    return (response.sum(0) * inputs + errors + 1).ceil().long(), errors


@dataclass(frozen=True, eq=False)
class Head(Operation):
    """Logits: `weight` `[classes, C]` in int16 times the sum over tokens and time steps, plus `bias` `[classes]` in
    int32. A value that is the same at all steps counts once."""

    weight: Tensor
    bias: Tensor

    def infer(self, values: Sequence[Value], time_steps: int) -> Value:
        (x,) = values
        classes = self.weight.shape[0]
        self.check(classes >= 1, "at least one class")
        weight = self.tensor(self.weight, "weight", torch.int16, classes, x.channels)
        bias = self.tensor(self.bias, "bias", torch.int32, classes)
        count = x.tokens * (time_steps if x.timed else 1)
        low, high = (count * bound for bound in _around_zero(x))
        self.within(low, high)
        up, down = weight.clamp(min=0), weight.clamp(max=0)
        least, most = (up * low + down * high).sum(1), (up * high + down * low).sum(1)
        self.within(least + bias.clamp(max=0), most + bias.clamp(min=0))
        return Value(least + bias, most + bias, 1, 1, False)


OPERATIONS: dict[str, type[Operation]] = {kind.__name__: kind for kind in Operation.__subclasses__()}


def threshold_for(number: float | Fraction, unit: float | Fraction, strict: bool = False) -> int:
    """The integer m that stands for `number` where 1 stands for `unit`: x >= m (with `strict` x > m) exactly where
    unit * x >= number (>)."""
    exact = Fraction(number) / Fraction(unit)
    return max(LEAST, min(MOST, math.floor(exact) if strict else math.ceil(exact)))


def level_threshold(level: int, unit: float | Fraction) -> int:
    """The least integer x for which unit * x rounds to `level` or more; halves are rounded to even."""
    odd = level % 2 == 1
    return min(MOST, threshold_for(Fraction(2 * level - 1, 2), unit, strict=odd) + odd)
