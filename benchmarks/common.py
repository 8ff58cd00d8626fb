"""What the benchmarks share: the command line, the machine, one way to time, tables and JSON."""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch

import lrfdyn

MODELS = {
    # name: image size, classes, batch for training, batch for inference
    "spikformer_4_384": (32, 100, 256, 256),
    "spikformer_8_512": (224, 1000, 64, 64),
    "spikformer_8_768": (224, 1000, 64, 64),
    "qkformer_10_384": (224, 1000, 32, 64),
    "qkformer_10_512": (224, 1000, 32, 64),
    "sdt_v3_s": (224, 1000, 64, 64),
    "sdt_v3_l": (224, 1000, 64, 64),
}
ATTENTIONS = ("ssa", "lrf_ssa", "lrf_dyn")
ROOT = Path(__file__).parents[1]
MEASURED = ("lrfdyn", "benchmarks")  # what a speed depends on, and no page or record
CHANGED = "+changes"  # ends the revision of a tree that is not as it was committed


def parser(description: str | None) -> argparse.ArgumentParser:
    """The command line of a script, described by its docstring."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def revision(root: Path = ROOT) -> str | None:
    """The last commit that changed what is measured, marked where there are changes that are not committed. None
    without git, unless LRFDYN_REVISION names it."""
    if given := os.environ.get("LRFDYN_REVISION"):
        return given

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=False)
        except OSError:  # no git
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit, changes = (git(*words, "--", *MEASURED) for words in (("log", "-1", "--format=%H"), ("status", "--short")))
    return f"{commit}{CHANGED if changes else ''}" if commit else None


_revision = cache(revision)  # of the code that was imported, whatever is done to the files later


def about() -> dict[str, Any]:
    """Command, machine, versions and revision, kept with every record. Of a folder elsewhere the command has the name
    alone."""
    from lrfdyn.analysis.measure.inference import machine

    script = Path(sys.argv[0])
    words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    command = shlex.join(["python", f"{script.parent.name}/{script.name}", *words])
    versions = {"lrfdyn": lrfdyn.__version__, "python": platform.python_version(), "torch": torch.__version__}
    for name in ("triton", "spikingjelly"):
        try:
            module = __import__(name)
            versions[name] = getattr(module, "__version__", None) or importlib.metadata.version(name)
        except (ImportError, importlib.metadata.PackageNotFoundError):
            versions[name] = None
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    where = {"gpu": gpu, "cpu": machine()["cpu"]}
    return {"command": command, "machine": where, "versions": versions, "revision": _revision()}


def now() -> float:
    """Seconds of a clock, once the GPU has done what it was told."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


@contextmanager
def attempt(what: str) -> Iterator[None]:
    """What fails is told and left behind: one that fails must not take the others with it."""
    try:
        yield
    except Exception as error:
        traceback.print_exc(limit=3)
        print(f"{what}: failed: {type(error).__name__}: {error}", flush=True)


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


def captured(function: Callable[[], Any], calls: int = 1) -> Callable[[], Any]:
    """A captured graph of so many calls of `function`, as the function that replays it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            function()
    return graph.replay


def drive(
    description: str | None, measure: Callable[..., dict[str, Any] | None], implementations: Sequence[str]
) -> None:
    """The command line of a benchmark: `measure(model, attention, implementation, batch, repeats)` for all of them."""
    command_line = parser(description)
    add = command_line.add_argument
    add("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    add("--attentions", nargs="+", default=list(ATTENTIONS))
    add("--implementations", nargs="+", default=list(implementations), choices=implementations)
    add("--batch", type=int)
    add("--repeats", type=int, default=20)
    add("--json", help="file for the records")
    options = command_line.parse_args()
    torch.backends.cudnn.benchmark = True
    records: list[dict[str, Any]] = []
    for name, attention, implementation in product(options.models, options.attentions, options.implementations):
        torch.compiler.reset()
        with attempt(f"{name} {attention} {implementation}"):
            record = measure(name, attention, implementation, options.batch, options.repeats)
            if record is not None:
                records.append(record)
                print(name, attention, implementation, f"{record['images_per_s']:.0f} images/s", flush=True)
                write(records, options.json)
    print(table(records, ("model", "attention", "implementation", "batch", "images_per_s", "peak_mib", "ms")))


def free_memory() -> None:
    gc.collect()  # a captured step and its model hold each other
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_mib() -> float | None:
    return torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else None


def peer(name: str, classes: int, time_steps: int = 4) -> torch.nn.Module | None:
    """SpikingJelly's own network of that size, if it has one."""
    from spikingjelly.activation_based.model import qkformer, spikformer

    if name == "spikformer_4_384":
        return spikformer.spikformer_cifar10(T=time_steps, num_classes=classes)
    if name == "spikformer_8_512":
        return spikformer.Spikformer(T=time_steps, num_classes=classes, embed_dims=512, num_heads=8, depths=8)
    if name == "qkformer_10_512":
        # As many heads in every stage as ours.
        return qkformer.QKFormer(T=time_steps, num_classes=classes, embed_dims=512, num_heads=(8, 8, 8))
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
    """Records that were read from a file keep the machine and versions that they came with."""
    if path:
        complete = [r if "machine" in r else {**r, **about()} for r in records]
        Path(path).write_text(json.dumps(complete, indent=1) + "\n")
