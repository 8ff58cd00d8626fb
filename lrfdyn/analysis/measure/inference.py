"""What inference takes: the memory that must be held, term by term, the memory that a run really allocates, plain and
compiled for low memory, by layer and in total, and time, on this machine."""

from __future__ import annotations

import ctypes
import math
import os
import platform
import time
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.profiler import profile, record_function

from lrfdyn.attention import Attention
from lrfdyn.attention.base import require_grid
from lrfdyn.attention.row_stream import BUFFERS
from lrfdyn.checks import checked
from lrfdyn.deploy import LowMemoryModel, StreamingAttention, compile_for_inference
from lrfdyn.devices import device_name
from lrfdyn.errors import require
from lrfdyn.files import discard_stderr
from lrfdyn.models import SpikingModel
from lrfdyn.ops.dispatch import plain_operations

SPAN = "memory span: "
Terms = list[dict[str, Any]]


def layer_states(model: nn.Module, buffers: str = BUFFERS[0]) -> dict[str, Terms]:
    """The terms of every attention layer that says what it holds, for one image and time step. `buffers` is what
    LRF-Dyn holds of rows (see `RowStream`)."""
    attentions = {name: module for name, module in model.named_modules() if isinstance(module, Attention)}
    require(bool(attentions), f"model: expected one with attention layers, got {type(model).__name__}")
    held: Any = {"buffers": buffers}
    layers = {name: module.state_terms(**(held if module.streams else {})) for name, module in attentions.items()}
    keys = ("name", "formula", "elements", "bytes")
    return {
        name: [{key: getattr(term, key) for key in keys} for term in terms]
        for name, terms in layers.items()
        if terms is not None
    }


def state_notes(model: nn.Module) -> list[str]:
    """A line for every kind of attention in `model` that does not say what it holds."""
    layers = [module for module in model.modules() if isinstance(module, Attention) and module.state_terms() is None]
    return list(dict.fromkeys(layer.missing("what it holds at inference (state_terms)") for layer in layers))


@checked
def attention_state(model: nn.Module, buffers: str = BUFFERS[0]) -> Terms:
    """Return the terms of the attention layer that holds most, for one image and time step."""
    return largest_state(layer_states(model, buffers))


def largest_state(layers: dict[str, Terms]) -> Terms:
    """Return the terms of the layer that holds most."""
    return max(layers.values(), key=lambda terms: sum(term["bytes"] for term in terms), default=[])


def held_state_bytes(model: nn.Module, buffers: str = BUFFERS[0]) -> int | None:
    """Bytes that the largest layer that streams really allocates for one image and time step."""

    def allocated(layer: Attention) -> int:
        device, make = next(layer.parameters()).device, partial(layer.row_stream, buffers=buffers)
        if device.type != "cuda":
            return peak_allocation(make, device)
        before = torch.cuda.memory_stats(device)["requested_bytes.all.current"]
        _stream = make()  # as asked for: the allocator rounds every tensor up to 512 bytes
        return torch.cuda.memory_stats(device)["requested_bytes.all.current"] - before

    return max((allocated(m) for m in model.modules() if isinstance(m, Attention) and m.streams), default=None)


def peak_allocation(run: Callable[[], object], device: torch.device | None = None) -> int:
    """Measure the most bytes of tensors that `run` holds at one time beyond what was there before."""
    return span_peaks(lambda span: span("run")(run)(), device or torch.device("cpu"))["run"]


def span_peaks(run: Callable[[Callable[[str], Any]], object], device: torch.device) -> dict[str, int]:
    """Measure the most bytes that every part of `run(span)` holds beyond what was there when it began. `span(name)`
    goes around a part, as context or decorator; parts must not overlap."""
    peaks: defaultdict[str, int] = defaultdict(int)

    @contextmanager
    def cuda_span(name: str) -> Iterator[None]:
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield
        peaks[name] = max(peaks[name], torch.cuda.max_memory_allocated(device) - before)

    if device.type == "cuda":
        run(cuda_span)
        return peaks
    # The profiler of torch.profiler also makes an object of every event, which takes longer than the run itself.
    with discard_stderr(), profile(profile_memory=True, use_kineto=True) as made:
        run(lambda name: record_function(f"{SPAN}{name}"))
    recording: Any = made.kineto_results
    events = sorted(recording.events(), key=lambda event: event.start_ns())
    changes = [event for event in events if event.name() == "[memory]"]  # allocations and releases
    times = [event.start_ns() for event in changes]
    held = [0, *(max(size, 0) for size in accumulate(event.nbytes() for event in changes))]  # before and after each
    for event in events:
        if event.name().startswith(SPAN):
            name, start, end = event.name()[len(SPAN) :], event.start_ns(), event.start_ns() + event.duration_ns()
            first, last = bisect_left(times, start), bisect_right(times, end)
            peaks[name] = max(peaks[name], max(held[first : last + 1]) - held[first])
    return peaks


def resident_growth(run: Callable[[], object]) -> int | None:
    """Measure how far the resident set of this process grows while `run` runs; None where the system does not tell."""

    def status_bytes(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))

    try:
        ctypes.CDLL(None).malloc_trim(0)  # what was freed before must not be used again unseen
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before = status_bytes("VmRSS")
    except (OSError, AttributeError):
        return None
    run()
    return max(status_bytes("VmHWM") - before, 0)


@checked
def inference_peak(model: nn.Module, images: Tensor) -> int:
    """Measure the peak bytes of activations in one evaluation pass over `images` `[B, C, H, W]`."""
    model.eval()
    with torch.inference_mode():
        model(images)  # one-time allocations of the library stay out of the figure
        return peak_allocation(lambda: model(images), images.device)


