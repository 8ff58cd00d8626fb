"""Time of inference that stops when it is sure, against all time steps at once, on test images of a recipe.

Milliseconds are those of the processor, on one thread, for one image: other programs on the machine do not count. Both
ways have folded norms and are shown the same batches in turn.

    python benchmarks/early_exit.py RECIPE WEIGHTS --data-root DIR --exit 0.5 0.7 0.9 1 --json out.json
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import common
from lrfdyn.convert.fold import fold_batch_norm
from lrfdyn.deploy import EarlyExit
from lrfdyn.sources import find_source
from lrfdyn.training.recipes import load_recipe
from lrfdyn.training.tasks import build_data, data_model


@torch.inference_mode()
def measure(model: Any, batches: list[tuple[Tensor, Tensor]], thresholds: list[float]) -> list[dict[str, Any]]:
    """A record of the plain pass and of every threshold, over all batches of images and labels."""

    def plain(images: Tensor) -> tuple[Tensor, Tensor]:
        return model(images), torch.full((images.shape[-4],), model.time_steps)

    ways: dict[float | None, Any] = {
        None: plain,
        **{threshold: EarlyExit(model, threshold) for threshold in thresholds},
    }
    sums = {way: [0.0, 0, 0] for way in ways}  # seconds, steps, right
    for run in ways.values():
        run(batches[0][0])  # what is made at the first call
    for images, labels in batches:
        for way, run in ways.items():
            start = time.process_time()
            logits, steps = run(images)
            taken = time.process_time() - start
            for i, value in enumerate((taken, int(steps.sum()), int((logits.argmax(1) == labels).sum()))):
                sums[way][i] += value
    count = sum(len(labels) for _, labels in batches)
    return [
        {"exit": way, "images": count, "batch": len(batches[0][1]), "ms": 1e3 * seconds / count,
         "mean_steps": steps / count, "top1": 100 * right / count}
        for way, (seconds, steps, right) in sums.items()
    ]  # fmt: skip


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("recipe")
    parser.add_argument("weights")
    parser.add_argument("--data-root")
    parser.add_argument("--images", type=int, default=200, help="the first of the test images")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--exit", nargs="+", type=float, default=[0.5, 0.7, 0.9, 1.0])
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    root = {} if options.data_root is None else {"data.root": options.data_root}
    config = load_recipe(options.recipe, root)
    source = build_data(config)
    model = data_model(config, source)
    model.load_state_dict(find_source(options.weights, "weights").weights(False))
    folded, records = fold_batch_norm(model.eval()), []
    for size in options.batch:
        found = [(b.images, b.labels) for b in source.test_batches(batch_size=size)][: max(1, options.images // size)]
        records += [{"benchmark": "early_exit", "model": config.model.name, "attention": config.model.attention, **r}
                    for r in measure(folded, found, options.exit)]  # fmt: skip
        common.write(records, options.json)
    print(common.table(records, ("exit", "batch", "images", "mean_steps", "top1", "ms")))


if __name__ == "__main__":
    main()
