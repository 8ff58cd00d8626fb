"""Peak memory and latency of inference: SpikingJelly's network and our plain model against the low-memory path, in one
run. The reference is the first row of a batch, official-style eager SSA.

    python benchmarks/memory.py --json results/performance/memory_h200.json

On a CPU every row is a process of its own, so that its resident set is its own. Peaks are those of the allocator and
leave out weights and input images; `resident_mib` is the growth of the resident set in one call. Small batches are then
timed in turn, call by call, in one process. `cpu_ms` is processor time, which other processes on the machine disturb
less than `latency_ms`, the fastest call.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import common
from benchmarks.train_step import Peer, build
from lrfdyn import create_model
from lrfdyn.analysis.measure.inference import attention_state, held_state_bytes, peak_allocation, resident_growth
from lrfdyn.deploy import compile_for_inference
from lrfdyn.ops.dispatch import plain_operations

# Implementation and attention of every row; the first that runs is the reference.
ROWS = (
    ("spikingjelly", "ssa"),
    ("eager", "ssa"),
    ("eager", "lrf_dyn"),
    ("low-memory", "ssa"),
    ("low-memory", "lrf_dyn"),
    ("streaming", "lrf_dyn"),
)
COLUMNS = (
    "model", "attention", "implementation", "device", "batch", "peak_mib", "of_reference", "resident_mib",
    "attention_state_bytes", "derived_state_bytes", "latency_ms", "cpu_ms",
)  # fmt: skip


def network_for(implementation: str, model: torch.nn.Module, arguments: argparse.Namespace) -> torch.nn.Module:
    if implementation in ("spikingjelly", "eager"):
        return model
    options = {"images_at_once": arguments.images_at_once, "tile_mib": arguments.tile_mib}
    mixing = "streaming" if implementation == "streaming" else "parallel"
    return compile_for_inference(model, mixing=mixing, **options)  # type: ignore[arg-type]


def build_model(implementation: str, attention: str, arguments: argparse.Namespace) -> torch.nn.Module | None:
    size = {"image_size": arguments.image_size} if arguments.image_size else {}
    if implementation == "spikingjelly":
        if size:  # its network is laid out for the usual size alone
            return None
        return build(arguments.model, attention, implementation, common.MODELS[arguments.model][1])
    torch.manual_seed(0)
    model = create_model(arguments.model, attention=attention, **size)
    return model.to(memory_format=torch.channels_last)


def measure(implementation: str, attention: str, batch: int, arguments: argparse.Namespace) -> dict[str, Any] | None:
    device = torch.device(arguments.device)
    model = build_model(implementation, attention, arguments)
    if model is None:
        return None
    model = model.to(device).eval()
    images = torch.randn(batch, 3, *[arguments.image_size or common.MODELS[arguments.model][0]] * 2, device=device)
    network = partial(network_for, implementation, model, arguments)
    ours = not isinstance(model, Peer)
    plain = implementation in ("spikingjelly", "eager")
    with torch.inference_mode(), plain_operations() if plain else nullcontext():
        long = device.type == "cpu" and batch >= arguments.single_call_from
        if device.type == "cuda":
            network()(images)  # what libraries allocate once; kernels are compiled
        elif not long:
            network()(images[:1])
        timed = Timed(network(), images)
        if device.type == "cpu":
            # Two calls: the profiler that sees allocations keeps its own records, which must not count as resident.
            resident = resident_growth(timed)
            wall, cpu = list(timed.wall), list(timed.cpu)
            timed.network = network()
            peak = peak_allocation(timed, device)
            timed.wall, timed.cpu = wall, cpu
        else:
            resident, peak = None, peak_allocation(timed, device)
        if not long:
            timed.forget()
            for _ in range(arguments.repeats):
                timed()
    on_attention = ours and attention == "lrf_dyn"
    return {
        "benchmark": "memory", "model": arguments.model, "attention": attention, "implementation": implementation,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu", "batch": batch,
        "time_steps": 4, "image_size": images.shape[-1], "dtype": "float32",
        "peak_mib": peak / 2**20, "resident_mib": None if resident is None else resident / 2**20,
        "attention_state_bytes": held_state_bytes(model) if on_attention else None,  # type: ignore[arg-type]
        "derived_state_bytes": sum(term["bytes"] for term in attention_state(model)) if ours else None,
        "latency_ms": min(timed.wall), "latency_calls_ms": timed.wall, "cpu_ms": min(timed.cpu) if timed.cpu else None,
        "threads": torch.get_num_threads(), "note": arguments.note,
    }  # fmt: skip


class Timed:
    """A network on its images; keeps wall and processor time of every call."""

    def __init__(self, network: torch.nn.Module, images: torch.Tensor) -> None:
        self.network, self.images = network, images
        self.forget()

    def forget(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def __call__(self) -> None:
        cuda = self.images.is_cuda
        if cuda:
            torch.cuda.synchronize()
        wall, cpu = time.perf_counter(), time.process_time()
        self.network(self.images)
        if cuda:
            torch.cuda.synchronize()
        self.wall.append((time.perf_counter() - wall) * 1e3)
        if not cuda:
            self.cpu.append((time.process_time() - cpu) * 1e3)


def time_in_turn(records: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    """On a shared machine: the rows of a batch call by call in turn, so that all meet the same disturbances."""
    timed = []
    for record in records:
        model = build_model(record["implementation"], record["attention"], arguments)
        assert model is not None
        network = network_for(record["implementation"], model.eval(), arguments)
        timed.append(Timed(network, torch.randn(record["batch"], 3, *[record["image_size"]] * 2)))
    for i in range(1 + arguments.repeats):
        for record, call in zip(records, timed, strict=True):
            plain = record["implementation"] in ("spikingjelly", "eager")
            with torch.inference_mode(), plain_operations() if plain else nullcontext():
                call()
                if i == 0:
                    call.forget()  # the first warms up
    for record, call in zip(records, timed, strict=True):
        record |= {"latency_ms": min(call.wall), "latency_calls_ms": call.wall, "cpu_ms": min(call.cpu)}


def in_own_process(implementation: str, attention: str, batch: int) -> dict[str, Any] | None:
    command = [sys.executable, __file__, *sys.argv[1:], "--row", implementation, attention, str(batch)]
    # As few arenas of the allocator as can be: what they keep is no memory of the network.
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--model", default="spikformer_8_512", choices=list(common.MODELS))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 64])
    parser.add_argument("--only", nargs="+", metavar="IMPLEMENTATION:ATTENTION", help="of the rows, these")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--images-at-once", type=int)
    parser.add_argument("--tile-mib", type=float)
    parser.add_argument("--image-size", type=int, help="smaller, for a trial of this script")
    parser.add_argument("--single-call-from", type=int, default=16, help="CPU: batches that are timed in one call")
    parser.add_argument("--note", help="kept with every record")
    parser.add_argument(
        "--append", action="store_true", help="add to the records of the file; one run is one file else"
    )
    parser.add_argument("--json")
    parser.add_argument("--row", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.row:
        implementation, attention, batch = arguments.row
        print(json.dumps(measure(implementation, attention, int(batch), arguments)))
        return
    wanted = set(arguments.only or (":".join(row) for row in ROWS))
    records: list[dict[str, Any]] = []
    if arguments.append and arguments.json and Path(arguments.json).exists():
        records = json.loads(Path(arguments.json).read_text())
    for batch in arguments.batches:
        for implementation, attention in (row for row in ROWS if ":".join(row) in wanted):
            if implementation == "streaming" and batch > 1 and arguments.device == "cuda" and not arguments.only:
                continue  # for one image at a time: thousands of small launches
            common.free_memory()
            record = None
            with common.attempt(f"{implementation} {attention} batch {batch}"):
                if arguments.device == "cpu":
                    record = in_own_process(implementation, attention, batch)
                else:
                    record = measure(implementation, attention, batch, arguments)
            if record is None:
                continue
            reference = next((r for r in records if r["batch"] == batch), record)
            record["of_reference"] = record["peak_mib"] / reference["peak_mib"]
            record["reference"] = f"{reference['implementation']} {reference['attention']}"
            records.append(record)
            print(
                f"{implementation} {attention} batch {batch}: {record['peak_mib']:,.1f} MiB "
                f"({record['of_reference']:.1%}), {record['latency_ms']:,.1f} ms",
                flush=True,
            )
            common.write(records, arguments.json)
        if arguments.device == "cpu" and batch < arguments.single_call_from:
            time_in_turn([r for r in records if r["batch"] == batch], arguments)
            common.write(records, arguments.json)
    print(common.table(records, COLUMNS))


if __name__ == "__main__":
    main()
