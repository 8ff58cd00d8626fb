"""One image at a time on a CPU: the C of an integer model against other runtimes, in one run.

    python benchmarks/edge.py --models RUN ... spikformer_8_512:lrf_dyn sdt_v3_s:lrf_dyn --data-root DIR \
        --json results/performance/edge_cpu.json

Every runtime and number of threads has a process of its own, which is bound to as many cores. `ms` is wall time: each
of --timed images is shown in turn for --seconds, and the least time of each image enters the mean; `median_ms` is over
all calls. All runtimes are timed in turn, --rounds times, and the best round of each counts: a processor that others
share does not always run as fast, and what is measured minutes apart cannot be compared.

`ram_kib` is memory besides weights: of the C engine, the static memory that was planned for so many threads; of the
others, how far the first two images raised the peak of resident memory above what was resident once the model was
loaded, pages of files left out. `file_mib` is the file that is shipped: for C the compiled library, for PyTorch its
weights.

`top1` is over --images test images, spread evenly, once for all numbers of threads. `bit_exact` says whether all logits
are the same bits as those of the definition: for what runs in integers the integer model, for the others PyTorch in
float32 on one core, of which itself it is not said. The runtimes:

- onnxruntime float32, executorch float32: the files of `lrfdyn export`; ExecuTorch only of the first model, if it is
  trained, and on one core, as it takes long
- onnxruntime int8: the float file, convolutions quantised by ONNX Runtime (QDQ, weights per channel, calibrated on test
  images); openvino int8 is the same file
- onnxruntime integer: the file of `lrfdyn export --integer`
- openvino float32, and openvino bfloat16, which it takes by itself where the processor has it
- pytorch float32: eager, norms folded
- lrfdyn C: the integer model as C, compiled here; with more than one thread by a compiler with OpenMP

A package that is not installed is said and left out. Names of models stand for random weights with the norms'
statistics of random images; they see random pictures and have no top1. `firing_rate` is the share of 1 among all spikes
of the integer model on the timed images.

Beside the file of --json, NAME_firing.json gets the time of the first model, if it is trained, at other firing rates,
for which all of its thresholds are multiplied by a factor, and NAME_layers.json where the time of the C goes, kernel by
kernel. Files are written after every model; what they hold of other models is kept.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import json
import logging
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import common
from lrfdyn.analysis.measure.observe import load_images
from lrfdyn.convert.fold import fold_batch_norm
from lrfdyn.data.preprocess import Preprocessing
from lrfdyn.deploy import IntegerModel, NativeModel, export_model, load_integer, quantize, write_c, write_integer_onnx
from lrfdyn.deploy.c.native import OPTIONS, SOURCES, build_library, find_compiler
from lrfdyn.deploy.c.plan import Planner
from lrfdyn.deploy.c.write import WrittenC
from lrfdyn.deploy.export.formats import INPUT, ExecutorchRunner
from lrfdyn.deploy.export.write import settle_norms
from lrfdyn.deploy.integer.operations import MOST, Fire, Levels
from lrfdyn.deploy.integer.program import random_pictures
from lrfdyn.errors import LrfdynError, require
from lrfdyn.models import SpikingModel
from lrfdyn.sources import find_source

Call = Callable[[np.ndarray], np.ndarray]  # logits [1, classes] of one image
COLUMNS = ("model", "attention", "runtime", "threads", "ms", "median_ms", "ram_kib", "file_mib", "top1", "bit_exact")
FACTORS = (0.25, 0.5, 1.0, 1.5, 2.5)  # of thresholds
CALIBRATION = 16
PROFILE = """#include <stdint.h>
#include <time.h>

uint64_t profile_ns[{count}];
static uint64_t profile_last;

static void profile_mark(int n) {{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    uint64_t ns = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
    if (n >= 0) profile_ns[n] += ns - profile_last;
    profile_last = ns;
}}

