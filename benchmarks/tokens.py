"""Time and memory of one attention against its number of tokens, with as many tokens in all, so that a flat line is
linear cost: ours against the official form of SSA, (q k^T) v, and softmax attention as PyTorch has it, which is
FlashAttention on a GPU.

    python benchmarks/tokens.py --json results/performance/tokens_h200.json

Only what mixes tokens is measured, without projections, neurons and norms: "LRF-Dyn" is the dendrites, and "with
stencils" what is added to them too. On a GPU in bfloat16 with the kernels, on a CPU in float32 with the plain forms on
one core. `ms` is forward without gradients, `training_ms` forward and backward, `peak_mib` the memory of these besides
the inputs. What does not fit into memory has no record.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import common
from lrfdyn.ops.dendrite import dendrite
from lrfdyn.ops.lrf import lrf
from lrfdyn.ops.spike_attention import causal_spike_attention, spike_attention

CHANNELS, HEADS, MODES, SCALE, RATE = 512, 8, 4, 0.125, 0.1
DILATIONS = (1, 3, 5)
Mix = Callable[..., Tensor]


def official_ssa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """All weights between tokens, then their sums, as Spikformer's own code has it."""
    return (q @ k.mT) @ v * SCALE


def dendrites(u: Tensor, decay: Tensor, frequency: Tensor, weight: Tensor) -> Tensor:
    return dendrite(u, decay, frequency, weight)[0]


def dendrites_and_stencils(u: Tensor, decay: Tensor, frequency: Tensor, weight: Tensor, stencils: Tensor) -> Tensor:
    y, (height, width) = dendrites(u, decay, frequency, weight), grid_of(u.shape[1])
    grid = y.mT.unflatten(2, (height, width)).contiguous(memory_format=torch.channels_last)
    return lrf(grid, stencils, DILATIONS, grid)


def grid_of(tokens: int) -> tuple[int, int]:
    height = 2 ** (int(math.log2(tokens)) // 2)
    return height, tokens // height


def spikes(*shape: int, device: str, dtype: torch.dtype) -> Tensor:
    return (torch.rand(shape, device=device) < RATE).to(dtype)


def mixes(batch: int, tokens: int, device: str, dtype: torch.dtype) -> dict[str, tuple[Mix, list[Tensor]]]:
    """What is measured, with its inputs."""
    drawn = [spikes(batch, tokens, HEADS, CHANNELS // HEADS, device=device, dtype=dtype) for _ in range(3)]
    heads = [x.transpose(1, 2) for x in drawn]
    modes = [torch.rand(CHANNELS, MODES, device=device) for _ in range(2)]
    modes.append(torch.randn(CHANNELS, MODES, 2, device=device))
    stencils = torch.randn(len(DILATIONS), CHANNELS, 3, 3, device=device)
    u = drawn[0].flatten(2)
    return {
        "LRF-Dyn": (dendrites, [u, *modes]),
        "LRF-Dyn, two directions": (dendrites, [u, *(torch.stack((mode, mode.flip(0))) for mode in modes)]),
        "LRF-Dyn with stencils": (dendrites_and_stencils, [u, *modes, stencils]),
        "SSA": (lambda *qkv: spike_attention(*qkv, SCALE), heads),
        "causal SSA": (lambda *qkv: causal_spike_attention(*qkv, SCALE)[0], heads),
        "SSA, official form": (official_ssa, heads),
        "softmax attention": (F.scaled_dot_product_attention, heads),
    }


def measure(mix: Mix, inputs: Sequence[Tensor], repeats: int) -> dict[str, float | None]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    device = leaves[0].device.type
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        with torch.no_grad():
            gradient = torch.randn_like(mix(*leaves))
            ms = common.elapsed(lambda: mix(*leaves), repeats, warm_up=1)
        common.free_memory()
        held = torch.cuda.memory_allocated() / 2**20 if device == "cuda" else 0.0
        training_ms = common.elapsed(lambda: torch.autograd.grad(mix(*leaves), leaves, gradient), repeats, warm_up=1)
    peak = common.peak_mib()
    return {"ms": ms, "training_ms": training_ms, "peak_mib": None if peak is None else peak - held}


def main(argv: Sequence[str] | None = None) -> None:
    parser = common.parser(__doc__)
    add = parser.add_argument
    add("--tokens", nargs="+", type=int, default=[2**n for n in range(6, 15)], help="powers of two")
    add("--total", type=int, default=2**16, help="tokens of all images together")
    add("--repeats", type=int, default=10)
    add("--json", help="file for the records")
    options = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    if device == "cpu":
        torch.set_num_threads(1)
    records: list[dict[str, Any]] = []
    for tokens in options.tokens:
        batch = max(1, options.total // tokens)
        for name, (mix, inputs) in mixes(batch, tokens, device, dtype).items():
            common.free_memory()
            with common.attempt(f"{name}, {tokens} tokens"):
                found = measure(mix, inputs, options.repeats)
                facts = {"benchmark": "tokens", "attention": name, "tokens": tokens, "batch": batch}
                records.append({**facts, "channels": CHANNELS, "heads": HEADS, "dtype": str(dtype)[6:], **found})
                common.write(records, options.json)
    print(common.table(records, ("attention", "tokens", "batch", "ms", "training_ms", "peak_mib")))


if __name__ == "__main__":
    main()
