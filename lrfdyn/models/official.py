"""Loading of checkpoints that the official code of a host wrote."""

from __future__ import annotations

import argparse
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file
from torch import Tensor

from lrfdyn.errors import LrfdynError, require
from lrfdyn.models.base import SpikingModel

Value = TypeVar("Value")

# Where training scripts put the weights. An average over training steps is taken only where nothing else is there.
WRAPPERS = ("model", "state_dict", "model_state", "model_state_dict", "net", "network", "weights")
AVERAGES = ("model_ema", "state_dict_ema", "ema", "ema_state_dict")
PREFIXES = ("module.", "_orig_mod.", "model.")  # of parallel, compiled and wrapped models


@dataclass(frozen=True)
class OfficialReport:
    """What `load_official` did. `source_key` says where in the file the weights were, `""` if it holds nothing else.
    `dropped` are official entries that the official forward never uses. `missing` in the file and `unexpected` by the
    model, under our keys, are empty when loading was strict."""

    dropped: tuple[str, ...]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    source_key: str = ""

    def __str__(self) -> str:
        lines = [f"loaded official weights from {self.source_key or 'the whole file'}"]
        for what in ("dropped", "missing", "unexpected"):
            if names := getattr(self, what):
                lines.append(f"{what}: {_few(names)}")
        return "\n".join(lines)


def load_official(model: SpikingModel, path: str | Path, strict: bool = True) -> OfficialReport:
    """Fills `model` from a checkpoint of the official code, a PyTorch or safetensors file, and reports what it did.

    Nothing in the file is executed. With `strict=False` only what the file and the model share is loaded, for
    instance where the model has another attention than the file; the rest is in the report. An error leaves the model
    as it was.

        model = lrfdyn.create_model("spikformer_8_512")
        print(lrfdyn.load_official(model, "spikformer_8_512.pth.tar"))
    """
    path = Path(path)
    state, source_key = read_official(path)
    try:
        report = load_official_state(model, state, strict)
    except LrfdynError as error:
        raise LrfdynError(f"path: {path} does not fit the model: {error}") from None
    if message := model.official_warning:
        warnings.warn(message, stacklevel=2)
    return replace(report, source_key=source_key)


def load_official_state(model: SpikingModel, state: Mapping[str, Tensor], strict: bool = True) -> OfficialReport:
    """Fills `model` from an official state dict. Linear layers and 1-D convolutions become 1x1 convolutions."""
    own = model.state_dict()
    renamed, dropped = rename_official(model, state)
    missing = [key for key in own if key not in renamed]
    unexpected = [key for key in renamed if key not in own]
    shared = {key: value for key, value in renamed.items() if key in own}
    require(bool(shared), f"no key is known, the first are {_few(list(state))}; another kind of model?")
    for key, value in shared.items():
        _check_shape(key, value, own[key])
    if strict and (missing or unexpected):
        raise LrfdynError(
            f"missing in the file: {_few(missing)}; unknown to the model: {_few(unexpected)}{_advice(model)}"
        )
    fitting = {key: value.reshape(own[key].shape) for key, value in shared.items()}
    model.load_state_dict(fitting, strict=False)
    return OfficialReport(tuple(dropped), tuple(missing), tuple(unexpected))


def our_key(model: SpikingModel | type[SpikingModel], official: str) -> str | None:
    """Our name of an official key; None for entries that the official forward never uses."""
    for pattern, replacement in model.official_keys:
        if replacement is None and re.search(pattern, official):
            return None
        official = re.sub(pattern, replacement or "", official)
    return official


def rename_official(
    model: SpikingModel | type[SpikingModel], state: Mapping[str, Value]
) -> tuple[dict[str, Value], list[str]]:
    """`state` under our keys, and the official keys that were dropped."""
    names = {key: our_key(model, key) for key in state}
    kept = {ours: state[key] for key, ours in names.items() if ours is not None}
    return kept, [key for key, ours in names.items() if ours is None]


def read_official(path: Path) -> tuple[dict[str, Tensor], str]:
    """The official state dict in a file, and the key it was found under."""
    require(path.is_file(), f"path: no such file: {path}")
    content = _read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path)
    state, key = _unwrap(content, path)
    while prefix := next((p for p in PREFIXES if all(name.startswith(p) for name in state)), None):
        state = {name.removeprefix(prefix): value for name, value in state.items()}
    return state, key


def _read_safetensors(path: Path) -> Any:
    try:
        return load_file(path)
    except Exception as error:  # a damaged file can raise anything
        raise LrfdynError(f"path: {path} is damaged or not a safetensors file ({error})") from None


def _read_torch(path: Path) -> Any:
    try:
        # Official checkpoints keep the arguments of the training script beside the weights. A Namespace is only data.
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what matters comes as an error
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        if code := re.search(r"GLOBAL (\S+)", str(error)):
            raise LrfdynError(
                f"path: {path} is refused, reading it would run code of others: it asks for {code[1]}; "
                "save only its state dict, where you trust it"
            ) from None
        reason = str(error).split(". ")[0] or type(error).__name__  # PyTorch goes on about running code after all
        raise LrfdynError(f"path: {path} is damaged or not a PyTorch checkpoint ({reason})") from None


def _unwrap(content: Any, path: Path) -> tuple[dict[str, Tensor], str]:
    if _is_state(content):
        return dict(content), ""
    keys = content if isinstance(content, Mapping) else {}
    for key in (*WRAPPERS, *AVERAGES):
        if key in keys and _is_state(keys[key]):
            return dict(keys[key]), key
    found = f"the keys {_few([str(key) for key in keys])}" if keys else type(content).__name__
    raise LrfdynError(f"path: {path} has no state dict, alone or under {', '.join(WRAPPERS)}; found {found}")


def _is_state(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and bool(value)
        and all(isinstance(key, str) and isinstance(tensor, Tensor) for key, tensor in value.items())
    )


def _check_shape(key: str, given: Tensor, own: Tensor) -> None:
    if [n for n in given.shape if n != 1] == [n for n in own.shape if n != 1]:
        return
    message = f"{key} expected {list(own.shape)}, got {list(given.shape)}"
    if key.endswith(("head.bias", "head.weight")):
        message += f"; the file is for {given.shape[0]} classes, num_classes of the model is {own.shape[0]}"
    raise LrfdynError(message)


def _advice(model: SpikingModel) -> str:
    """How to load into a model with another attention than the official one."""
    official = model.options().get("attention")
    kind = model.config.get("attention")
    if kind == official:
        return ""
    return (
        f". The official weights are for attention={official!r}: build the model with that, load, "
        f"then swap_attention(model, {kind!r}); or load only what is shared with strict=False"
    )


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (", ".join(names[:3]) or "nothing") + more
