"""Checkpoints of a training: weights, optimiser state and JSON in one safetensors file, never code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lrfdyn.errors import LrfdynError
from lrfdyn.io.weights import check_fit, load_tensors, save_tensors


def save_training(path: Path, model: nn.Module, optimizer: Optimizer, meta: Mapping[str, Any]) -> None:
    """Weights, optimiser state and `meta` in one file."""
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{name}": torch.as_tensor(value) for name, value in state.items()}
    save_tensors(path, tensors, meta)


def load_training(path: Path, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The inverse of `save_training`; a checkpoint of another training is an error."""
    tensors, meta = load_tensors(path)
    weights: dict[str, Tensor] = {}
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        part, _, rest = name.partition(".")
        index, _, key = rest.partition(".")
        if part == "model":
            weights[rest] = value
        elif part == "optimizer" and index.isdecimal():
            state.setdefault(int(index), {})[key] = value
        else:
            raise LrfdynError(f"checkpoint: {path} is not of a training: unknown entry {name}")
    check_fit(path, model, weights)
    model.load_state_dict(weights)
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    return meta
