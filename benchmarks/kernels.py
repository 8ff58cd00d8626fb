"""Every kernel: time, bytes that must move, and the share of the copy bandwidth measured in the same run, against the
plain definition eager and compiled.

Times are those of a captured graph that holds nothing but the operation; the backward time is that of forward and
backward together less that of forward. Bytes count each input and output once, statistics read their input once more
(a batch norm needs two passes), 16 bits per element.

    python benchmarks/kernels.py --json out.json
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import common
from lrfdyn.ops.bn_lif import Integer, Norm, bn_lif
from lrfdyn.ops.dendrite import dendrite
from lrfdyn.ops.dispatch import plain_operations
from lrfdyn.ops.lif import Dynamics, integer_spike, lif
from lrfdyn.ops.lrf import lrf
from lrfdyn.ops.spike_attention import causal_spike_attention, spike_attention

DTYPE = torch.bfloat16
Case = tuple[str, str, Callable[..., Tensor], list[Tensor], int, int]


def graph_ms(function: Callable[[], Any], repeats: int = 20) -> float:
    """Milliseconds of one call inside a captured graph of several."""
    return common.elapsed(common.captured(function, calls=4), repeats) / 4


def channels_last(*shape: int) -> Tensor:
    time, batch, channels, height, width = shape
    values = 2 * torch.randn(time, batch, height, width, channels, device="cuda") + 1
    return values.to(DTYPE).permute(0, 1, 4, 2, 3)


def spikes(*shape: int) -> Tensor:
    return (torch.rand(shape, device="cuda") < 0.3).to(DTYPE)


LIF_NEURON = Dynamics.lif()
# Of batch norms: time, batch, channels, side, neuron, pool, whether there is a residual, repeats of one time step.
NORMS: tuple[tuple[int, int, int, int, Dynamics | Integer | None, str, bool, int], ...] = (
    (4, 256, 384, 8, LIF_NEURON, "", False, 1),
    (4, 256, 384, 8, LIF_NEURON, "", True, 1),
    (4, 256, 1536, 8, LIF_NEURON, "", False, 1),
    (4, 256, 96, 32, LIF_NEURON, "", False, 1),
    (4, 256, 192, 32, LIF_NEURON, "pool", False, 1),
    (4, 64, 512, 14, LIF_NEURON, "", False, 1),
    # Of QKFormer: the stem on a static image, and the embeddings of two stages.
    (1, 32, 64, 224, LIF_NEURON, "pool_first", False, 4),
    (4, 32, 128, 112, LIF_NEURON, "pool_first", False, 1),
    (4, 32, 512, 28, LIF_NEURON, "pool_first", False, 1),
    # Of SDT-V2 and SDT-V3: the stem on a static image, ends of branches, and inside them.
    (1, 32, 48, 112, None, "", False, 4),
    (4, 32, 96, 56, None, "", True, 1),
    (4, 64, 384, 14, None, "", True, 1),
    (4, 64, 384, 14, None, "", False, 1),
    (1, 64, 64, 56, None, "", True, 1),
    (1, 64, 128, 56, Integer(), "", False, 1),
    # Of SDT-V1: the last convolution of the stem.
    (4, 32, 512, 28, None, "pool_first", False, 1),
)


def norm_case(
    time: int, batch: int, channels: int, side: int, neuron: Dynamics | Integer | None, pool: str, residual: bool,
    repeats: int,
) -> Case:  # fmt: skip
    """A batch norm with what follows it."""
    x = channels_last(time, batch, channels, side, side)
    weight, bias = torch.ones(channels, device="cuda"), torch.zeros(channels, device="cuda")
    mean, var = torch.zeros_like(bias), torch.ones_like(bias)
    options: dict[str, Any] = {pool: True} if pool else {}
    if residual:
        options["residual"] = channels_last(time, batch, channels, side, side)
    if repeats > 1:
        options["repeats"] = repeats

    def norm_fire(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return bn_lif(x, Norm(weight, bias, mean, var, True), neuron, **options)

    n, m = x.numel(), x.numel() * repeats // (4 if pool else 1)
    kind = {type(None): " no neuron", Integer: " integer"}.get(type(neuron), "")
    label = f"T{time * repeats} B{batch} C{channels} {side}x{side}{kind}" + f" {pool.replace('_', ' ')}" * bool(pool)
    label += " residual" * residual + " repeated" * (repeats > 1)
    # Backward: x and the gradient once for the sums, once for the result.
    return "bn_lif", label, norm_fire, [x, weight, bias], 2 * n + m * (1 + residual), 3 * n + 2 * m


def cases() -> list[Case]:
    """Operation, shape, function, inputs, and elements that must move forward and backward."""
    out: list[Case] = []
    for shape in NORMS:
        out.append(norm_case(*shape))
    for tokens, channels, heads, batch, side in ((64, 384, 12, 1024, 8), (196, 512, 8, 256, 14)):
        label = f"B{batch} N{tokens} C{channels}"
        n = batch * tokens * channels
        x = channels_last(4, batch // 4, channels, side, side)
        out.append(("lif", label, lambda x: lif(x, Dynamics.lif(threshold=0.5))[0], [x], 2 * n, 3 * n))
        out.append(("integer_spike", label, lambda x: integer_spike(x), [x], 2 * n, 3 * n))
        stencil = torch.randn(2, channels, 3, 3, device="cuda")

        def run_lrf(x, weight):
            with torch.autocast("cuda", DTYPE):
                return lrf(x, weight, (3, 5), x)

        out.append(("lrf + x", label, run_lrf, [x.flatten(0, 1), stencil], 2 * n, 3 * n))
        modes = [torch.rand(channels, 4, device="cuda"), torch.rand(channels, 4, device="cuda")]
        modes.append(torch.randn(channels, 4, 2, device="cuda"))

        def run_dendrite(u, *modes):
            with torch.autocast("cuda", DTYPE):
                return dendrite(u, *modes)[0]

        out.append(("dendrite", label, run_dendrite, [spikes(batch, tokens, channels), *modes], 2 * n, 3 * n))
        both = [torch.stack((mode, mode.flip(0))) for mode in modes]
        tokens_in = spikes(batch, tokens, channels)
        out.append(("dendrite, two directions", label, run_dendrite, [tokens_in, *both], 2 * n, 3 * n))
        qkv = [spikes(batch, tokens, heads, channels // heads).transpose(1, 2) for _ in range(3)]
        out.append(("spike_attention", label, lambda *x: spike_attention(*x, 0.125), qkv, 4 * n, 7 * n))
        causal = lambda *x: causal_spike_attention(*x, 0.125)[0]  # noqa: E731
        out.append(("causal_spike_attention", label, causal, qkv, 4 * n, 7 * n))
    return out


def times(function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> tuple[float, float]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    with torch.no_grad():
        grad = torch.randn_like(function(*leaves))
    # With gradients on, so that forward keeps what backward needs.
    forward = graph_ms(lambda: function(*leaves))
    both = graph_ms(lambda: torch.autograd.grad(function(*leaves), leaves, grad))
    return forward, both - forward


def copy_bandwidth() -> float:
    """GB/s of a device-to-device copy of 1 GiB, bytes read and written."""
    x = torch.randn(2**29, device="cuda").to(DTYPE)
    y = torch.empty_like(x)
    return 2 * x.nbytes / common.elapsed(lambda: y.copy_(x), 20) / 1e6


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--json")
    parser.add_argument("--ops", nargs="+", help="only these")
    parser.add_argument("--implementations", nargs="+", default=["kernel", "reference", "reference-compiled"])
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("kernels.py: needs a GPU")
    copy = copy_bandwidth()
    print(f"copy {copy:.0f} GB/s")
    records: list[dict[str, Any]] = []
    for op, shape, function, inputs, forward_elements, backward_elements in cases():
        if options.ops and op not in options.ops:
            continue
        for implementation in options.implementations:
            common.free_memory()
            torch.compiler.reset()
            measured: tuple[float, ...] = ()
            with common.attempt(f"{op} {shape} {implementation}"):
                compiled = implementation.endswith("compiled")
                with nullcontext() if implementation == "kernel" else plain_operations():
                    measured = times(torch.compile(function) if compiled else function, inputs)
            if not measured:
                continue
            elements = (forward_elements, backward_elements)
            for direction, ms, count in zip(("forward", "backward"), measured, elements, strict=True):
                rate = 2 * count / ms / 1e6
                records.append(
                    {"benchmark": "kernels", "op": op, "shape": shape, "direction": direction,
                     "implementation": implementation, "dtype": "bfloat16", "ms": ms, "gb_per_s": rate,
                     "share_of_copy": rate / copy, "copy_gb_per_s": copy}
                )  # fmt: skip
                print(op, shape, direction, implementation, f"{1e3 * ms:.1f} us, {rate / copy:.0%}", flush=True)
            common.write(records, options.json)
    print(common.table(records, ("op", "shape", "direction", "implementation", "ms", "gb_per_s", "share_of_copy")))


if __name__ == "__main__":
    main()
