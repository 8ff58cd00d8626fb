"""Images per second of inference: ours (norms folded, fused kernels, captured) against the plain definitions, eager
and compiled, and against SpikingJelly where it is installed, in one run.

    python benchmarks/inference.py --models spikformer_4_384 --json out.json
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import common
from benchmarks.train_step import IMPLEMENTATIONS, start
from lrfdyn.convert.fold import fold_batch_norm
from lrfdyn.ops.dispatch import plain_operations


def measure(name: str, attention: str, implementation: str, batch: int | None, repeats: int) -> dict[str, Any] | None:
    batch = batch or common.MODELS[name][3]
    model, images = start(name, attention, implementation, batch)
    if model is None:
        return None
    model.eval()
    ours = implementation == "lrfdyn"
    if ours:
        model = fold_batch_norm(model)  # type: ignore[arg-type]
    call: Any = torch.compile(model) if implementation == "reference-compiled" else model
    context = nullcontext() if ours else plain_operations()
    with torch.inference_mode(), torch.autocast(images.device.type, torch.bfloat16, cache_enabled=False), context:
        step = lambda: call(images)  # noqa: E731
        ms = common.elapsed(common.captured(step) if ours and images.is_cuda else step, repeats)
    return {
        "benchmark": "inference", "model": name, "attention": attention, "implementation": implementation,
        "batch": batch, "dtype": "bfloat16", "images_per_s": batch / ms * 1e3, "peak_mib": common.peak_mib(), "ms": ms,
    }  # fmt: skip


if __name__ == "__main__":
    common.drive(__doc__, measure, IMPLEMENTATIONS)
