"""What the kernels become on all GPUs that they are written for: registers, spills and shared memory. Needs no GPU.

Operations and networks run on tensors without memory, and whatever they launch goes through Triton as a launch on a
GPU of the target would: with its block sizes, types and options, to the end of the compiler, and then is not started.

    python benchmarks/compiled_kernels.py                                  # all targets, networks too: half an hour
    python benchmarks/compiled_kernels.py --targets sm_80 sm_90 --quick --json out.json
    python benchmarks/compiled_kernels.py --kernels bn_lif --json FILE     # of these anew; FILE has those of all others

It ends with an error where a kernel does not compile, needs more shared memory than a program may have, or spills more
than SPILLED bytes of a thread's registers, and where no case launches a kernel.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import pkgutil
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import common, kernel_cases
from lrfdyn import ops
from lrfdyn.files import read_json, write_atomic
from lrfdyn.ops import machine as facts_of_machines
from lrfdyn.ops.machine import H200, Machine

KIB = 1024
OPTIONS = ("num_warps", "num_stages")  # of a launch, and no constants of its kernel
# More bytes per thread than this, through memory and back, are no accident of the compiler's any more.
SPILLED = 256
# Shorter chunks would spill nothing; sizes of an H200 change only with a measurement.
KNOWN = {("spike_attention.attention_forward", "causal_spike_attention, float32", "sm_90")}


# A GPU of each architecture. Multiprocessors are from the makers' data sheets, shared memory from NVIDIA's programming
# guide (compute capabilities) and AMD's instruction set references (LDS).
TARGETS = {
    machine.architecture: machine
    for machine in (
        Machine("NVIDIA A100", "sm_80", 108, 32, 163 * KIB),
        Machine("NVIDIA GeForce RTX 3090", "sm_86", 82, 32, 99 * KIB),
        Machine("NVIDIA GeForce RTX 4090", "sm_89", 128, 32, 99 * KIB),
        H200,
        Machine("NVIDIA B200", "sm_100", 148, 32, 227 * KIB),
        Machine("NVIDIA GeForce RTX 5090", "sm_120", 170, 32, 99 * KIB),
        Machine("AMD Instinct MI250X", "gfx90a", 110, 64, 64 * KIB),
        Machine("AMD Instinct MI300X", "gfx942", 304, 64, 64 * KIB),
    )
}


class Driver:
    """In the place of the driver of a GPU, for Triton to ask what to compile for."""

    def __init__(self, architecture: str, lanes: int) -> None:
        from triton.backends.compiler import GPUTarget

        nvidia = architecture.startswith("sm_")
        name = int(architecture.removeprefix("sm_")) if nvidia else architecture
        self.target = GPUTarget("cuda" if nvidia else "hip", name, lanes)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> Any:
        return self.target  # Triton keeps what it has compiled by device

    def get_current_stream(self, device: Any) -> int:
        return 0


def usage(kernel: Any, log: str) -> dict[str, int]:
    """Registers of a thread, bytes of them that are spilled, and shared memory of a program."""
    if "amdgcn" in kernel.asm:
        text = kernel.asm["amdgcn"]
        patterns = (r"\.vgpr_count:\s+(\d+)", r"\.private_segment_fixed_size:\s+(\d+)")
    else:
        text, patterns = log, (r"Used (\d+) registers", r"(\d+) bytes spill stores")
    registers, spilled = (int(re.findall(pattern, text)[-1]) for pattern in patterns)
    return {"registers": registers, "spilled": spilled, "shared": kernel.metadata.shared}


def named(kernel: Any) -> str:
    """`bn_lif.apply_kernel`: the operation, and the function without what marks it as private."""
    *_, package, module = kernel.__module__.split(".")
    return f"{package if package != 'ops' else module.removesuffix('_triton')}.{kernel.__name__.lstrip('_')}"


def is_one_of(kernel: str, names: Sequence[str]) -> bool:
    """Whether a kernel is one of those named, or of an operation that is."""
    return kernel in names or kernel.partition(".")[0] in names


def compiled(
    architecture: str, cases: dict[str, Callable[[], None]], names: Sequence[str] = ()
) -> Iterator[dict[str, Any]]:
    """A record of every kernel that the cases launch, or of those named, each form of it once."""
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    run, target = JITFunction.run, TARGETS[architecture]
    found: dict[str, dict[str, Any]] = {}
    case = ""

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if names and not is_one_of(named(kernel), names):
            return None
        start, log = time.perf_counter(), io.StringIO()
        with contextlib.redirect_stdout(log):
            made = run(kernel, *args, grid=grid, warmup=True, **options)
        if made.hash not in found:
            numbers = {key: value for key, value in options.items() if type(value) is int and key not in OPTIONS}
            facts = {"kernel": named(kernel), "target": architecture, "case": case, "constants": numbers}
            used = {"warps": made.metadata.num_warps, **usage(made, log.getvalue())}
            found[made.hash] = {**facts, **used}
            print(architecture, facts["kernel"], used, f"{time.perf_counter() - start:.1f} s", flush=True)
        return made

    driver.set_active(Driver(architecture, target.lanes))
    with (
        patch.object(JITFunction, "run", compile_only),
        patch.object(facts_of_machines, "NO_GPU", target),
        kernel_cases.without_memory(),
    ):
        for case, launches in cases.items():  # noqa: B007, the records name it
            launches()
    yield from found.values()


def kernels() -> set[str]:
    """Every kernel of the package that is launched, and not called by another one."""
    from triton.runtime.jit import JITFunction

    functions: dict[str, Any] = {}
    for found in pkgutil.walk_packages(ops.__path__, f"{ops.__name__}."):
        if found.name.endswith("triton"):
            members = vars(importlib.import_module(found.name)).values()
            functions |= {f.__name__: f for f in members if isinstance(f, JITFunction)}
    sources = {name: f.src for name, f in functions.items()}
    called = {
        name for name in sources for other, text in sources.items()
        if name != other and re.search(rf"(?<!def )\b{name}\(", text)
    }  # fmt: skip
    return {named(function) for name, function in functions.items() if name not in called}


def problems(records: Sequence[dict[str, Any]]) -> list[str]:
    """What is wrong with the records, a line for each."""
    lines = [f"{name}: no case launches it" for name in sorted(kernels() - {r["kernel"] for r in records})]
    for r in records:
        what = f"{r['kernel']} of {r['case']!r} on {r['target']}"
        if r["spilled"] > SPILLED and (r["kernel"], r["case"], r["target"]) not in KNOWN:
            lines.append(f"{what}: spills {r['spilled']} bytes, more than {SPILLED}")
        if r["shared"] > TARGETS[r["target"]].shared:
            lines.append(f"{what}: {r['shared']} bytes of shared memory, of {TARGETS[r['target']].shared}")
    return lines


def others_of(
    path: Path, names: Sequence[str], targets: Sequence[str]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The records of a file but those of the kernels named on these targets, and the runs that they are of."""
    found = read_json(path, "--json")
    records = [r for r in found["records"] if r["target"] not in targets or not is_one_of(r["kernel"], names)]
    return records, [*found.get("earlier", []), {key: found[key] for key in ("command", "versions", "revision")}]