"""
KERNEL = re.compile(r"^    (lrfdyn_\w+\(.*\);) /\* .* \*/$", re.M)


# What a runtime is, in a process of its own.


def run_onnx(path: Path, threads: int) -> Call:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda image: session.run(None, {INPUT: image})[0]


def run_openvino(path: Path, threads: int, precision: str) -> Call:
    import openvino

    core = openvino.Core()
    network = core.read_model(str(path))
    network.reshape([1, *list(network.inputs[0].partial_shape)[1:]])
    settings = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": precision}
    compiled = core.compile_model(network, "CPU", settings)
    return lambda image: compiled(image)[0]


def run_torch(path: Path, threads: int) -> Call:
    torch.set_num_threads(threads)
    model = torch.load(path, weights_only=False)

    def call(image: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            return model(torch.from_numpy(image)).numpy()

    return call


@dataclass(frozen=True)
class Runtime:
    """A package, the file that it runs in the folder of a model, and whether that is in integers."""

    package: str
    file: str
    load: Callable[[Path, int], Call]
    integer: bool = False
    most_threads: int = 2


TORCH = "pytorch float32"
RUNTIMES = {
    TORCH: Runtime("torch", "model.pt", run_torch),
    "onnxruntime float32": Runtime("onnxruntime", "float.onnx", run_onnx),
    "onnxruntime int8": Runtime("onnxruntime", "int8.onnx", run_onnx),
    "onnxruntime integer": Runtime("onnxruntime", "integer.onnx", run_onnx, integer=True),
    "openvino float32": Runtime("openvino", "float.onnx", partial(run_openvino, precision="f32")),
    "openvino bfloat16": Runtime("openvino", "float.onnx", partial(run_openvino, precision="bf16")),
    "openvino int8": Runtime("openvino", "int8.onnx", partial(run_openvino, precision="f32")),
    "executorch float32": Runtime(
        "executorch", "model.pte", lambda path, threads: ExecutorchRunner(path), most_threads=1
    ),
    "lrfdyn C": Runtime("lrfdyn", "model.c", lambda path, threads: NativeModel(path, OPTIONS, threads), integer=True),
}


def per_image(call: Call, images: np.ndarray, seconds: float) -> tuple[float, float]:
    """Milliseconds of a call: the mean over `images` of the least time of each, and the median of all calls."""
    times: list[list[float]] = [[] for _ in images]
    end = time.perf_counter() + seconds
    while len(times[0]) < 2 or time.perf_counter() < end:
        for image, own in zip(images, times, strict=True):
            start = time.perf_counter()
            call(image[None])
            own.append((time.perf_counter() - start) * 1e3)
    return statistics.mean(map(min, times)), statistics.median(chain(*times))


def resident() -> dict[str, int]:
    """KiB of this process by the names of Linux: VmRSS, VmHWM (their peak), RssFile."""
    text = Path("/proc/self/status").read_text()
    return {name: int(size) for name, size in re.findall(r"^(VmRSS|VmHWM|RssFile):\s+(\d+) kB", text, re.M)}


def peak_kib(work: Callable[[], Any]) -> int | None:
    """How far `work` raised resident memory, pages of files left out; None where the system does not tell."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = resident()
    except (OSError, AttributeError):
        work()
        return None
    work()
    after = resident()
    return max(after["VmHWM"] - before["VmRSS"] - max(after["RssFile"] - before["RssFile"], 0), 0)


def measure(name: str, folder: Path, threads: int, timed: int, seconds: float, all_images: bool) -> dict[str, Any]:
    """Measures a runtime in this process; its logits go into a file in `folder`."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    torch.set_num_threads(threads)
    runtime = RUNTIMES[name]
    images = np.load(folder / ("levels.npy" if runtime.integer else "images.npy"))
    with torch.inference_mode():
        call = runtime.load(folder / runtime.file, threads)
    ram = peak_kib(lambda: [call(image[None]) for image in images[:2]])
    best, median = per_image(call, images[:timed], seconds)
    shown = images if all_images else images[:timed]
    np.save(folder / f"{name} {threads}.npy", np.concatenate([call(image[None]) for image in shown]))
    return {"ms": best, "median_ms": median, "ram_kib": ram}


# The files of a model, and what they are compared with.


def quantize_float(source: Path, out: Path, images: np.ndarray) -> None:
    """ONNX Runtime's own quantisation of the convolutions of a file."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.left = iter(images)

        def get_next(self) -> dict[str, np.ndarray] | None:  # type: ignore[override]
            image = next(self.left, None)
            return None if image is None else {INPUT: image[None]}

    kinds: Any = {"weight_type": QuantType.QInt8, "activation_type": QuantType.QUInt8}
    how: Any = {"quant_format": QuantFormat.QDQ, "op_types_to_quantize": ["Conv"], "per_channel": True, **kinds}
    logging.disable(logging.WARNING)
    quantize_static(str(source), str(out), Reader(), **how)
    logging.disable(logging.NOTSET)


