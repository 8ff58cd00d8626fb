"""What the tricks of the training step are worth: a captured step with all of them, and with each turned off, in turn.

    python benchmarks/tricks.py --models spikformer_4_384 --json results/performance/tricks.json

`bits`: spikes are kept for the backward pass as bits; without them, as they are. `overwritten gradients`: a gradient
that nobody else holds is overwritten by the next one. `gradients side by side`: those of q, k and v are written into
one tensor; without it they are copied there. `ms` is the least of --rounds rounds, `peak_mib` and `eager_ms` are those
of steps without a graph. Needs a GPU: elsewhere the plain definitions run, which know none of this.
"""

from __future__ import annotations

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


def main(argv: Sequence[str] | None = None) -> None:
    parser = common.parser(__doc__)
    add = parser.add_argument
    add("--models", nargs="+", default=["spikformer_4_384"], choices=list(common.MODELS))
    add("--attentions", nargs="+", default=list(common.ATTENTIONS))
    add("--repeats", type=int, default=20)
    add("--rounds", type=int, default=3)
    add("--json", help="file for the records")
    options = parser.parse_args(argv)
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
