"""Weight files: tensors and JSON in one safetensors file, never code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from lrfdyn.errors import LrfdynError
from lrfdyn.files import write_atomic


def save_tensors(path: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any] | None = None) -> None:
    """Writes tensors by name to a safetensors file, with `meta` as JSON in its header."""
    data = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    header = {"lrfdyn": json.dumps(dict(meta or {}))}
    write_atomic(path, lambda file: save_file(data, file, metadata=header))


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Reads the tensors by name and the `meta` of a file of `save_tensors`; a damaged one is an error that names it."""
    try:
        with safe_open(path, framework="pt") as file:
            meta = json.loads((file.metadata() or {}).get("lrfdyn", "{}"))
            return {name: file.get_tensor(name) for name in file.keys()}, meta  # noqa: SIM118 (not a mapping)
    except FileNotFoundError:
        raise LrfdynError(f"weights: no such file: {path}") from None
    except (SafetensorError, json.JSONDecodeError, OSError) as error:
        raise LrfdynError(f"weights: {path} is damaged or not a safetensors file ({error})") from None


def check_fit(path: Path, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """An error that names the file and the first entry that is missing, unknown or of another shape or kind."""
    own = model.state_dict()
    for name in [*own, *tensors]:
        if name not in tensors or name not in own:
            where = "is missing" if name in own else "is unknown to the model"
            raise LrfdynError(f"weights: {path} does not fit the model: {name} {where}")
        ours, theirs = own[name], tensors[name]
        if theirs.shape != ours.shape or theirs.is_floating_point() != ours.is_floating_point():
            raise LrfdynError(
                f"weights: {path} does not fit the model: {name} expected {_kind(ours)}, got {_kind(theirs)}"
            )


def _kind(tensor: Tensor) -> str:
    kind = "" if tensor.is_floating_point() else f" of {tensor.dtype}"
    return f"{list(tensor.shape)}{kind}"