def write_files(model: SpikingModel, integer: IntegerModel, folder: Path, levels: Tensor, files: set[str]) -> WrittenC:
    """Writes `files` of a model, and the images as they take them. Returns the folder of C."""
    preprocessing = Preprocessing.from_dict(integer.facts["preprocessing"], "model")
    mean, std = (torch.tensor(v).reshape(-1, 1, 1) for v in (preprocessing.mean, preprocessing.std))
    images = ((levels / 255 - mean) / std).numpy()
    np.save(folder / "levels.npy", levels.numpy())
    np.save(folder / "images.npy", images)
    torch.save(fold_batch_norm(model), folder / "model.pt")
    integer.save(folder / "integer.safetensors")
    if files & {"float.onnx", "int8.onnx"}:
        export_model(model, folder / "float.onnx", random_images=1)
    if "int8.onnx" in files:
        quantize_float(folder / "float.onnx", folder / "int8.onnx", images[:CALIBRATION])
    if "integer.onnx" in files:
        write_integer_onnx(integer, folder / "integer.onnx", levels[:1])
    if "model.pte" in files:
        export_model(model, folder / "model.pte", random_images=1, most_images=1)
    return write_c(integer, folder / "model.c", levels[:1])


def firing_rate(model: IntegerModel, images: Tensor) -> float:
    """The share of what all neurons send on `images` in the most that they can."""
    kinds = {n + 1: operation for n, operation in enumerate(model.operations) if isinstance(operation, (Fire, Levels))}
    *sent, _ = model.run(images, keep=list(kinds))
    most = [op.thresholds.shape[1] if isinstance(op, Levels) else 1 for op in kinds.values()]
    return sum(int(x.sum()) for x in sent) / sum(x.numel() * m for x, m in zip(sent, most, strict=True))


def version(package: str) -> str:
    """Of a package; of our own C, the compiler and its options."""
    if package != "lrfdyn":
        return importlib.metadata.version(package)
    said = subprocess.run([str(find_compiler()), "--version"], capture_output=True, text=True).stdout
    return " ".join([said.partition("\n")[0], *OPTIONS])


def file_bytes(path: Path, threads: int) -> int:
    return (build_library(path, OPTIONS, threads) if path.is_dir() else path).stat().st_size


def compare(folder: Path, name: str, threads: int, definition: np.ndarray) -> bool | None:
    """Whether the logits of a process are those of the definition."""
    torch_path = folder / f"{TORCH} 1.npy"
    if not RUNTIMES[name].integer and ((name, threads) == (TORCH, 1) or not torch_path.is_file()):
        return None
    expected, found = definition if RUNTIMES[name].integer else np.load(torch_path), logits_of(folder, name, threads)
    count = min(len(found), len(expected))
    return bool(np.array_equal(found[:count], expected[:count]))


def logits_of(folder: Path, name: str, threads: int) -> np.ndarray:
    return np.load(folder / f"{name} {threads}.npy")


def measure_model(source: str, names: Sequence[str], folder: Path, options: Any) -> list[dict[str, Any]]:
    """All of the runtimes `names` on one model."""
    found, started = find_source(source), time.perf_counter()
    model = found.load().float().eval()
    if not found.trained:
        settle_norms(model)
    integer = quantize(model, weights=found.origin if found.trained else "random weights")
    levels, labels = pictures(integer, options, found.trained)
    written = write_files(model, integer, folder, levels, {RUNTIMES[name].file for name in names})
    definition = integer(levels).numpy()
    rate = firing_rate(integer, levels[: options.timed])
    facts = {"benchmark": "edge", "model": integer.facts["model"], "attention": integer.facts["attention"]}
    shown = {name: [n for n in options.threads if n <= RUNTIMES[name].most_threads] for name in names}
    most = {name: min(counts) if name == TORCH else max(counts) for name, counts in shown.items() if counts}
    rows = []
    each = [(name, n) for name, counts in shown.items() for n in counts]
    times = [{key: quick(*key, folder, options) for key in each} for _ in range(options.rounds - 1)]
    for name, threads in each:
        with common.attempt(f"{source} {name} {threads}"):
            record = in_own_process(name, folder, threads, options, threads == most[name])
            record |= min([record, *(found[name, threads] for found in times)], key=lambda found: found["ms"])
            path = folder / RUNTIMES[name].file
            record |= {"file_mib": file_bytes(path, threads) / 2**20, "threads": threads}
            record["runtime_version"] = version(RUNTIMES[name].package)
            if path.is_dir():
                record["ram_kib"] = (written.memory_bytes + (threads - 1) * written.thread_bytes) / 1024
            rows.append({**facts, "runtime": name, **record})
            print(
                f"{time.perf_counter() - started:4.0f} s",
                common.table(rows[-1:], COLUMNS[:-2]).splitlines()[-1],
                flush=True,
            )
    for row in rows:
        name, threads = row["runtime"], row["threads"]
        row["bit_exact"] = compare(folder, name, threads, definition)
        right = None if labels is None else logits_of(folder, name, most[name]).argmax(1) == labels
        row["top1"] = None if right is None else 100 * float(right.mean())
        row |= {"images": None if labels is None else len(labels), "image_size": integer.shape[1]}
        row |= {
            "trained": found.trained,
            "firing_rate": rate,
            "timed_images": min(options.timed, len(levels)),
            "batch": 1,
        }
    return rows


