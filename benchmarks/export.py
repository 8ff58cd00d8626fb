"""Exported files against eager PyTorch on one core of a CPU: size, latency of one image, agreement.

    python benchmarks/export.py --images photos/ --json results/performance/export_cpu.json
    python benchmarks/export.py --matrix --json results/performance/export_matrix.json
    python benchmarks/export.py --runs RUN ... --data-root DIR --json results/performance/export_runs.json

Weights are random, with the norms' statistics of random images so that the neurons fire. Latencies are the time
that the one core worked, which other programs on the machine do not lengthen: the least of several calls, file and
PyTorch (norms folded) in turn. `--matrix` writes and runs a small network of every host with every attention instead;
`--runs` compares models of `lrfdyn train` on the test images of their data, or on --held-out of them, spread evenly.
Records are added to the file one by one; networks that it has are not measured again, runs are.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import common
from lrfdyn import create_model
from lrfdyn.analysis.measure.observe import load_images
from lrfdyn.attention import ATTENTIONS
from lrfdyn.convert.fold import fold_batch_norm
from lrfdyn.data import Augmentation, create_data
from lrfdyn.data.preprocess import Preprocessing
from lrfdyn.deploy.export.formats import ExecutorchRunner, OnnxRunner
from lrfdyn.deploy.export.write import export_model, run_batches, settle_norms, torch_logits
from lrfdyn.deploy.predict import expand_images
from lrfdyn.errors import LrfdynError
from lrfdyn.models.base import SpikingModel
from lrfdyn.sources import EXPORTED, find_source

MODELS = (
    # model, attention, its options, format
    ("spikformer_8_512", "lrf_dyn", {}, "onnx"),
    ("sdt_v3_s", "lrf_dyn", {}, "onnx"),
    ("qkformer_10_384", "lrf_dyn", {}, "onnx"),
    ("spikformer_4_384", "lrf_dyn", {}, "onnx"),
    ("spikformer_4_384", "lrf_dyn", {}, "executorch"),
    ("spikformer_4_384", "ssa", {}, "onnx"),
    ("spikformer_4_384", "lrf_dyn", {"image_size": 224}, "onnx"),
    ("spikformer_8_512", "ssa", {}, "onnx"),
)
COLUMNS = (
    "model", "attention", "image_size", "format", "operations", "file_mib", "latency_ms", "torch_latency_ms", "images",
    "max_logit_difference", "within_tolerance", "argmax_agreement",
)  # fmt: skip


def fastest(calls: dict[str, Any], repeats: int) -> dict[str, float]:
    """Milliseconds of each call, the least of `repeats`, in turn."""
    best = dict.fromkeys(calls, float("inf"))
    for i in range(repeats + 1):
        for name, call in calls.items():
            start = time.process_time()
            call()
            if i:  # the first one warms up
                best[name] = min(best[name], (time.process_time() - start) * 1e3)
    return best


def operations(path: Path) -> int | None:
    if path.suffix != ".onnx":
        return None
    import onnx

    return len(onnx.load(path).graph.node)


def measure(
    model: SpikingModel, size: int, format: str, images: list[Path], check: int, repeats: int
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        path = Path(folder) / f"model{EXPORTED[format]}"
        made = export_model(model, path, format=format, images=images, random_images=check)
        seconds = time.perf_counter() - start
        one = torch.randn(1, model.in_channels, size, size)
        runner = OnnxRunner(path, threads=1) if format == "onnx" else ExecutorchRunner(path)
        folded = fold_batch_norm(model)
        with torch.inference_mode():
            times = fastest({"file": lambda: runner(one.numpy()), "torch": lambda: folded(one)}, repeats)
        return {
            "benchmark": "export", "format": format, "image_size": size, "time_steps": model.time_steps,
            "operations": operations(path), "file_mib": made.bytes / 2**20,
            "parameters": sum(p.numel() for p in model.parameters()), "latency_ms": times["file"],
            "torch_latency_ms": times["torch"], "threads": 1, "batch": 1, "repeats": repeats, "clock": "process time",
            "export_and_check_s": seconds, **asdict(made.check),
        }  # fmt: skip


def real_size() -> Iterator[tuple[dict[str, Any], Any]]:
    for name, attention, options, format in MODELS:

        def build(name: str = name, attention: str = attention, options: dict[str, Any] = options) -> Any:
            torch.manual_seed(0)
            model = create_model(name, attention=attention, **options).eval()
            settle_norms(model)
            size = model.input_size[-1]
            if size == 32:
                model.preprocessing = Preprocessing(32, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), 1.0)
            return model, size

        size = options.get("image_size", 32 if name.endswith("4_384") else 224)
        yield {"model": name, "attention": attention, "token": None, "image_size": size, "format": format}, build


def matrix() -> Iterator[tuple[dict[str, Any], Any]]:
    """All hosts with all attentions, in both formats."""
    from tests.deploy.small import HOSTS, side, small

    for host in HOSTS:
        for kind in (None,) if host.endswith("resnet") else (*ATTENTIONS, "lrf_dyn_qkv"):

            def build(host: str = host, kind: str | None = kind) -> Any:
                model = small(host, kind)
                size = side(host, model)[0]
                model.preprocessing = Preprocessing(size, (0.5,) * 3, (0.25,) * 3)
                return model, size

            token = None if kind is None or not kind.startswith("lrf_dyn") else kind[8:] or "value"
            facts = {"model": f"small {host}", "attention": kind and kind.removesuffix("_qkv"), "token": token}
            for format in ("onnx", "executorch"):
                yield {**facts, "format": format}, build


def trained(folder: Path, root: Path | None, count: int | None) -> Iterator[dict[str, Any]]:
    """The files of a trained model against PyTorch, and PyTorch against itself in float64, on test images."""
    summary = json.loads((folder / "summary.json").read_text())
    most = create_data(summary["data"], root, Augmentation()).test_images if count is None else count
    shown = load_images(summary["data"], root, most, most, torch.device("cpu"))
    images, labels = shown.batches[0].numpy(), shown.labels[0].numpy()
    model = find_source(folder).load()
    logits, exact = torch_logits(model, images), torch_logits(copy.deepcopy(model).double(), images)
    for format in ("onnx", "executorch"):
        with tempfile.TemporaryDirectory() as place:
            made = export_model(model, Path(place) / f"model{EXPORTED[format]}")
            runner = OnnxRunner(made.path, threads=1) if format == "onnx" else ExecutorchRunner(made.path)
            found = run_batches(runner, images, runner.facts.get("most_images"))
        limit = made.check.tolerance * np.abs(logits).max()
        result: dict[str, Any] = {"images": len(images), "largest_logit": float(np.abs(logits).max())}
        result["top1"] = 100 * float((logits.argmax(1) == labels).mean())
        for name, other in (("", found), ("float64_", exact)):
            off = np.abs(other - logits).max(1)
            result |= {
                f"{name or 'file_'}top1": 100 * float((other.argmax(1) == labels).mean()),
                f"{name}equal_argmax": int((other.argmax(1) == logits.argmax(1)).sum()),
                f"{name}within_tolerance": int((off <= limit).sum()),
                f"{name}max_logit_difference": float(off.max()),
                f"{name}max_without_flip": float(off[off <= limit].max()),
            }
        facts = {key: summary[key] for key in ("recipe", "attention", "epochs", "seed")}
        facts |= {"format": format, "tolerance": made.check.tolerance, "time_steps": model.time_steps}
        yield {"benchmark": "export_runs", **result, **facts}


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--matrix", action="store_true")
    parser.add_argument("--runs", nargs="*", type=Path, default=[], help="folders of lrfdyn train")
    parser.add_argument("--data-root", type=Path, help="of their data")
    parser.add_argument("--held-out", type=int, help="test images of their data; default: all")
    parser.add_argument("--models", nargs="*", help="only these")
    parser.add_argument("--images", nargs="*", default=[], help="real images of the check: files, folders, patterns")
    parser.add_argument("--check", type=int, default=8, help="random images, and the most real ones")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    path = Path(arguments.json) if arguments.json else None
    records: list[dict[str, Any]] = json.loads(path.read_text()) if path and path.exists() else []
    found = expand_images(arguments.images) if arguments.images else []
    images = found[:: max(1, len(found) // arguments.check)][: arguments.check]  # spread over the classes
    for folder in arguments.runs:
        for record in trained(folder, arguments.data_root, arguments.held_out):
            records.append(record)
            print(json.dumps(record), flush=True)
            common.write(records, arguments.json)
    if arguments.runs:
        return
    for facts, build in matrix() if arguments.matrix else real_size():
        known = any(all(record.get(k) == v for k, v in facts.items()) for record in records)
        if known or (arguments.models and facts["model"] not in arguments.models):
            continue
        model, size = build()
        try:
            result = measure(model, size, facts["format"], images, arguments.check, arguments.repeats)
        except LrfdynError as error:
            print(f"{facts}: {error}", file=sys.stderr)
            continue
        records.append({**result, **facts})
        print(common.table(records[-1:], COLUMNS).splitlines()[-1], flush=True)
        common.write(records, arguments.json)
    print(common.table(records, COLUMNS))


if __name__ == "__main__":
    main()
