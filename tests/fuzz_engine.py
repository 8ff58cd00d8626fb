"""Hostile calls of the C engine under the address and undefined-behaviour sanitizers; part of `make fuzz`.

    python tests/fuzz_engine.py --cases 20000 --seed 0

Random networks with every kind of operation are written as C and called with pictures of all kinds at any address, with
null pointers and with wrong sizes. A call returns the code that it must, reads and writes nothing outside of its
buffers, and gives the logits of the definition bit for bit. The engine reads no files: a model is compiled in, so that
pictures and sizes are all that comes from outside. Where the compiler has OpenMP, networks run with one, two and three
threads in turn. The exit code is 1 where something was found.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from lrfdyn.deploy.c.native import KERNEL_HEADERS, KERNELS, find_compiler, openmp
from lrfdyn.deploy.c.write import kernel_text, write_c
from lrfdyn.deploy.integer.program import IntegerModel
from tests.deploy.programs import any_model

HARNESS = Path(__file__).with_suffix(".c")
SANITIZED = ("-std=c99", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
VECTORS = ((), ("-march=native",))  # the plain form of the kernels, and that of this machine


def has_openmp() -> bool:
    """Whether the compiler can build programs of several threads."""
    compiler, program = find_compiler(), "int main(void) { return 0; }"
    with tempfile.TemporaryDirectory() as folder:
        command = [str(compiler), "-fopenmp", "-include", "omp.h", "-x", "c", "-", "-o", "program"]
        done = compiler and subprocess.run(command, cwd=folder, input=program, capture_output=True, text=True)
    return bool(done) and done.returncode == 0


def compile_kernels(folder: Path, options: Sequence[str]) -> Path:
    """The kernels under sanitizers, once for many models."""
    for name in (*KERNEL_HEADERS, *KERNELS):
        (folder / name).write_text(kernel_text(name))
    command = [str(find_compiler()), *SANITIZED, *options, "-r", "-nostdlib", *KERNELS, "-o", "kernels.o"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder / "kernels.o"


def fuzz(
    model: IntegerModel, kernels: Path, folder: Path, cases: int, seed: int, threads: int = 1
) -> tuple[str | None, int]:
    """What was found in so many calls, or None, and how many gave logits."""
    made = write_c(model, folder / f"{seed}.c").path
    sources = [str(HARNESS), "lrfdyn_model.c", str(kernels)]
    flags = [*SANITIZED, "-O0", "-I.", *(openmp(threads) if threads > 1 else ())]
    command = [str(find_compiler()), *flags, *sources, "-o", "fuzz"]
    subprocess.run(command, cwd=made, check=True, capture_output=True)
    done = subprocess.run(["./fuzz", str(cases), str(seed)], cwd=made, capture_output=True)
    if done.returncode:
        return f"exit code {done.returncode}: {done.stderr.decode(errors='replace')[:2000]}", 0
    size, classes = int(np.prod(model.shape)), model.values[-1].channels
    rows = np.frombuffer(done.stdout, np.uint8).reshape(-1, size + 4 * classes)
    images = torch.from_numpy(rows[:, :size].copy()).reshape(-1, *model.shape)
    logits = rows[:, size:].copy().view(np.int32)
    wrong = (model(images).numpy() != logits).any(1)
    return (f"{wrong.sum()} of {len(wrong)} pictures give other logits" if wrong.any() else None), len(wrong)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=20000)
    parser.add_argument("--networks", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    start, findings, compared, calls = time.perf_counter(), 0, 0, 0
    each, most_threads = -(-arguments.cases // arguments.networks), 3 if has_openmp() else 1
    with tempfile.TemporaryDirectory() as place:
        for options in VECTORS:
            folder = Path(place) / ("native" if options else "plain")
            folder.mkdir()
            kernels = compile_kernels(folder, ("-O1", *options))
            for seed in range(arguments.seed, arguments.seed + arguments.networks):
                if seed % len(VECTORS) != VECTORS.index(options):
                    continue
                model = any_model(seed // len(VECTORS), 1 + seed * 3 % 8)
                threads = 1 + seed // len(VECTORS) % most_threads
                found, count = fuzz(model, kernels, folder, each, seed, threads)
                compared, calls, findings = compared + count, calls + each, findings + (found is not None)
                if found:
                    how = f"{' '.join(options) or 'plain'}, threads: {threads}"
                    print(f"network {seed} ({how}): {found}", flush=True)
    seconds = time.perf_counter() - start
    print(f"{calls} calls of the C engine, {compared} pictures compared, {findings} findings, {seconds:.0f} s")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
