"""Inference memory: what must be stored, term by term, and what a run really allocates."""

from __future__ import annotations

import ctypes
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from lrfdyn.attention import Attention
from lrfdyn.attention.row_stream import BUFFERS
from lrfdyn.errors import require
from lrfdyn.files import discard_stderr

SPAN = "memory span: "


def layer_states(model: nn.Module, buffers: str = BUFFERS[0]) -> dict[str, list[dict[str, Any]]]:
    """The terms of every attention layer that says what it holds, for one image and time step. `buffers` is what
    LRF-Dyn holds of rows (see `RowStream`)."""
    attentions = {name: module for name, module in model.named_modules() if isinstance(module, Attention)}
    require(bool(attentions), f"model: expected one with attention layers, got {type(model).__name__}")
    held: Any = {"buffers": buffers}
    layers = {name: module.state_terms(**(held if module.streams else {})) for name, module in attentions.items()}
    return {
        name: [
            {"name": term.name, "formula": term.formula, "elements": term.elements, "bytes": term.bytes}
            for term in terms
        ]
        for name, terms in layers.items()
        if terms is not None
    }


def state_notes(model: nn.Module) -> list[str]:
    """A line for every kind of attention in `model` that does not say what it holds."""
    layers = [module for module in model.modules() if isinstance(module, Attention) and module.state_terms() is None]
    return list(dict.fromkeys(layer.missing("what it holds at inference (state_terms)") for layer in layers))


def attention_state(model: nn.Module, buffers: str = BUFFERS[0]) -> list[dict[str, Any]]:
    """Return the terms of the attention layer that holds most, for one image and time step."""
    return largest_state(layer_states(model, buffers))


def largest_state(layers: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the terms of the layer that holds most."""
    return max(layers.values(), key=lambda terms: sum(term["bytes"] for term in terms), default=[])


def peak_allocation(run: Callable[[], object], device: torch.device | None = None) -> int:
    """Measure the most bytes of tensors that `run` holds at one time beyond what was there before."""
    spans = SpanPeaks(device or torch.device("cpu"))

    def whole() -> None:
        with spans.span("run"):
            run()

    return spans.measure(whole)["run"]


class SpanPeaks:
    """Peaks of named parts of a run: `span(name)` goes around a part, `measure(run)` gives bytes by name.

    A part's bytes are the most that it holds beyond what was there when it began. Parts must not overlap.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.peaks: dict[str, int] = {}

    def span(self, name: str) -> AbstractContextManager[object]:
        return self._cuda_span(name) if self.device.type == "cuda" else record_function(f"{SPAN}{name}")

    @contextmanager
    def _cuda_span(self, name: str) -> Iterator[None]:
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        yield
        self._note(name, torch.cuda.max_memory_allocated(self.device) - before)

    def _note(self, name: str, peak: int) -> None:
        self.peaks[name] = max(self.peaks.get(name, 0), peak)

    def around(self, modules: dict[str, nn.Module]) -> AbstractContextManager[object]:
        """While it is open, every call of these modules is a part."""
        stack = ExitStack()
        for name, module in modules.items():
            open_spans: list[AbstractContextManager[object]] = []

            def enter(_module: nn.Module, _args: Any, name: str = name, spans: list[Any] = open_spans) -> None:
                spans.append(self.span(name))
                spans[-1].__enter__()

            def leave(_module: nn.Module, _args: Any, _out: Any, spans: list[Any] = open_spans) -> None:
                spans.pop().__exit__(None, None, None)

            stack.callback(module.register_forward_pre_hook(enter).remove)
            stack.callback(module.register_forward_hook(leave).remove)
        return stack

    def measure(self, run: Callable[[], object]) -> dict[str, int]:
        """Return the largest peak of every part of `run` in bytes."""
        self.peaks = {}
        if self.device.type == "cuda":
            run()
            return self.peaks
        with discard_stderr(), profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as made:
            run()
        recording: Any = made.profiler and made.profiler.kineto_results
        events = sorted(recording.events(), key=lambda event: event.start_ns())
        changes = [event for event in events if event.name() == "[memory]"]  # allocations and releases
        times = [event.start_ns() for event in changes]
        held = [0, *(max(size, 0) for size in accumulate(event.nbytes() for event in changes))]  # before and after each
        for event in events:
            if event.name().startswith(SPAN):
                start, end = event.start_ns(), event.start_ns() + event.duration_ns()
                first, last = bisect_left(times, start), bisect_right(times, end)
                self._note(event.name().removeprefix(SPAN), max(held[first : last + 1]) - held[first])
        return self.peaks


def resident_growth(run: Callable[[], object]) -> int | None:
    """Measure how far the resident set of this process grows while `run` runs; None where the system does not tell."""
    try:
        ctypes.CDLL(None).malloc_trim(0)  # what was freed before must not be used again unseen
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before = _status_bytes("VmRSS")
    except (OSError, AttributeError):
        return None
    run()
    return max(_status_bytes("VmHWM") - before, 0)


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def inference_peak(model: nn.Module, images: Tensor) -> int:
    """Measure the peak bytes of activations in one evaluation pass over `images` `[B, C, H, W]`."""
    model.eval()

    def run() -> None:
        with torch.inference_mode():
            model(images)

    run()  # one-time allocations of the library stay out of the figure
    return peak_allocation(run, images.device)
