"""Writes docs/performance.md: the tables are made from the JSON files of results/performance."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from docs.pages import table

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results" / "performance"

# File of results/performance -> what its table is called. One file is one run.
TRAINING = {
    "train_step_cifar": "Spikformer-4-384, 32x32, in one run with the fastest peer",
    "train_step_cifar_ours": "All three attentions, minutes before on the same machine",
    "train_step_cifar_peers": "All three in one run with both peers, one revision earlier (*)",
    "train_step_cifar_reference": "The same with the plain definitions, eager and compiled, two revisions earlier (*)",
    "train_step_224": "224x224, all in one run, one revision earlier (*)",
}
INFERENCE = {"inference_cifar": "Spikformer-4-384, 32x32, all in one run, one revision earlier (*)"}

TEXT = """\
# Performance

<!-- Made by docs/make_performance.py from results/performance; `python docs/make_performance.py` writes it anew. -->

Measured on one {gpu} with torch {torch}, triton {triton}, SpikingJelly {spikingjelly}, in bfloat16 (autocast, weights
in float32). A training step is forward, backward and AdamW. Peers use the same batch, type, optimiser and loop.
Tables with a star are of earlier revisions: their peaks include the first steps, in which the library tries its
convolution algorithms, and their models did not yet let early feature maps go.
`python benchmarks/train_step.py`, `inference.py` and `kernels.py` measure all of it again.

## What makes it fast

- Batch norm, neuron, residual sum and max pool are one operation. Forward reads its input twice (statistics, then
  spikes) and writes spikes once; backward reads input and gradient twice and writes once. Potentials are computed
  again instead of stored.
- Spikes are kept for the backward pass as bits: one byte holds all time steps of a neuron.
- The bias of a convolution in front of a batch norm costs no pass: the norm takes it, and in training its gradient is
  zero.
- The first convolution sees a static image once, not once per time step.
- q, k and v are one matrix product, one norm and one neuron, and their gradients are written side by side, so that the
  way back is one product too. The gradient of a shortcut is added inside the product of the branch it goes around.
- A gradient that nobody else holds is overwritten by the next one (`ops/ownership.py` asks both C++ and Python who
  holds it; a hook or a caller that wants it keeps it).
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
The last columns compare with the plain definition.

{kernels}
## Correctness

Every kernel is tested against its definition in float64, in value and every gradient: in Triton's interpreter on small
shapes with every change, and on the GPU (`results/performance/correctness_h200.txt`) on real shapes in float32,
bfloat16 and float16. Relative errors stay below 1e-5, 6e-3 and 1e-3. A spike may differ only where a potential is
within rounding of the threshold, at most one in ten thousand; where more than a million neurons stand in front of a
max pool, the few that flip send their gradient to a neighbour, and the gradient may be off by 5e-3. Whole models on
the kernels are compared with the plain ones too, and two runs give the same bits.

## Where the time goes, and what is missing

A profile of the Spikformer-4-384 step without CUDA graph (`results/performance/profile_train_step.txt`; SSA 18.7 ms,
LRF-Dyn 17.3): convolutions and matrix products 8.9 ms in SSA, the four batch norm kernels 6.5, attention 0.9 and its
neuron 0.25, bits to spikes 0.4, gradient of the max pool 0.3, AdamW 0.26. The aim was 2.5 times
the fastest peer in half of its memory:

{targets}
- The dendrite kernels are bound by arithmetic, not by memory: six fused multiply-adds per token and mode forward, 15
  backward, on lanes that each hold one or two channels. Other block sizes were slower. Chunks as small Toeplitz
  matrices on the tensor cores, one per channel, would need the tokens with channels outermost; not tried.
- The stencils reach {stencils} of the copy on 8x8 grids (forward, backward); on 14x14 every row is loaded five
  times from the cache, and more channels or images per program do not help.
- Batch norm on the smallest maps (25 million elements) is short of 70 % forward: its three kernels take 57 us where one
  copy of the same bytes takes 36, and launches, ramps and the pass that finishes the statistics are the rest.
- Gathering the gradient of the max pool inside both backward kernels, instead of writing it once, saves memory traffic
  and costs more instructions than that: 1,013 us against 785 (`results/performance/tuning_h200.txt` has all trials).
