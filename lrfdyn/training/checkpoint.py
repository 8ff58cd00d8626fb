"""Checkpoints of a training: weights, optimiser state and JSON in one safetensors file, never code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lrfdyn.weights import load_tensors, save_tensors


def save_training(path: Path, model: nn.Module, optimizer: Optimizer, meta: Mapping[str, Any]) -> None:
    """Weights, optimiser state and `meta` in one file."""
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{name}": torch.as_tensor(value) for name, value in state.items()}
    save_tensors(path, tensors, meta)


def load_training(path: Path, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The inverse of `save_training`."""
    tensors, meta = load_tensors(path)
    model.load_state_dict({n.removeprefix("model."): v for n, v in tensors.items() if n.startswith("model.")})
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        if name.startswith("optimizer."):
            _, index, key = name.split(".", 2)
            state.setdefault(int(index), {})[key] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    return meta
