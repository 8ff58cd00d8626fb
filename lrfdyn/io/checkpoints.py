"""Checkpoint files of `lrfdyn train`: how they are named, verified and read.

A checkpoint is one safetensors file of tensors (`model.*`, `optimizer.*`, and `ema.*` where there is a moving average)
and JSON (position, settings, configuration of the model) with a checksum over both.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lrfdyn.errors import LrfdynError
from lrfdyn.io.weights import load_tensors


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:09d}.safetensors"


def list_checkpoints(folder: Path) -> list[Path]:
    """The newest first."""
    return sorted(folder.glob("step-*.safetensors"), reverse=True)


def checksum(tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(meta, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b"")
    return digest.hexdigest()


def read_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and JSON, verified."""
    tensors, meta = load_tensors(path)
    expected = meta.pop("checksum", None)
    if expected is None:
        raise LrfdynError(f"checkpoint: {path} is not a checkpoint of lrfdyn train (it has no checksum)")
    if checksum(tensors, meta) != expected:
        raise LrfdynError(f"checkpoint: {path} is damaged (its checksum does not fit)")
    return tensors, meta


def newest_checkpoint(
    folder: Path, say: Callable[[str], None]
) -> tuple[Path, dict[str, Tensor], dict[str, Any]] | None:
    """The newest checkpoint that is whole; `say` hears of those that are not."""
    paths = list_checkpoints(folder)
    for path in paths:
        try:
            return path, *read_checkpoint(path)
        except LrfdynError as error:
            say(f"{error}; falling back to the one before")
    if paths:
        raise LrfdynError(f"resume: every checkpoint in {folder} is damaged; begin anew with --restart")
    return None


def model_weights(tensors: Mapping[str, Tensor], raw: bool = False) -> dict[str, Tensor]:
    """What is evaluated: the moving average where there is one, or with `raw` the weights themselves."""
    return (not raw and tensors_under(tensors, "ema.")) or tensors_under(tensors, "model.")


def tensors_under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