- For 2.5 times the fastest peer a step may take {limit:.1f} ms. Products and convolutions are the library's; batch norm
  reads and writes eight times as much as one map in four kernels. What remains is mostly the pass that computes
  statistics, which only an own matrix product could take in.
- Pipelining the loops of the statistics and sums kernels changes nothing or costs 1 %.
- On a CPU the plain operations are as fast as before there were kernels, within the spread of the runs
  (`results/performance/cpu_reference.txt`).
- QKFormer pools before the neuron, and SDT-V2 and SDT-V3 normalise after the last convolution of a branch: those
  layers still run the plain batch norm.
"""


def load(name: str) -> list[dict[str, Any]]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def speed_table(title: str, records: list[dict[str, Any]]) -> str:
    body = [
        [r["model"], r["attention"], r["implementation"], str(r["batch"]), f"{r['images_per_s']:,.0f}",
         f"{r['peak_mib']:,.0f}"]
        for r in records
    ]  # fmt: skip
    return f"{title}:\n\n" + table(["model", "attention", "implementation", "batch", "images/s", "peak MiB"], body)


def kernel_table(records: list[dict[str, Any]]) -> str:
    found = {(r["op"], r["shape"], r["direction"], r["implementation"]): r for r in records}
    body = []
    for (op, shape, direction, implementation), r in found.items():
        if implementation != "kernel":
            continue
        others = [found.get((op, shape, direction, name)) for name in ("reference", "reference-compiled")]
        factors = [f"{other['ms'] / r['ms']:.1f}" if other else "" for other in others]
        body.append(
            [
                op,
                shape,
                direction,
                f"{1e3 * r['ms']:.0f}",
                f"{r['gb_per_s']:,.0f}",
                f"{r['share_of_copy']:.0%}",
                *factors,
            ]
        )
    header = ["operation", "shape", "direction", "us", "GB/s", "share of copy", "x plain eager", "x plain compiled"]
    return table(header, body)


def stencil_shares(records: list[dict[str, Any]]) -> str:
    """Of a copy, forward and backward, on the grid of 8x8 tokens."""
    wanted = ("lrf + x", "B1024 N64 C384", "kernel")
    shares = [r["share_of_copy"] for r in records if (r["op"], r["shape"], r["implementation"]) == wanted]
    return " and ".join(f"{100 * share:.0f} %" for share in shares)


def fastest_peer(cifar: list[dict[str, Any]]) -> dict[str, Any]:
    peers = [r for r in cifar if r["implementation"].startswith("spikingjelly")]
    return max(peers, key=lambda r: r["images_per_s"])


def allowed_ms(cifar: list[dict[str, Any]]) -> float:
    """Of a step at 2.5 times the speed of the fastest peer."""
    peer = fastest_peer(cifar)
    return 1e3 * peer["batch"] / (2.5 * peer["images_per_s"])


def targets(cifar: list[dict[str, Any]], others: list[dict[str, Any]]) -> str:
    """How the step compares with the fastest peer, of the same run where the attention is in it."""
    best = fastest_peer(cifar)
    lines = []
    ours = {r["attention"]: r for r in [*others, *cifar] if r["implementation"] == "lrfdyn"}
    for r in ours.values():
        speed, memory = r["images_per_s"] / best["images_per_s"], r["peak_mib"] / best["peak_mib"]
        lines.append(
            f"- {r['attention']}: {speed:.2f} times the speed of the fastest peer ({best['implementation']}, "
            f"{best['images_per_s']:,.0f} images/s) in {memory:.0%} of its memory."
        )
    return "\n".join(lines)


def render() -> str:
    kernels, cifar = load("kernels"), load("train_step_cifar")
    versions = cifar[0]["versions"]
    return TEXT.format(
        gpu=cifar[0]["machine"]["gpu"],
        torch=versions["torch"],
        triton=versions["triton"],
        spikingjelly=versions["spikingjelly"],
        training="\n".join(speed_table(title, load(name)) for name, title in TRAINING.items()),
        inference="\n".join(speed_table(title, load(name)) for name, title in INFERENCE.items()),
        copy=f"{kernels[0]['copy_gb_per_s']:,.0f}",
        kernels=kernel_table(kernels),
        stencils=stencil_shares(kernels),
        limit=allowed_ms(cifar),
        targets=targets(cifar, load("train_step_cifar_ours")),
    )


if __name__ == "__main__":
    (ROOT / "docs" / "performance.md").write_text(render(), encoding="utf-8")
