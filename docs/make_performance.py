"""Writes docs/performance.md: the tables are made from the JSON files of results/performance."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results" / "performance"

# File of results/performance -> what its table is called. One file is one run.
TRAINING = {
    "train_step_cifar": "Spikformer-4-384, 32x32, peers in the same run",
    "train_step_cifar_ours": "Spikformer-4-384, 32x32, our attentions",
    "train_step_cifar_lrf_ssa": "Spikformer-4-384, 32x32, one revision earlier",
    "train_step_cifar_lrf": "Spikformer-4-384, 32x32, two revisions earlier (more spikes kept as 16 bit)",
    "train_step_spikformer_8_512": "Spikformer-8-512, 224x224",
    "train_step_other_hosts": "QKFormer-10-512 and SDT-V3-S, 224x224",
}  # fmt: skip
INFERENCE = {"inference_cifar": "Spikformer-4-384, 32x32"}

TEXT = """\
# Performance

<!-- Made by docs/make_performance.py from results/performance; `python docs/make_performance.py` writes it anew. -->

Measured on one {gpu} with torch {torch}, triton {triton}, SpikingJelly {spikingjelly}, in bfloat16 (autocast, weights
in float32). A training step is forward, backward and AdamW. Peers use the same batch, type, optimiser and loop.
`python benchmarks/train_step.py`, `inference.py` and `kernels.py` measure all of it again.

## What makes it fast

- Batch norm, neuron, residual sum and max pool are one operation. Forward reads its input twice (statistics, then
  spikes) and writes spikes once; backward reads input and gradient twice and writes once. Potentials are computed
  again instead of stored.
- Spikes are kept for the backward pass as bits: one byte holds all time steps of a neuron.
- The bias of a convolution in front of a batch norm costs no pass: the norm takes it, and in training its gradient is
  zero.
- The first convolution sees a static image once, not once per time step.
- Everything is channels-last, a 1x1 convolution is a matrix product, and the step is one CUDA graph.
- No kernel uses atomics: partial sums are added in a fixed order, so the same inputs give the same bits.

## Training

{training}
## Inference

Norms folded into the weights, one CUDA graph.

{inference}
## Kernels

Bytes are those that must move: every input and output once, and the input of a batch norm twice, its gradient pass
likewise (16 bit per element). The share is of a device-to-device copy in the same run, {copy} GB/s.

{kernels}
## Correctness

Every kernel is tested against its definition in value and gradient in Triton's interpreter. On the GPU
(`results/performance/correctness_h200.txt`, relative errors by shape): batch norm with neuron against the plain
operation in float32, bfloat16 and float16, with at most one spike in a million flipped; stencils and dendrites
against float64, in float32 only, because the run reached its time limit there. Attention of this revision was not
reached. Equal bits in two runs are so far tested in the interpreter alone.

## Where the time goes, and what is missing

A profile of the Spikformer-4-384 step with SSA (`results/performance/profile_train_step.txt`, one revision before the
speeds above, without CUDA graph, 20.1 ms): convolutions and matrix products 9.2 ms, the four batch norm kernels 6.9,
attention 0.9, sums of residual gradients 0.6, bits to spikes 0.4, small kernels that finish statistics 0.3, gradient
of the max pool 0.3, AdamW 0.3.

- Against SpikingJelly compiled in the same run, the step is {factor:.1f} times as fast, short of 2.5. One matrix
  product for q, k and v instead of three, forward and backward, would save launches, reads and two sums per block.
- The dendrite kernels are bound by arithmetic, not by memory: six fused multiply-adds per token and mode forward, 15
  backward, on lanes that each hold one or two channels. Chunks as small Toeplitz matrices on the tensor cores would
  lift that.
- The stencils reach their bandwidth on 8x8 grids forward only; on 14x14 every row is loaded five times from the cache.
- QKFormer pools before the neuron, and SDT-V2 and SDT-V3 normalise after the last convolution of a branch: those
  layers still run the plain batch norm.
"""


def load(name: str) -> list[dict[str, Any]]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def rows(header: list[str], body: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def speed_table(title: str, records: list[dict[str, Any]]) -> str:
    body = [
        [r["model"], r["attention"], r["implementation"], str(r["batch"]), f"{r['images_per_s']:,.0f}",
         f"{r['peak_mib']:,.0f}"]
        for r in records
    ]  # fmt: skip
    return f"{title}:\n\n" + rows(["model", "attention", "implementation", "batch", "images/s", "peak MiB"], body)


def kernel_table(records: list[dict[str, Any]]) -> str:
    found = {(r["op"], r["shape"], r["direction"], r["implementation"]): r for r in records}
    body = []
    for (op, shape, direction, implementation), r in found.items():
        if implementation != "kernel":
            continue
        plain = found.get((op, shape, direction, "reference"))
        factor = f"{plain['ms'] / r['ms']:.1f}" if plain else ""
        body.append(
            [op, shape, direction, f"{1e3 * r['ms']:.0f}", f"{r['gb_per_s']:,.0f}", f"{r['share_of_copy']:.0%}", factor]
        )
    return rows(["operation", "shape", "direction", "us", "GB/s", "share of copy", "times plain eager"], body)


def main() -> None:
    kernels, cifar = load("kernels"), load("train_step_cifar")
    speed = {r["implementation"]: r["images_per_s"] for r in cifar}
    versions = cifar[0]["versions"]
    text = TEXT.format(
        gpu=cifar[0]["machine"]["gpu"],
        torch=versions["torch"],
        triton=versions["triton"],
        spikingjelly=versions["spikingjelly"],
        training="\n".join(speed_table(title, load(name)) for name, title in TRAINING.items()),
        inference="\n".join(speed_table(title, load(name)) for name, title in INFERENCE.items()),
        copy=f"{kernels[0]['copy_gb_per_s']:,.0f}",
        kernels=kernel_table(kernels),
        factor=speed["lrfdyn"] / speed["spikingjelly-compiled"],
    )
    (ROOT / "docs" / "performance.md").write_text(text)


if __name__ == "__main__":
    main()
