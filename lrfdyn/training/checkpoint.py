"""Checkpoints: tensors and JSON in one safetensors file, never code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from lrfdyn.errors import LrfdynError
from lrfdyn.files import write_atomic


def save_tensors(path: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any] | None = None) -> None:
    """A safetensors file with `meta` as JSON in its header."""
    data = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    header = {"lrfdyn": json.dumps(dict(meta or {}))}
    write_atomic(path, lambda file: save_file(data, file, metadata=header))


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and `meta` of a file; a damaged one is an error that names it."""
    try:
        with safe_open(path, framework="pt") as file:
            meta = json.loads((file.metadata() or {}).get("lrfdyn", "{}"))
            return {name: file.get_tensor(name) for name in file.keys()}, meta  # noqa: SIM118 (not a mapping)
    except FileNotFoundError:
        raise LrfdynError(f"weights: no such file: {path}") from None
    except (SafetensorError, json.JSONDecodeError, OSError) as error:
        raise LrfdynError(f"weights: {path} is damaged or not a safetensors file ({error})") from None


def save_weights(path: Path, model: nn.Module, meta: Mapping[str, Any] | None = None) -> None:
    save_tensors(path, model.state_dict(), meta)


def load_weights(path: Path, model: nn.Module) -> dict[str, Any]:
    """Fills `model` and returns the file's `meta`; weights of another model are an error."""
    tensors, meta = load_tensors(path)
    own = model.state_dict()
    for name in [*own, *tensors]:
        if name not in tensors or name not in own:
            where = "is missing" if name in own else "is unknown to the model"
            raise LrfdynError(f"weights: {path} does not fit the model: {name} {where}")
        if tensors[name].shape != own[name].shape:
            raise LrfdynError(
                f"weights: {path} does not fit the model: {name} expected {list(own[name].shape)}, "
                f"got {list(tensors[name].shape)}"
            )
    model.load_state_dict(tensors)
    return meta


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
