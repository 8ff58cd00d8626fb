"""Memory of one model: derived and measured, plain and compiled for low memory, by layer and in total."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lrfdyn.analysis.measure.memory import SpanPeaks, layer_states, peak_allocation, resident_growth, state_notes
from lrfdyn.analysis.measure.model import seconds_of
from lrfdyn.attention import Attention
from lrfdyn.attention.row_stream import BUFFERS, RowStream
from lrfdyn.deploy import compile_for_inference
from lrfdyn.devices import device_name
from lrfdyn.models import SpikingModel
from lrfdyn.ops.dispatch import plain_operations

IMPLEMENTATIONS = ("eager", "low-memory")


def held_state_bytes(model: SpikingModel, buffers: str = BUFFERS[0]) -> int | None:
    """Bytes that the largest layer that streams really allocates for one image and time step."""
    layers = [m for m in model.modules() if isinstance(m, Attention) and m.streams]
    return max((_allocated_by(layer, buffers) for layer in layers), default=None)


def _allocated_by(layer: Attention, buffers: str) -> int:
    device = next(layer.parameters()).device
    made: list[RowStream] = []
    if device.type == "cuda":  # as asked for: the allocator rounds every tensor up to 512 bytes
        before = torch.cuda.memory_stats(device)["requested_bytes.all.current"]
        made.append(layer.row_stream(buffers=buffers))
        return torch.cuda.memory_stats(device)["requested_bytes.all.current"] - before
    return peak_allocation(lambda: made.append(layer.row_stream(buffers=buffers)), device)


def profile_model(
    model: SpikingModel,
    title: str,
    batches: Sequence[int],
    device: torch.device,
    *,
    repeats: int = 3,
    by_layer: bool = True,
) -> dict[str, Any]:
    """Return the derived terms of every attention layer and the measured peaks of both implementations for every batch
    size of `batches`, as plain values. The model is moved to `device` and into evaluation mode."""
    model = model.to(device).eval().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    states = layer_states(model)
    runs = []
    for batch in batches:
        images = torch.randn(batch, *model.input_size, device=device)
        runs += [measure_inference(name, model, images, repeats, by_layer) for name in IMPLEMENTATIONS]
    return {
        "model": title,
        "attention": model.config["attention"],
        "device": device_name(device),
        "time_steps": model.time_steps,
        "layers": states,
        "state_bytes": sum(term["bytes"] for terms in states.values() for term in terms) if states else None,
        "held_state_bytes": held_state_bytes(model),
        "notes": state_notes(model),
        "runs": runs,
    }


def measure_inference(
    implementation: str, model: SpikingModel, images: Tensor, repeats: int = 3, by_layer: bool = False
) -> dict[str, Any]:
    """Measure peak, resident growth (on a CPU) and latency of `implementation`, "eager" (plain operations) or
    "low-memory", on images `[B, C, H, W]`, and with `by_layer` the peak of every layer.

    The peak of a compiled model is that of its first call, which allocates its buffers and, on a GPU, captures. What
    libraries allocate once in a process is left out, as are weights and images.
    """
    device, eager = images.device, implementation == "eager"
    build: Callable[[], Any] = (lambda: model) if eager else partial(compile_for_inference, model)
    with plain_operations() if eager else nullcontext(), torch.inference_mode():
        if device.type == "cuda" or eager:
            build()(images)
        network = build()
        resident = resident_growth(lambda: network(images)) if device.type == "cpu" else None
        network = build()
        peak = peak_allocation(lambda: network(images), device)
        latency = 1e3 * min(seconds_of(lambda: network(images), device) for _ in range(repeats))
        layers = _layer_peaks(eager, network, images) if by_layer else {}
    return {
        "implementation": implementation,
        "batch": images.shape[0],
        "peak_bytes": peak,
        "resident_bytes": resident,
        "latency_ms": latency,
        "layers": layers,
    }


def _layer_peaks(eager: bool, network: Any, images: Tensor) -> dict[str, int]:
    spans = SpanPeaks(images.device)
    if eager:
        named = dict(network.named_modules())
        parts = {part.name: named[part.name] for part in network.sections() if part.name in named}
        with spans.around(parts):
            return spans.measure(lambda: network(images))
    network.span, graph, network.graph = spans.span, network.graph, False
    try:
        return spans.measure(lambda: network(images))
    finally:
        network.span, network.graph = nullcontext, graph
