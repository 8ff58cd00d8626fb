"""What the C engine does for an integer model: maps in one piece of memory, and calls of its kernels.

Sums that only one operation takes are never stored. A stage computes those of a pixel term by term, a convolution and
what is added to it or multiplied with it, and they go straight into the neuron.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import singledispatchmethod
from typing import Any

import torch
from torch import Tensor

from lrfdyn.deploy.integer import operations as ops
from lrfdyn.deploy.integer.operations import MOST16, Operation, Value
from lrfdyn.deploy.integer.program import IntegerModel
from lrfdyn.errors import require

LANES = 16  # output channels of weights are padded to a multiple of these
SPARE = 64  # places behind lists of events
BLOCK = 256  # channels that a byte tells apart
MOST_STEPS = 8  # a byte holds the spikes of all steps
MOST_TAPS = 64
ALIGNMENT = 64
TermsOf = Callable[[int], "list[Term]"]  # those of an input
SUMS = (ops.Conv, ops.Stencils, ops.Add, ops.ScaleAdd, ops.Rescale, ops.Gate)  # what stages compute


def padded(count: int, to: int = LANES) -> int:
    return -(-count // to) * to


def with_lanes(rows: Tensor) -> Tensor:
    """With zeros behind its last axis."""
    return torch.nn.functional.pad(rows, (0, padded(rows.shape[-1]) - rows.shape[-1]))


@dataclass(frozen=True)
class Map:
    """A value in memory: `kind` is SPIKES, INT16, INT32 or PIXELS, `planes` those of counts."""

    kind: str
    planes: int
    height: int
    width: int
    channels: int
    steps: int

    @property
    def bytes(self) -> int:
        each = {"SPIKES": self.planes, "INT16": 2 * self.steps, "INT32": 4 * self.steps, "PIXELS": 0}[self.kind]
        return self.height * self.width * self.channels * each


@dataclass(frozen=True, eq=False)
class Term:
    """A `lrfdyn_term`: what it does with the map of value `source`, and the weights that it takes."""

    kind: str
    source: int | None = None
    weight: Tensor | None = None
    extra: Tensor | None = None
    border: Tensor | None = None
    kernel: tuple[int, int] = (1, 1)
    stride: int = 1
    padding: int = 0
    dilation: int = 1
    groups: int = 1
    limit: int = 0


@dataclass(frozen=True, eq=False)
class Call:
    """One kernel: the values that it reads, the one that it gives, and how many bytes it needs meanwhile."""

    name: str
    operation: Operation
    reads: tuple[int, ...]
    gives: int
    scratch: int
    terms: tuple[Term, ...] = ()


@dataclass
class Plan:
    """The `maps` of the values that are stored, `calls` in order, and the `offsets` of both in `arena` bytes."""

    maps: dict[int, Map]
    calls: list[Call]
    offsets: dict[int, int] = field(default_factory=dict)
    arena: int = 0

    @property
    def thread_bytes(self) -> int:
        """What a further thread takes: the most that any call needs meanwhile."""
        return max(padded(call.scratch, ALIGNMENT) for call in self.calls)


def map_of(value: Value, steps: int, pixels: bool = False) -> Map:
    most, steps = int(value.high.max()), steps if value.timed else 1
    shape = (value.height, value.width, value.channels, steps)
    if pixels:
        return Map("PIXELS", 1, *shape)
    if value.kind != "int":
        return Map("SPIKES", max(most.bit_length(), 1), *shape)
    small = max(most, -int(value.low.min()) - 1) <= MOST16
    return Map("INT16" if small else "INT32", 1, *shape)


class Planner:
    """Turns the operations of a model into calls."""

    def __init__(self, model: IntegerModel) -> None:
        steps = model.time_steps
        require(steps <= MOST_STEPS, f"model: the C engine holds at most {MOST_STEPS} time steps, got {steps}")
        self.model, self.calls = model, list[Call]()
        self.all_maps = [map_of(value, steps, pixels=i == 0) for i, value in enumerate(model.values)]
        self.users: list[list[int]] = [[] for _ in model.values]
        for n, operation in enumerate(model.operations):
            for i in operation.inputs:
                self.users[i].append(n)

    def plan(self) -> Plan:
        inlined = self.inlined()
        for n, operation in enumerate(self.model.operations):
            if n + 1 not in inlined:
                self.calls.append(self.call(operation, n + 1, inlined))
        used = {0} | {i for call in self.calls for i in (*call.reads, call.gives)}
        plan = Plan({i: self.all_maps[i] for i in sorted(used)}, self.calls)
        place(plan)
        return plan

    # Which sums are part of the stage of whoever takes them.

    def inlined(self) -> set[int]:
        found: set[int] = set()
        for n, operation in enumerate(self.model.operations):
            if isinstance(operation, (*SUMS, ops.Fire, ops.Levels)) and not self.adds_spikes(n + 1):
                found |= set(self.inlined_inputs(operation, n + 1, found))
        return found

    def adds_spikes(self, value: int) -> bool:
        """Whether a value is the sum of two stored counts of spikes, which have a kernel of their own."""
        operation = self.model.operations[value - 1]
        maps = [self.all_maps[i].kind for i in (*operation.inputs, value)]
        return isinstance(operation, ops.Add) and maps == ["SPIKES"] * 3

    def is_sum(self, value: int, grid: Map) -> bool:
        """Whether a value can be computed in the stage of the only one that takes it."""
        producer = self.model.operations[value - 1] if value else None
        fits = (self.all_maps[value].height, self.all_maps[value].width, self.all_maps[value].channels)
        alone = isinstance(producer, SUMS) and len(self.users[value]) == 1 and not self.adds_spikes(value)
        return alone and fits == (grid.height, grid.width, grid.channels)

    def inlined_inputs(self, operation: Operation, value: int, before: set[int]) -> list[int]:
        """The inputs of an operation that its stage computes: the first that can be, and of a weighted sum also a
        convolution that is added last."""
        if isinstance(operation, ops.Conv | ops.Stencils):
            return []
        own = self.all_maps[value]
        can = [i for i in operation.inputs if self.is_sum(i, own)]
        if isinstance(operation, ops.ScaleAdd):
            x, y = operation.inputs
            late = y in can and isinstance(self.model.operations[y - 1], ops.Stencils)
            return [i for i in can if i == x or late]
        return can[:1]

    # Terms.

    def terms(self, value: int, inlined: set[int]) -> list[Term]:
        """How the sums of a value are computed."""
        operation = self.model.operations[value - 1]
        return self.sum_terms(operation, lambda i: self.terms(i, inlined) if i in inlined else [Term("ADD", i)])

    @singledispatchmethod
    def sum_terms(self, operation: Operation, of: TermsOf) -> list[Term]:
        raise NotImplementedError(type(operation).__name__)

    @sum_terms.register(ops.Fire)
    @sum_terms.register(ops.Levels)
    def _(self, operation: Operation, of: TermsOf) -> list[Term]:
        return of(operation.inputs[0])

    @sum_terms.register
    def _(self, operation: ops.Conv, of: TermsOf) -> list[Term]:
        source = operation.inputs[0]
        return [convolution(operation, source, self.all_maps[source], self.model.values[source])]

    @sum_terms.register
    def _(self, operation: ops.Stencils, of: TermsOf) -> list[Term]:
        terms = []
        for i, (weight, dilation) in enumerate(zip(operation.weight, operation.dilations, strict=True)):
            taps = weight.flatten(1).T
            extra = operation.bias if i == 0 else None
            term = Term("STENCIL", operation.inputs[0], taps, extra, kernel=(3, 3), padding=dilation, dilation=dilation)
            terms.append(term)
        return terms

    @sum_terms.register
    def _(self, operation: ops.Add, of: TermsOf) -> list[Term]:
        first, second = sorted(map(of, operation.inputs), key=_is_stored)
        return [*first, *second]

    @sum_terms.register
    def _(self, operation: ops.ScaleAdd, of: TermsOf) -> list[Term]:
        x, y = map(of, operation.inputs)
        return [*x, Term("MULTIPLY", None, operation.multiplier), *y]

    @sum_terms.register
    def _(self, operation: ops.Rescale, of: TermsOf) -> list[Term]:
        scale = Term("RESCALE", None, operation.multiplier, operation.shift, limit=operation.limit)
        return [*of(operation.inputs[0]), scale]

    @sum_terms.register
    def _(self, operation: ops.Gate, of: TermsOf) -> list[Term]:
        first, (second,) = sorted(map(of, operation.inputs), key=_is_stored)
        return [*first, replace(second, kind="TIMES", extra=operation.bias)]

    # Calls.

    def call(self, operation: Operation, value: int, inlined: set[int]) -> Call:
        maps = [self.all_maps[i] for i in operation.inputs]
        width = sum(m.channels for m in maps)
        out = self.all_maps[value]
        if self.adds_spikes(value):
            return Call("add_spikes", operation, operation.inputs, value, 0)
        if isinstance(operation, (*SUMS, ops.Fire, ops.Levels)):
            terms = self.terms(value, inlined)
            reads = tuple(dict.fromkeys(t.source for t in terms if t.source is not None))
            return Call("stage", operation, reads, value, self.stage_scratch(terms, out), tuple(terms))
        if isinstance(operation, ops.MaxPool):
            return Call("max_pool", operation, operation.inputs, value, 8 * width)
        if isinstance(operation, ops.SumTokens | ops.SumChannels):
            return Call("sum", operation, operation.inputs, value, 4 * (width + out.channels))
        if isinstance(operation, ops.Ssa):
            keys, values = (m.channels // operation.heads for m in maps[1:])
            state = (2 if out.kind == "INT16" else 4) * out.steps * (keys + 1) * values
            return Call("ssa", operation, operation.inputs, value, 4 * (maps[2].channels + keys) + state)
        if isinstance(operation, ops.Dendrites):
            return Call("dendrites", operation, operation.inputs, value, width * (6 + 4 * operation.shift.shape[1]))
        if isinstance(operation, ops.Head):
            return Call("head", operation, operation.inputs, value, 8 * width)
        raise NotImplementedError(type(operation).__name__)

    def stage_scratch(self, terms: Sequence[Term], out: Map) -> int:
        """As `lrfdyn_run_stage` divides it up."""
        maps = [self.all_maps[t.source] for t in terms if t.source is not None]
        width = padded(out.channels)
        rows = [
            self.all_maps[t.source].channels * (t.kernel[0] * t.kernel[1] if t.kind == "DENSE" else 1)
            for t in terms
            if t.source is not None
        ]
        parts = [4 * max([width, *rows]), 4 * width * max([1, *(m.steps for m in maps)])]
        for term in terms:
            if term.kind == "CONV":
                assert term.source is not None
                m = self.all_maps[term.source]
                groups = m.planes * -(-m.steps // 4)
                held = (term.kernel[0] - 1) * term.dilation + 1
                parts += [
                    2 * held * (m.width * groups * m.channels + SPARE),
                    2 * held * m.width * (2 ** min(m.steps, 4) * groups + 1),
                    2 * (term.kernel[0] * term.kernel[1] * m.channels + -(-m.channels // BLOCK) * SPARE),
                    8 * width,
                ]
        return sum(padded(part, ALIGNMENT) for part in parts)


def _is_stored(terms: Sequence[Term]) -> bool:
    return len(terms) == 1 and terms[0].kind == "ADD"


def convolution(operation: ops.Conv, source: int, taken: Map, value: Value) -> Term:
    """Event by event for spikes, channel by channel where each has its own, and plainly otherwise."""
    weight, (out, each, *kernel) = operation.weight, operation.weight.shape
    shape: dict[str, Any] = {"kernel": tuple(kernel), "stride": operation.stride, "padding": operation.padding}
    taps = kernel[0] * kernel[1]
    if operation.groups == taken.channels == out > 1 and operation.border is None:
        rows = weight.flatten(1).T.short()
        return Term("STENCIL", source, rows, operation.bias, **shape)
    rows = weight.permute(2, 3, 1, 0).reshape(taps * each, out)
    rows = with_lanes(rows)
    lists = taken.planes * -(-taken.steps // 4) * taken.channels
    few = taps <= MOST_TAPS and max(taps * taken.channels, lists) < 2**16
    events = taken.kind == "SPIKES" and operation.groups == 1 and weight.dtype == torch.int8 and few
    if not events:
        return Term("DENSE", source, rows, operation.bias, operation.border, groups=operation.groups, **shape)
    limit = events_in_16_bits(weight.flatten(1).long(), value.high.long().repeat_interleave(taps))
    return Term("CONV", source, rows, operation.bias, limit=limit, **shape)


def events_in_16_bits(weight: Tensor, most: Tensor) -> int:
    """How many spikes, of which input i of weights `[out, in]` has at most `most[i]`, never add up to more than 16 bits
    hold: the worst are those of the largest weights of a sign."""
    limit = 2**24  # all of them
    for rows in (weight, -weight):
        rows, order = rows.clamp(min=0).sort(1, descending=True)
        sums = (rows * most[order]).cumsum(1)
        for o in (sums[:, -1] > MOST16).nonzero().flatten().tolist():
            over = int((sums[o] <= MOST16).sum())  # the first weight that is too much
            before, left = int(most[order[o, :over]].sum()), MOST16 - (int(sums[o, over - 1]) if over else 0)
            limit = min(limit, before + left // int(rows[o, over]))
    return limit


def place(plan: Plan) -> None:
    """Gives every stored value and what a call needs meanwhile its place: those whose lifetimes overlap do not, and the
    largest are placed first."""
    lives: dict[int, tuple[int, int]] = {}
    sizes: dict[int, int] = {}
    for n, call in enumerate(plan.calls):
        for i in (call.gives, *call.reads):
            lives[i] = (lives.get(i, (n, n))[0], n)
        sizes[call.gives] = 0 if isinstance(call.operation, ops.Head) else plan.maps[call.gives].bytes
        lives[scratch_of(n)], sizes[scratch_of(n)] = (n, n), call.scratch
    places: dict[int, tuple[int, int]] = {}
    for i in sorted(sizes, key=lambda i: -sizes[i]):
        born, dies = lives[i]
        near = sorted(places[j] for j in places if lives[j][0] <= dies and born <= lives[j][1])
        offset, size = 0, padded(sizes[i], ALIGNMENT)
        for start, end in near:
            if start - offset >= size:
                break
            offset = max(offset, end)
        places[i] = (offset, offset + size)
    plan.offsets = {i: start for i, (start, _) in places.items()}
    plan.arena = max(end for _, end in places.values())


def scratch_of(call: int) -> int:
    """The key of what a call needs meanwhile among the places of values."""
    return -1 - call
