"""What the benchmarks share: the machine they ran on, one way to time, tables and JSON."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import lrfdyn

MODELS = {
    # name: image size, classes, batch for training, batch for inference
    "spikformer_4_384": (32, 100, 256, 256),
    "spikformer_8_512": (224, 1000, 64, 64),
    "qkformer_10_512": (224, 1000, 32, 64),
    "sdt_v3_s": (224, 1000, 64, 64),
}
ATTENTIONS = ("ssa", "lrf_ssa", "lrf_dyn")


def about() -> dict[str, Any]:
    """Machine and versions, kept with every record."""
    versions = {"lrfdyn": lrfdyn.__version__, "python": platform.python_version(), "torch": torch.__version__}
    for name in ("triton", "spikingjelly"):
        try:
            module = __import__(name)
            versions[name] = getattr(module, "__version__", None) or importlib.metadata.version(name)
        except (ImportError, importlib.metadata.PackageNotFoundError):
            versions[name] = None
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"machine": {"gpu": gpu, "cpu": platform.machine()}, "versions": versions}


def elapsed(step: Callable[[], Any], repeats: int, warm_up: int = 3) -> float:
    """Milliseconds per call, over `repeats` calls without a pause."""
    for _ in range(warm_up):
        step()
    if not torch.cuda.is_available():
        start = time.perf_counter()
        for _ in range(repeats):
            step()
        return (time.perf_counter() - start) * 1e3 / repeats
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(repeats):
        step()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats


def free_memory() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_mib() -> float | None:
    return torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else None


def peer(name: str, classes: int, time_steps: int = 4) -> torch.nn.Module | None:
    """SpikingJelly's own network of that size, if it has one."""
    from spikingjelly.activation_based.model import spikformer

    if name == "spikformer_4_384":
        return spikformer.spikformer_cifar10(T=time_steps, num_classes=classes)
    if name == "spikformer_8_512":
        return spikformer.Spikformer(T=time_steps, num_classes=classes, embed_dims=512, num_heads=8, depths=8)
    return None


def table(records: Sequence[dict[str, Any]], columns: Sequence[str]) -> str:
    def text(value: Any) -> str:
        return "" if value is None else f"{value:.4g}" if isinstance(value, float) and value < 100 else (
            f"{value:,.0f}" if isinstance(value, (int, float)) else str(value)
        )  # fmt: skip

    rows = [list(columns), *([text(r.get(c)) for c in columns] for r in records)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def write(records: Sequence[dict[str, Any]], path: str | None) -> None:
    if path:
        Path(path).write_text(json.dumps([{**r, **about()} for r in records], indent=1) + "\n")
