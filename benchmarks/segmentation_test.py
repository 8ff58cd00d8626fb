"""Where the time of a test on whole images goes: batches of a size that is seen for the first time against later ones.

Two tests of an untrained network in one process. What is slow in the first alone is prepared once for every size
(convolution plans, memory) or once at all (imports, kernels that are loaded); --profile says which operations it is.

    python benchmarks/segmentation_test.py --root DATA --profile
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.common import now, parser, table
from lrfdyn.data import Batch
from lrfdyn.segmentation.data import Ade20k
from lrfdyn.segmentation.inference import pad_to_stride
from lrfdyn.segmentation.metric import build_confusion
from lrfdyn.training.processes import build_accelerator
from lrfdyn.training.recipes import load_recipe
from lrfdyn.training.tasks import TestRun, build_data, data_model, task_of

LONGEST_OPERATIONS = 15


def timed(batches: Iterator[Batch], stride: int, seen: set[Any], record: dict[str, Any]) -> Iterator[Batch]:
    """The batches, with the seconds that whoever takes them spends on each."""
    for batch in batches:
        shape = tuple(pad_to_stride(batch.images[:, :1], stride).shape)
        kind = "known" if shape in seen else "new"
        seen.add(shape)
        began = now()
        yield batch
        record[f"{kind}_batches"] += 1
        record[f"{kind}_s"] += now() - began


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    command_line = parser(__doc__)
    add = command_line.add_argument
    add("--root", required=True, help="folder that holds ADEChallengeData2016")
    add("--recipe", default="ade20k_subset")
    add("--set", nargs=2, action="append", default=[], metavar=("KEY", "VALUE"), help="a key of the recipe")
    add("--profile", action="store_true", help="print the operations that the host spends most time on in the first")
    args = command_line.parse_args(argv)
    config = load_recipe(args.recipe, {"attention": "ssa", "data.root": args.root, **dict(args.set)})
    accelerator, task = build_accelerator(config.run), task_of(config.data.name)
    began = now()
    build_confusion(2)  # imports torchmetrics
    print(f"torchmetrics: {now() - began:.1f} s")
    began = now()
    source = build_data(config)
    assert isinstance(source, Ade20k)
    print(f"data: {now() - began:.1f} s")
    model = data_model(config, source).to(accelerator.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    seen: set[Any] = set()
    records: list[dict[str, Any]] = []
    usual = source.test_batches
    for number in (1, 2):
        record = {"test": number, "new_batches": 0, "new_s": 0.0, "known_batches": 0, "known_s": 0.0}
        source.test_batches = lambda r=record, **how: timed(usual(**how), model.stride, seen, r)  # type: ignore[method-assign]
        with torch.profiler.profile() if args.profile and number == 1 else nullcontext() as profile:
            began = now()
            task.test(model, TestRun(source, config.run.test_batch_size, accelerator, torch.float32))
            record["all_s"] = now() - began
        records.append(record)
        if args.profile and number == 1:
            print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=LONGEST_OPERATIONS))
    print(table(records, list(records[0])))
    return records


if __name__ == "__main__":
    main()