@checked
def attention_peak(
    attention: Attention, grid: Sequence[int], time_steps: int = 4, batch: int = 1, streaming: bool = False
) -> int:
    """Measure the peak bytes that one attention layer allocates at inference beyond its input `[T, B, dim, H, W]`, on a
    grid of H rows and W columns of tokens: q, k and v, what mixes them, and the output. With `streaming`, row by row
    (`StreamingAttention`, for kinds that can), with the state that this takes."""
    for argument, value in {"time_steps": time_steps, "batch": batch}.items():
        require(value >= 1, f"{argument}: expected an integer >= 1, got {value}")
    require_grid(cast(Any, grid))
    like, was_training = next(attention.parameters()), attention.training
    spikes = torch.randint(2, (time_steps, batch, *grid, attention.dim), device=like.device, dtype=like.dtype)
    x = spikes.permute(0, 1, 4, 2, 3)  # in channels-last memory, as in a network

    def make() -> nn.Module:
        return StreamingAttention(attention) if streaming else attention

    try:
        attention.eval()
        with plain_operations(), torch.inference_mode():
            make()(x)  # one-time allocations of the library stay out of the figure
            layer = make()
            return peak_allocation(lambda: layer(x), x.device)
    finally:
        attention.train(was_training)


def profile_attention(
    model: SpikingModel, title: str, sizes: Sequence[int], batches: Sequence[int], device: torch.device
) -> list[dict[str, Any]]:
    """Measure one attention layer of `model`, its first, on the grids of images of several sizes, in every form that it
    has: "parallel", and where the kind can "streaming". Returns a record each, as plain values."""
    model = model.to(device).eval()
    layer = next((module for module in model.modules() if isinstance(module, Attention)), None)
    require(layer is not None, f"model: expected one with attention layers, got {type(model).__name__}")
    assert layer is not None
    least, own, rows = model.smallest_image, model.input_size[1], layer.grid[0]
    for size in sizes:
        require(size >= least, f"sizes: {title} takes images of at least {least} pixels a side, got {size}")
    strides = (info.stride for info in model.feature_info if -(-own // info.stride) == rows)
    stride = next(strides, own / rows)
    records = []
    for size in sizes:
        height = width = math.ceil(size / stride)
        terms = layer.state_terms((height, width))
        for batch in batches:
            for form in ("parallel", "streaming")[: 2 if layer.streams else 1]:
                peak = attention_peak(layer, (height, width), model.time_steps, batch, form == "streaming")
                records.append({
                    "model": title, "attention": layer.kind, "form": form, "device": device_name(device),
                    "time_steps": model.time_steps, "batch": batch, "image_size": size, "grid": [height, width],
                    "peak_bytes": peak, "state_bytes": None if terms is None else sum(term.bytes for term in terms),
                })  # fmt: skip
    return records


def images_per_second(model: nn.Module, images: Tensor) -> float:
    """Return the speed of the fastest of seven evaluation passes over `images`; fewer where they take a second."""
    model.eval()
    spent: list[float] = []
    with torch.inference_mode():
        model(images)
        while len(spent) < 7 and math.fsum(spent) < 1:
            spent.append(seconds_of(lambda: model(images), images.device))
    return images.shape[-4] / min(spent)


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """Time one call. Report the fastest of several: other work on the machine only ever slows one down."""
    wait = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    run()
    wait()
    return time.perf_counter() - start


def machine(device: torch.device | None = None) -> dict[str, Any]:
    """Return the machine and the software that a measurement is made on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        cpu = platform.processor() or platform.machine()
    software = {"python": platform.python_version(), "torch": torch.__version__}
    gpu = {"gpu": torch.cuda.get_device_name(device)} if device is not None and device.type == "cuda" else {}
    return {"cpu": cpu, "cores": os.cpu_count(), "threads": torch.get_num_threads(), **software, **gpu}


def profile_model(
    model: SpikingModel, title: str, batches: Sequence[int], device: torch.device, *, repeats: int = 3
) -> dict[str, Any]:
    """Return the derived terms of every attention layer and the measured peaks of both implementations for every batch
    size, as plain values. The model is moved to `device` and into evaluation mode."""
    model = model.to(device).eval().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    states = layer_states(model)
    runs = []
    for batch in batches:
        images = torch.randn(batch, *model.input_size, device=device)
        runs += [measure_inference(name, model, images, repeats) for name in ("eager", "low-memory")]
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


def measure_inference(implementation: str, model: SpikingModel, images: Tensor, repeats: int = 3) -> dict[str, Any]:
    """Measure peak, in all and of every layer, resident growth (on a CPU) and latency of `implementation`, "eager"
    (plain operations) or "low-memory", on images `[B, C, H, W]`. The peak of a compiled model is that of its first
    call, which allocates its buffers and, on a GPU, captures. What a process allocates once is left out."""
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
        layers = span_peaks(partial(_by_layer, network, images), device)
    return {
        "implementation": implementation,
        "batch": images.shape[0],
        "peak_bytes": peak,
        "resident_bytes": resident,
        "latency_ms": latency,
        "layers": layers,
    }


def _by_layer(network: Any, images: Tensor, span: Callable[[str], Any]) -> None:
    """Call a network with its layers as parts."""
    if isinstance(network, LowMemoryModel):
        network.span, network.graph = span, False
        network(images)
        return
    named = dict(network.named_modules())
    layers = {part.name: named[part.name].__dict__ for part in network.sections() if part.name in named}
    try:
        for name, own in layers.items():
            own["forward"] = span(name)(named[name].forward)
        network(images)
    finally:
        for own in layers.values():
            own.pop("forward", None)
