"""Models as ExecuTorch programs: convolutions and matrix products in XNNPACK, the rest in portable kernels.

A program has no room for other data, so what describes it lies beside it: `model.pte` and `model.pte.json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from lrfdyn.deploy.export.onnx import without_remarks
from lrfdyn.errors import LrfdynError, require
from lrfdyn.files import discard_stderr, read_json, write_json

MISSING = "needs executorch; pip install 'lrfdyn[executorch]'"


def sidecar(path: Path) -> Path:
    """The file beside the program `path` that describes it."""
    return path.with_name(path.name + ".json")


def write_executorch(
    form: nn.Module, sample: torch.Tensor, path: Path, facts: Mapping[str, Any], most_images: int
) -> None:
    """Writes the program of `form`, traced with the images `sample` `[2, C, H, W]`, and its description `facts`. Memory
    is planned for `most_images`, and no more can be shown at once."""
    try:
        with discard_stderr(), without_remarks():
            from executorch.backends.xnnpack.partition.config import (
                AddmmConfig,
                BMMConfig,
                ConvolutionConfig,
                LinearConfig,
                MaxPool2dConfig,
                MMConfig,
            )
            from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
            from executorch.exir import to_edge_transform_and_lower
    except ImportError:
        raise LrfdynError(f"format: executorch {MISSING}") from None
    # What is worth a call into the library: sums of spikes in between would tear the graph into hundreds of pieces.
    worthwhile = [AddmmConfig, BMMConfig, ConvolutionConfig, LinearConfig, MaxPool2dConfig, MMConfig]
    batch = torch.export.Dim("batch", min=1, max=most_images)
    shapes, shown = (None, sample[:1]) if most_images == 1 else (({0: batch},), sample)
    with without_remarks():
        program = torch.export.export(form, (shown,), dynamic_shapes=shapes, strict=False)
        # While a program is lowered, PyTorch asks which of its own convolutions would run; some take fewer than 16
        # images only, and the answer for the sample would rule out larger batches although none of them will be used.
        sizes = [size for node in program.graph.nodes for size in getattr(node.meta.get("val"), "shape", ())]
        traced = next((size for size in sizes if isinstance(size, torch.SymInt)), None)
        with nullcontext() if traced is None else traced.node.shape_env.suppress_guards():
            lowered = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner(configs=worthwhile)])
            built = lowered.to_executorch()
    with open(path, "wb") as file:
        built.write_to_file(file)
    write_json(sidecar(path), {**facts, "most_images": most_images})


class ExecutorchRunner:
    """An exported file in ExecuTorch: images `[B, C, H, W]` to logits `[B, classes]`, both in float32; B is at most
    `most_images`."""

    def __init__(self, path: Path) -> None:
        try:
            with discard_stderr(), without_remarks():
                from executorch.runtime import Runtime, Verification
        except ImportError:
            raise LrfdynError(f"runtime: executorch {MISSING}") from None
        require(path.is_file(), f"model: no such file: {path}")
        beside = sidecar(path)
        require(beside.is_file(), f"model: {path} needs its description {beside.name} beside it, which is not there")
        self.facts: dict[str, Any] = read_json(beside, "model")
        known = isinstance(self.facts, dict) and isinstance(self.facts.get("most_images"), int)
        require(known, f"model: {beside} is not the description of an exported model")
        self.most_images: int | None = self.facts["most_images"]
        try:
            with discard_stderr():
                self.program = Runtime.get().load_program(path, verification=Verification.InternalConsistency)
                self.method = self.program.load_method("forward")
        except (RuntimeError, ValueError, OSError) as error:
            raise LrfdynError(f"model: {path} is not an ExecuTorch program that can be run ({error})") from None

    def __call__(self, images: np.ndarray) -> np.ndarray:
        (logits,) = self.method.execute([torch.from_numpy(images)])
        return logits.numpy().copy()