def write(records: Sequence[dict[str, Any]], path: Path, earlier: Sequence[dict[str, Any]]) -> None:
    """A line for each record, after what holds for all of them, and the earlier runs that some are of."""
    about = common.about()
    del about["machine"]  # whatever it is, it makes the same kernels
    targets = {name: asdict(machine) for name, machine in TARGETS.items()}
    facts = {**about, **({"earlier": earlier} if earlier else {}), "targets": targets}
    head = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in facts.items())
    body = ",\n".join(map(json.dumps, records))
    text = f'{{\n{head},\n"records": [\n{body}\n]\n}}\n'
    write_atomic(path, lambda file: file.write_text(text, encoding="utf-8"))


def main(argv: Sequence[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), choices=list(TARGETS), metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="every kernel, in few forms")
    parser.add_argument("--kernels", nargs="+", default=[], metavar="NAME", help="only these, or of these operations")
    parser.add_argument("--json", type=Path, help="file for the records; with --kernels those of all others stay there")
    options = parser.parse_args(argv)
    if options.kernels and not options.json:
        parser.error("--kernels needs --json, a file with the records of all others")
    if os.environ.get("TRITON_INTERPRET", "0") != "0":
        sys.exit("compiled_kernels.py: TRITON_INTERPRET is set; the interpreter compiles nothing")
    for name in options.kernels:
        if not any(is_one_of(kernel, [name]) for kernel in kernels()):
            parser.error(f"--kernels: there is no {name}")
    cases = kernel_cases.OPERATIONS | kernel_cases.networks()
    if options.quick:
        cases = {name: cases[name] for name in kernel_cases.QUICK}
    records, earlier = others_of(options.json, options.kernels, options.targets) if options.kernels else ([], [])
    # The log of ptxas says what it spilled, and is there only where something is compiled, not taken from a cache.
    os.environ["TRITON_DUMP_PTXAS_LOG"] = "1"
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        for name in options.targets:
            records += compiled(name, cases, options.kernels)
    records.sort(key=lambda record: list(TARGETS).index(record["target"]))
    if options.json:
        write(records, options.json, earlier)
    if wrong := problems(records):
        sys.exit("\n".join(f"compiled_kernels.py: {line}" for line in wrong))


if __name__ == "__main__":
    main()
