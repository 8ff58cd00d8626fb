"""Which block sizes a launch takes: those that follow from the machine, or those that were measured on it.

A launch offers several, the first of which follows from the machine (`machine.py`). Only what cannot change a bit of a
result is offered: how elements, channels or images that meet in no sum are divided among programs, and how many lanes
a program has. What decides the order of a sum is a function of the shape and the machine, and never offered.

Nothing is measured unless asked for: inside `measured()`, which is what `lrfdyn tune` does, every launch of a kind that
is not known yet tries all that it offers, drops what gives other bits than the first, and the fastest is kept in a file
of this machine. Later processes read it when they first launch a kernel. So no training run measures, no two runs take
different sizes because of a noisy clock, and a CUDA graph is never captured while something is measured.

`triton.autotune` is not used: it measures at the first launch of a kind, in the middle of a step or of a capture, on
the arguments themselves, which a kernel that works in place then destroys; it does not look at results, and its cache
knows the architecture, but not which GPU of it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from lrfdyn.ops import tuning_file
from lrfdyn.ops.machine import Machine, machine_of

Options = Mapping[str, int]
Grid = Callable[[Options], tuple[int, ...]]
Timer = Callable[[Callable[[], None]], float]  # milliseconds of a call

# Faster than the first by less than this is within the spread of measurements.
GAIN = 0.02
# What a compiler says of sizes that a machine has no room for. Triton 3.2, which PyTorch 2.6 brings, has no error of
# its own where ptxas fails.
_PTXAS_ERROR = getattr(triton.runtime.errors, "PTXASError", RuntimeError)
REFUSED = (triton.runtime.OutOfResources, triton.CompilationError, _PTXAS_ERROR)


class Kind(NamedTuple):
    """What was measured of one kind of launch."""

    key: str
    options: dict[str, int]
    ms: float
    first_ms: float
    tried: int
    other_bits: int  # how many were dropped because their results were not the same


@cache
def _choices(machine: Machine, lanes: tuple[int, ...], names: tuple[str, ...], *values: tuple[int, ...]) -> Any:
    warps = tuple(dict.fromkeys(map(machine.warps, lanes)))
    sizes = (dict(zip(names, some, strict=True)) for some in product(*map(dict.fromkeys, values)))
    return tuple({**some, "num_warps": count} for some in sizes for count in warps)


def choices(device: torch.device, lanes: tuple[int, ...], **sizes: tuple[int, ...]) -> Sequence[Options]:
    """All combinations of these sizes and numbers of lanes; the first ones together are what is taken unmeasured."""
    return _choices(machine_of(device), lanes, tuple(sizes), *sizes.values())


def kind_of(kernel: Any, grid: Grid, offered: Sequence[Options], args: Sequence[Any], constants: Options) -> str:
    """The kind of a launch: types and constants as they are, sizes and the number of programs by powers of two. What is
    offered belongs to it, since it may end where the shape does."""
    parts = [f"{kernel.fn.__module__.partition('.')[2]}.{kernel.fn.__name__}"]
    for arg in args:
        if isinstance(arg, Tensor):
            parts.append(str(arg.dtype).removeprefix("torch."))
        elif not isinstance(arg, float):
            parts.append("-" if arg is None else f"2^{int(arg).bit_length()}")
    parts += [f"{name}={value!r}" for name, value in (*constants.items(), *offered[0].items())]
    return " ".join([*parts, f"programs=2^{math.prod(grid(offered[0])).bit_length()}"])


def launch_tuned(kernel: Any, grid: Grid, offered: Sequence[Options], *args: Any, **constants: Any) -> None:
    """Launches `kernel` with one of the options `offered`, on the grid that belongs to it."""
    options = taken(kernel, grid, offered, args, constants)
    kernel[grid(options)](*args, **constants, **options)


def taken(
    kernel: Any, grid: Grid, offered: Sequence[Options], args: Sequence[Any], constants: dict[str, Any]
) -> Options:
    """What was measured for this kind of launch on this machine, if it was, else the first that is offered."""
    machine = machine_of(args[0].device)
    known = tuning_file.read(machine)
    if not known and _session is None:
        return offered[0]
    key = kind_of(kernel, grid, offered, args, constants)
    if _session is not None and not _capturing():
        return _session.options(machine, key, kernel, grid, offered, args, constants)
    found = known.get(key)
    # Of a file that somebody changed nothing is taken that was not offered.
    return found if found is not None and found in offered else offered[0]


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class _Session:
    """The kinds of launches that were met, each measured once."""

    def __init__(self, timer: Timer, again: bool) -> None:
        self.timer, self.again = timer, again
        self.found: dict[Machine, dict[str, Kind]] = {}
        self.lock = threading.Lock()  # a backward pass runs in a thread of its own

    def options(
        self, machine: Machine, key: str, kernel: Any, grid: Grid, offered: Sequence[Options], args: Sequence[Any],
        constants: dict[str, Any],
    ) -> Options:  # fmt: skip
        known = None if self.again else tuning_file.read(machine).get(key)
        if known is not None and known in offered:
            return known
        with self.lock:
            kinds = self.found.setdefault(machine, {})
            if key not in kinds:
                kinds[key] = fastest(key, kernel, grid, offered, args, constants, self.timer)
            return kinds[key].options


def _copies(args: Sequence[Any]) -> tuple[list[Any], list[Tensor]]:
    """The arguments in memory of their own, and that memory as bytes. Tensors that shared memory still do, and gaps
    between their elements are there too."""
    memory: dict[int, torch.UntypedStorage] = {}
    out = []
    for arg in args:
        if isinstance(arg, Tensor):
            storage = arg.untyped_storage()
            own = memory.setdefault(storage.data_ptr(), storage.clone())
            arg = arg.new_empty(0).set_(own, arg.storage_offset(), arg.shape, arg.stride())
        out.append(arg)
    some = next(arg for arg in args if isinstance(arg, Tensor))
    return out, [torch.empty(0, dtype=torch.uint8, device=some.device).set_(own) for own in memory.values()]


def fastest(
    key: str, kernel: Any, grid: Grid, offered: Sequence[Options], args: Sequence[Any], constants: dict[str, Any],
    timer: Timer,
) -> Kind:  # fmt: skip
    """Tries all options on copies of the arguments. Whatever gives other bits than the first one is dropped, and the
    first one stays where nothing is clearly faster."""
    times: list[tuple[float, Options]] = []
    expected: list[Tensor] = []
    other_bits = 0
    for options in offered:
        given, memory = _copies(args)
        call = kernel[grid(options)]
        try:
            call(*given, **constants, **options)
        except REFUSED:
            if not times:
                raise
            continue
        if not expected:
            expected = memory = [each.clone() for each in memory]
        if not all(map(torch.equal, memory, expected)):
            other_bits += 1
            continue
        times.append((timer(lambda: call(*given, **constants, **options)), options))  # noqa: B023, called at once
    best, first = min(times, key=lambda pair: pair[0]), times[0]
    best = best if best[0] < (1 - GAIN) * first[0] else first
    return Kind(key, dict(best[1]), best[0], first[0], len(offered), other_bits)


def device_timer(call: Callable[[], None]) -> float:
    """The median of several calls, each with a cold cache."""
    from triton.testing import do_bench

    return do_bench(call, warmup=10, rep=50, return_mode="median")


_session: _Session | None = None


@contextmanager
def measured(timer: Timer | None = None, again: bool = False) -> Iterator[dict[Machine, dict[str, Kind]]]:
    """Inside, kinds of launches that were never measured on this machine (`again`: all) are, and the fastest options of
    each are kept for later processes. Memory for the arguments of a launch is needed three times.

    Gives what was measured. Launches of all threads are; one context at a time.
    """
    global _session
    if _session is not None:
        raise RuntimeError("measured: another one is open")
    _session = session = _Session(timer or device_timer, again)
    try:
        yield session.found
    finally:
        _session = None
        for machine, kinds in session.found.items():
            tuning_file.add(machine, {key: kind.options for key, kind in kinds.items()})