def pictures(integer: IntegerModel, options: Any, trained: bool) -> tuple[Tensor, np.ndarray | None]:
    """Levels of test images and their labels, or of random pictures."""
    if not trained:
        return random_pictures(integer), None
    shown = load_images(options.data, options.data_root, options.images, options.images, torch.device("cpu"))
    assert shown.preprocessing is not None
    return torch.from_numpy(shown.preprocessing.levels(shown.batches[0].numpy())), shown.labels[0].numpy()


def in_own_process(name: str, folder: Path, threads: int, options: Any, everything: bool) -> dict[str, Any]:
    given = [name, str(folder), str(threads), str(options.timed), str(options.seconds), str(int(everything))]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, str(Path(__file__).resolve()), "--process", *given]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    require(done.returncode == 0, f"runtime: {name} ended with {done.stderr.strip()[-300:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def quick(name: str, threads: int, folder: Path, options: Any) -> dict[str, float]:
    """The times of a row in another round."""
    try:
        record = in_own_process(name, folder, threads, options, everything=False)
    except LrfdynError:  # which the last round tells
        return {"ms": math.inf}
    return {key: record[key] for key in ("ms", "median_ms")}


# Time against firing, and where it goes.


def with_thresholds(model: IntegerModel, factor: float) -> IntegerModel:
    """The model with all thresholds multiplied by `factor`, rounded."""

    def scaled(threshold: Tensor) -> Tensor:
        return (threshold.double() * factor).round().clamp(-MOST, MOST).int()

    operations = [
        replace(op, threshold=scaled(op.threshold))
        if isinstance(op, Fire)
        else replace(op, thresholds=scaled(op.thresholds))
        if isinstance(op, Levels)
        else op
        for op in model.operations
    ]
    return IntegerModel(model.shape, model.time_steps, model.scale, operations, model.facts)


def firing(folder: Path, facts: dict[str, Any], timed: int, seconds: float) -> list[dict[str, Any]]:
    """The time of the C at other firing rates, and that of the same integers in ONNX Runtime, on one core."""
    model, images = load_integer(folder / "integer.safetensors"), np.load(folder / "levels.npy")[:timed]
    records = []
    for factor in FACTORS:
        other, place = with_thresholds(model, factor), folder / f"firing_{factor}.c"
        shown = torch.from_numpy(images)
        write_c(other, place, shown[:1])
        record = {**facts, "threshold_factor": factor, "firing_rate": firing_rate(other, shown)}
        native = NativeModel(place, OPTIONS)
        record["ms"], record["median_ms"] = per_image(native, images, seconds)
        record["bit_exact"] = bool(np.array_equal(native(images), other(shown).numpy()))
        if importlib.util.find_spec("onnxruntime"):
            path = write_integer_onnx(other, place / "integer.onnx", shown[:1])
            record["onnxruntime_integer_ms"] = per_image(run_onnx(path, 1), images, seconds)[0]
        records.append(record)
        print(common.table([record], ("threshold_factor", "firing_rate", "ms")).splitlines()[-1], flush=True)
    return records


def layers(folder: Path, facts: dict[str, Any], timed: int, seconds: float) -> list[dict[str, Any]]:
    """Milliseconds of every call of a kernel in the C, which a clock between the calls tells."""
    model, images = load_integer(folder / "integer.safetensors"), np.load(folder / "levels.npy")[:timed]
    calls, place = Planner(model).plan().calls, folder / "layers.c"
    write_c(model, place, torch.from_numpy(images[:1]))
    source = place / SOURCES[0]
    numbers = iter(range(len(calls)))
    text, found = KERNEL.subn(lambda line: f"    {line[1]} profile_mark({next(numbers)});", source.read_text())
    require(found == len(calls), f"layers: {found} calls of kernels in {SOURCES[0]}, expected {len(calls)}")
    text = text.replace("    map_0.data = ", "    profile_mark(-1);\n    map_0.data = ")
    source.write_text(PROFILE.format(count=found) + text)
    described = place / "lrfdyn.json"
    described.write_text(json.dumps(json.loads(described.read_text()) | {"sha256": {}}))  # of the source without clocks
    native = NativeModel(place, [*OPTIONS, "-D_POSIX_C_SOURCE=199309L"])
    totals = (ctypes.c_uint64 * found).in_dll(native._library, "profile_ns")
    native(images)  # warms up
    best = np.full((len(images), found), np.inf)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or not np.isfinite(best).all():
        for image, own in zip(images, best, strict=True):
            ctypes.memset(totals, 0, ctypes.sizeof(totals))
            native(image[None])
            np.minimum(own, np.array(totals) / 1e6, out=own)
    means = best.mean(0).tolist()
    return [
        {**facts, "operation": call.operation.name, "kernel": call.name, "ms": ms, "share": ms / sum(means)}
        for call, ms in zip(calls, means, strict=True)
    ]


def main(argv: Sequence[str] | None = None) -> None:
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == ["--process"]:
        name, folder, threads, timed, seconds, everything = given[1:]
        record = measure(name, Path(folder), int(threads), int(timed), float(seconds), everything == "1")
        print(json.dumps(record))
        return
    parser = common.parser(__doc__)
    add = parser.add_argument
    add("--models", nargs="+", default=["spikformer_4_384:lrf_dyn"], help="runs, files of weights, or NAME:ATTENTION")
    add("--runtimes", nargs="+", default=list(RUNTIMES), choices=list(RUNTIMES))
    add("--threads", nargs="+", type=int, default=[1, 2])
    add("--data", default="cifar100", help="of the trained models")
    add("--data-root", type=Path)
    add("--images", type=int, default=100, help="test images of top1 and bit_exact")
    add("--timed", type=int, default=5, help="images that are timed")
    add("--seconds", type=float, default=2.0, help="of timing, for each row and round")
    add("--rounds", type=int, default=3)
    add("--json", type=Path, help="file for the records")
    options = parser.parse_args(given)
    for package in dict.fromkeys(RUNTIMES[name].package for name in options.runtimes):
        if importlib.util.find_spec(package) is None:
            print(f"{package}: left out, it is not installed", flush=True)
            options.runtimes = [name for name in options.runtimes if RUNTIMES[name].package != package]
    cores = os.sched_getaffinity(0)
    require(max(options.threads) <= len(cores), f"threads: there are {len(cores)} cores, got {max(options.threads)}")
    records: list[dict[str, Any]] = []
    details: dict[str, list[dict[str, Any]]] = {"firing": [], "layers": []}
    for i, source in enumerate(options.models):
        with common.attempt(source), tempfile.TemporaryDirectory() as place:
            first = i == 0 and find_source(source).trained
            names = [name for name in options.runtimes if first or RUNTIMES[name].package != "executorch"]
            rows = measure_model(source, names, Path(place), options)
            records += rows
            save(records, options.json)
            facts = {key: rows[0][key] for key in ("model", "attention", "trained", "image_size")}
            os.sched_setaffinity(0, {min(cores)})
            details["layers"] += layers(Path(place), facts, options.timed, options.seconds)
            if first:
                details["firing"] += firing(Path(place), facts, options.timed, options.seconds)
            os.sched_setaffinity(0, cores)
            for name, found in details.items():
                save(found, options.json and options.json.with_stem(f"{options.json.stem}_{name}"))
    print(common.table(records, (*COLUMNS, "firing_rate")))
    if not records or any(row["bit_exact"] is False for row in records if RUNTIMES[row["runtime"]].integer):
        raise LrfdynError("bit_exact: a runtime gives other integers than the definition, or none ran")


def save(records: list[dict[str, Any]], path: Path | None) -> None:
    """Writes the records, and those of other models that the file has."""
    if path is not None:
        known = json.loads(path.read_text()) if path.is_file() else []
        models = [model_of(record) for record in records]
        common.write([*(record for record in known if model_of(record) not in models), *records], str(path))


def model_of(record: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(record[key] for key in ("model", "attention", "image_size"))


if __name__ == "__main__":
    main()
