"""Inference memory: what must be stored, term by term, and what a run really allocates."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from lrfdyn.attention import Attention
from lrfdyn.errors import require


def attention_state(model: nn.Module) -> list[dict[str, Any]]:
    """The terms of one attention layer and time step, for one image: of the layer that holds most."""
    layers = [module.state_terms() for module in model.modules() if isinstance(module, Attention)]
    require(len(layers) > 0, f"model: expected one with attention layers, got {type(model).__name__}")
    largest = max(layers, key=lambda terms: sum(term.bytes for term in terms))
    return [
        {"name": term.name, "formula": term.formula, "elements": term.elements, "bytes": term.bytes} for term in largest
    ]


def peak_allocation(run: Callable[[], object], device: torch.device | None = None) -> int:
    """The most bytes of tensors that `run` holds at one time beyond what was there before."""
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with _quiet_stderr(), profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as recorded:
        run()
    recording: Any = recorded.profiler and recorded.profiler.kineto_results
    events = [event for event in recording.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


@contextmanager
def _quiet_stderr() -> Iterator[None]:
    """Keeps the profiler's own start and stop lines, which it writes past Python, off the terminal."""
    saved = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(saved, 2)
            os.close(saved)


def inference_peak(model: nn.Module, images: Tensor) -> int:
    """Peak bytes of activations in one evaluation pass over `images`."""
    model.eval()

    def run() -> None:
        with torch.inference_mode():
            model(images)

    run()  # one-time allocations of the library stay out of the figure
    return peak_allocation(run, images.device)
