"""Weight files, tensors and JSON in one safetensors file and never code. A checkpoint of `lrfdyn train` holds tensors
(`model.*`, `optimizer.*`, and `ema.*` where there is a moving average) and JSON (position, settings, configuration of
the model) with a checksum over both."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from lrfdyn.checks import checked
from lrfdyn.errors import LrfdynError, first_line, require
from lrfdyn.files import json_object, plain_file, write_atomic

TYPES = {"float32": torch.float32, "float64": torch.float64, "float16": torch.float16, "bfloat16": torch.bfloat16}


@checked
def save_tensors(path: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any] | None = None) -> None:
    """Writes tensors by name to a safetensors file, with `meta` as JSON in its header. A full disk is an OSError."""
    data = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    header = {"lrfdyn": json.dumps(dict(meta or {}))}
    try:
        write_atomic(path, lambda file: save_file(data, file, metadata=header))
    except SafetensorError as error:  # its way to say that the system refused to write
        raise OSError(str(error)) from None


@checked
def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Reads the tensors by name and the `meta` of a file of `save_tensors`; a damaged one is an error that names it."""
    try:
        with safe_open(plain_file(path), framework="pt") as file:
            meta = json_object((file.metadata() or {}).get("lrfdyn", "{}"))
            return {name: file.get_tensor(name) for name in file.keys()}, meta  # noqa: SIM118 (not a mapping)
    except FileNotFoundError:
        raise LrfdynError(f"weights: no such file: {path}") from None
    except (SafetensorError, ValueError, OSError) as error:
        raise LrfdynError(f"weights: {path} is damaged or not a safetensors file ({first_line(error)})") from None


def check_fit(path: Path, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """An error that names the file and the first entry that is missing, unknown, of another shape or kind, or bad."""
    own, problem = model.state_dict(), f"weights: {path} does not fit the model:"
    for name in [*own, *tensors]:
        require(name in tensors, f"{problem} {name} is missing")
        require(name in own, f"{problem} {name} is unknown to the model")
        ours, theirs = (
            f"{list(tensor.shape)}{'' if tensor.is_floating_point() else ' of integers'}"
            for tensor in (own[name], tensors[name])
        )
        require(ours == theirs, f"{problem} {name} expected {ours}, got {theirs}")
    check_usable(path, tensors)


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names of weights that are not all numbers."""
    return [name for name, value in tensors.items() if value.is_floating_point() and not value.isfinite().all()]


def round_tensors(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> tuple[dict[str, Tensor], str]:
    """Tensors in another type, those of integers as they are, and the name of the one type that they had."""
    require(dtype in TYPES.values(), f"dtype: expected one of {', '.join(TYPES)}, got {dtype}")
    kinds = {value.dtype for value in tensors.values() if value.is_floating_point()}
    names = [name for name, kind in TYPES.items() if kind in kinds]
    require(len(kinds) == len(names) == 1, f"dtype: expected a model of one type, got {sorted(map(str, kinds))}")
    held = {name: value.to(dtype) if value.is_floating_point() else value for name, value in tensors.items()}
    lost = sorted({*not_finite(held)} - {*not_finite(tensors)})
    require(not lost, f"dtype: {dtype} cannot hold {', '.join(lost[:3])}")
    return held, names[0]


def check_usable(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """An error that names the file and the first weights of no use: nan, inf, or variances below zero."""
    for name in not_finite(tensors):
        raise LrfdynError(f"weights: {path} is of no use: {name} holds numbers that are not finite")
    for name in (name for name, value in tensors.items() if name.endswith("running_var") and (value < 0).any()):
        raise LrfdynError(f"weights: {path} is of no use: {name} holds variances below zero")


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
    require(expected is not None, f"checkpoint: {path} is not a checkpoint of lrfdyn train (it has no checksum)")
    require(checksum(tensors, meta) == expected, f"checkpoint: {path} is damaged (its checksum does not fit)")
    return tensors, meta


def find_checkpoint(folder: Path, say: Callable[[str], None]) -> Path | None:
    """The newest checkpoint that is whole; `say` hears of those that are not."""
    for path in list_checkpoints(folder):
        try:
            read_checkpoint(path)
            return path
        except LrfdynError as error:
            say(f"{error}; falling back to the one before")
    require(not list_checkpoints(folder), f"resume: every checkpoint in {folder} is damaged; begin anew with --restart")
    return None


def model_weights(tensors: Mapping[str, Tensor], raw: bool = False) -> dict[str, Tensor]:
    """What is evaluated: the moving average where there is one, or with `raw` the weights themselves."""
    return (not raw and tensors_under(tensors, "ema.")) or tensors_under(tensors, "model.")


def tensors_under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
