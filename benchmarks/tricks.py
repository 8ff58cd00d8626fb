"""What the tricks of the training step are worth: a captured step with all of them, and with each turned off, in turn.

    python benchmarks/tricks.py --models spikformer_4_384 --json results/performance/tricks.json

`bits`: spikes are kept for the backward pass as bits; without them, as they are. `overwritten gradients`: a gradient
that nobody else holds is overwritten by the next one. `gradients side by side`: those of q, k and v are written into
one tensor; without it they are copied there. `ms` is the least of --rounds rounds, `peak_mib` and `eager_ms` are those
of steps without a graph. Needs a GPU: elsewhere the plain definitions run, which know none of this.

    python benchmarks/tricks.py --memory 32 --json results/performance/tricks_memory.json

says what they are worth in memory, and needs no GPU: for so many images everything is allocated and released as on one,
and products and convolutions are computed, but no kernel is started. `peak_maps` is the peak of forward and backward
pass in feature maps of a block, 2 bytes for each of T * images * channels * tokens.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import common
from benchmarks.train_step import start
from lrfdyn import create_model
from lrfdyn.analysis.measure.inference import peak_allocation
from lrfdyn.ops import dispatch
from lrfdyn.training.step import TrainStep, capturable_adamw

ALL = "nothing"
# What to turn off: the functions that stand for it, and what they do then.
TRICKS: dict[str, tuple[tuple[str, ...], Any]] = {
    "bits": (
        ("lrfdyn.ops.lif", "lrfdyn.ops.bn_lif", "lrfdyn.ops.bits", "lrfdyn.attention.ssa"),
        ("with_step_bits", lambda spikes, bits: spikes),
    ),
    "overwritten gradients": (
        ("lrfdyn.ops.spike_conv", "lrfdyn.ops.bn_lif.triton"),
        ("may_overwrite", lambda gradient: False),
    ),
    "gradients side by side": (
        ("lrfdyn.ops.bits",),
        ("split_channels", lambda x, sizes, dim: x.split(list(sizes), dim)),
    ),
}


@contextmanager
def without(trick: str) -> Iterator[None]:
    """Inside this context the trick is turned off."""
    with ExitStack() as stack:
        if trick != ALL:
            modules, (name, instead) = TRICKS[trick]
            for module in modules:
                stack.enter_context(patch(f"{module}.{name}", instead))
        yield


def measure(name: str, attention: str, trick: str, repeats: int) -> dict[str, Any]:
    """Milliseconds and peak memory of a step without this trick."""
    model, images = start(name, attention, "lrfdyn", common.MODELS[name][2])
    assert model is not None
    labels = torch.randint(common.MODELS[name][1], (len(images),), device=images.device)
    optimizer, found = capturable_adamw(model.train(), 1e-3), {}
    with without(trick):
        for graph in (False, True):
            step = TrainStep(model, optimizer, F.cross_entropy, amp=torch.bfloat16, graph=graph)
            for _ in range(3):
                step((images, labels))
            common.free_memory()
            found["ms" if graph else "eager_ms"] = common.elapsed(lambda step=step: step((images, labels)), repeats)
            found.setdefault("peak_mib", common.peak_mib())
    return {
        "benchmark": "tricks",
        "model": name,
        "attention": attention,
        "without": trick,
        "batch": len(images),
        **found,
    }


@contextmanager
def unstarted_kernels() -> Iterator[None]:
    """Inside this context tensors on a CPU take their kernels, and those are not started, nor interpreted."""
    from triton.runtime.interpreter import GridExecutor
    from triton.runtime.jit import JITFunction

    with (
        patch.object(dispatch, "_on_kernel_device", lambda tensor: True),
        patch.object(JITFunction, "run", lambda *args, **options: None),
        patch.object(GridExecutor, "__call__", lambda *args, **options: None),
    ):
        yield


def measure_memory(name: str, attention: str, trick: str, images: int) -> dict[str, Any]:
    """Peak memory of forward and backward pass without this trick."""
    size, classes, *_ = common.MODELS[name]
    torch.manual_seed(0)
    model = create_model(name, attention=attention, num_classes=classes).to(memory_format=torch.channels_last).train()
    x = torch.empty(images, 3, size, size)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().sum()
        loss.backward()

    with unstarted_kernels(), without(trick):
        step()
        model.zero_grad()
        peak = peak_allocation(step)
    one = 2 * model.config["time_steps"] * images * model.config["dim"] * math.prod(model.grid)
    about = {"benchmark": "tricks_memory", "model": name, "attention": attention, "without": trick, "batch": images}
    return {**about, "peak_mib": peak / 2**20, "peak_maps": peak / one}


def main(argv: Sequence[str] | None = None) -> None:
    parser = common.parser(__doc__)
    add = parser.add_argument
    add("--models", nargs="+", default=["spikformer_4_384"], choices=list(common.MODELS))
    add("--attentions", nargs="+", default=list(common.ATTENTIONS))
    add("--repeats", type=int, default=20)
    add("--rounds", type=int, default=3)
    add("--memory", type=int, metavar="IMAGES", help="only memory, of so many images, without a GPU")
    add("--json", help="file for the records")
    options = parser.parse_args(argv)
    if options.memory:
        cases = product(options.models, options.attentions, (ALL, *TRICKS))
        records = [measure_memory(*what, options.memory) for what in cases]
        common.write(records, options.json)
        print(common.table(records, ("model", "attention", "without", "batch", "peak_mib", "peak_maps")))
        return
    if not torch.cuda.is_available():
        sys.exit("tricks.py: needs a GPU")
    torch.backends.cudnn.benchmark = True
    best: dict[tuple[str, ...], dict[str, Any]] = {}
    for _, *what in product(range(options.rounds), options.models, options.attentions, (ALL, *TRICKS)):
        found = measure(*what, options.repeats)
        best[tuple(what)] = min(found, best.get(tuple(what), found), key=lambda record: record["ms"])
        common.write(list(best.values()), options.json)
    for (name, attention, _), record in best.items():
        record["slower_percent"] = 100 * (record["ms"] / best[name, attention, ALL]["ms"] - 1)
    common.write(list(best.values()), options.json)
    columns = ("model", "attention", "without", "ms", "slower_percent", "peak_mib", "eager_ms")
    print(common.table(list(best.values()), columns))


if __name__ == "__main__":
    main()
