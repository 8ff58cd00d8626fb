"""Images per second and peak memory of one training step (forward, backward, AdamW): ours against the plain
definitions, eager and compiled, and against SpikingJelly where it is installed, in one run.

    python benchmarks/train_step.py --models spikformer_4_384 --json out.json

`lrfdyn` is the step of `lrfdyn train`, one CUDA graph; `lrfdyn-compiled` is `torch.compile(model)` in a loop without
one, as others would write it, and `lrfdyn-compiled-graphs` the same with the compiler's own graphs, by its
`mode="reduce-overhead"`.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import common
from lrfdyn import create_model
from lrfdyn.ops.dispatch import plain_operations
from lrfdyn.training.step import TrainStep, capturable_adamw

IMPLEMENTATIONS = (
    "lrfdyn",
    "lrfdyn-compiled",
    "lrfdyn-compiled-graphs",
    "reference",
    "reference-compiled",
    "spikingjelly",
    "spikingjelly-compiled",
)
# Of those where the compiler is called here.
MODES = {"lrfdyn-compiled": "default", "lrfdyn-compiled-graphs": "reduce-overhead", "reference-compiled": "default"}


class Peer(torch.nn.Module):
    """SpikingJelly's network with its state reset before every call and logits averaged over time."""

    def __init__(self, network: torch.nn.Module, compiled: bool) -> None:
        super().__init__()
        self.network = network
        self.call = torch.compile(network) if compiled else network

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from spikingjelly.activation_based import functional

        functional.reset_net(self.network)
        y = self.call(x)
        return y.mean(0) if y.dim() == 3 else y


def build(name: str, attention: str, implementation: str, classes: int) -> torch.nn.Module | None:
    torch.manual_seed(0)
    if implementation.startswith("spikingjelly"):
        network = common.peer(name, classes) if attention == "ssa" else None
        return None if network is None else Peer(network, implementation.endswith("compiled"))
    model = create_model(name, attention=attention, num_classes=classes)
    return model.to(memory_format=torch.channels_last)


def start(name: str, attention: str, implementation: str, batch: int) -> tuple[torch.nn.Module | None, torch.Tensor]:
    """The network, None where the peer has none like it, and random images, on the GPU if there is one."""
    size, classes, _, _ = common.MODELS[name]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    common.free_memory()
    model = build(name, attention, implementation, classes)
    return model and model.to(device), torch.randn(batch, 3, size, size, device=device)


def measure(name: str, attention: str, implementation: str, batch: int | None, repeats: int) -> dict[str, Any] | None:
    _, classes, default_batch, _ = common.MODELS[name]
    batch = batch or default_batch
    model, images = start(name, attention, implementation, batch)
    if model is None:
        return None
    model.train()
    labels = torch.randint(classes, (batch,), device=images.device)
    ours, compiled = implementation.startswith("lrfdyn"), implementation in MODES
    call = torch.compile(model, mode=MODES[implementation]) if compiled else model
    optimizer = capturable_adamw(model, 1e-3)
    with nullcontext() if ours else plain_operations():
        # Memory of a step once the libraries have chosen their algorithms: trying them takes more, and a graph that is
        # replayed allocates nothing.
        step = TrainStep(call, optimizer, F.cross_entropy, amp=torch.bfloat16, graph=False)
        for _ in range(3):
            step((images, labels))
        common.free_memory()
        step((images, labels))
        peak = common.peak_mib()
        step = TrainStep(call, optimizer, F.cross_entropy, amp=torch.bfloat16, graph=ours and not compiled)
        ms = common.elapsed(lambda: step((images, labels)), repeats)
    return {
        "benchmark": "train_step", "model": name, "attention": attention, "implementation": implementation,
        "batch": batch, "dtype": "bfloat16", "images_per_s": batch / ms * 1e3, "peak_mib": peak,
        "ms": ms, "cuda_graph": step.captured,
    }  # fmt: skip


if __name__ == "__main__":
    common.drive(__doc__, measure, IMPLEMENTATIONS)
