"""Loading of checkpoints that the official code of a host wrote."""

from __future__ import annotations

import argparse
import re
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file
from torch import Tensor

from lrfdyn.checks import checked
from lrfdyn.errors import LrfdynError, require
from lrfdyn.files import expanded
from lrfdyn.io.weights import check_usable
from lrfdyn.models.base import SpikingModel

Value = TypeVar("Value")
Host = SpikingModel | type[SpikingModel]

# Where training scripts put the weights. An average over training steps is taken only where nothing else is there.
WRAPPERS = ("model", "state_dict", "model_state", "model_state_dict", "net", "network", "weights")
AVERAGES = ("model_ema", "state_dict_ema", "ema", "ema_state_dict")
PREFIXES = ("module.", "_orig_mod.", "model.")  # of parallel, compiled and wrapped models
_READING = threading.Lock()


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
        lists = {what: getattr(self, what) for what in ("dropped", "missing", "unexpected")}
        lines = [f"{what}: {_few(names)}" for what, names in lists.items() if names]
        return "\n".join([f"loaded official weights from {self.source_key or 'the whole file'}", *lines])


@checked
def load_official(model: SpikingModel, path: str | Path, strict: bool = True) -> OfficialReport:
    """Fills `model` from a checkpoint of the official code, a PyTorch or safetensors file, and reports what it did.

    Nothing in the file is executed. With `strict=False` only what the file and the model share is loaded, for
    instance where the model has another attention than the file; the rest is in the report. An error leaves the model
    as it was.

        model = lrfdyn.create_model("spikformer_8_512")
        print(lrfdyn.load_official(model, "spikformer_8_512.pth.tar"))
    """
    path = expanded(path, "path")
    require(path.is_file(), f"path: no such file: {path}")
    state, source_key = _unwrap(_read(path), path)
    while prefix := next((p for p in PREFIXES if all(name.startswith(p) for name in state)), None):
        state = {name.removeprefix(prefix): value for name, value in state.items()}
    check_usable(path, state)
    try:
        report = load_official_state(model, state, strict)
    except LrfdynError as error:
        raise LrfdynError(f"path: {path} does not fit the model: {error}") from None
    if model.official_warning:
        warnings.warn(model.official_warning, stacklevel=3)  # past the check of arguments
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
        given, wanted = list(value.shape), list(own[key].shape)
        if [n for n in given if n != 1] != [n for n in wanted if n != 1]:
            head = given and key.endswith(("head.bias", "head.weight"))
            classes = f"; the file is for {given[0]} classes, num_classes of the model is {wanted[0]}" if head else ""
            raise LrfdynError(f"{key} expected {wanted}, got {given}{classes}")
    if strict and (missing or unexpected):
        official, kind = model.options().get("attention"), model.config.get("attention")
        advice = (
            f". The official weights are for attention={official!r}: build the model with that, load, "
            f"then swap_attention(model, {kind!r}); or load only what is shared with strict=False"
        )
        differ = f"missing in the file: {_few(missing)}; unknown to the model: {_few(unexpected)}"
        raise LrfdynError(differ if kind == official else differ + advice)
    model.load_state_dict({key: value.reshape(own[key].shape) for key, value in shared.items()}, strict=False)
    return OfficialReport(tuple(dropped), tuple(missing), tuple(unexpected))


def our_key(model: Host, official: str) -> str | None:
    """Our name of an official key; None for entries that the official forward never uses."""
    for pattern, replacement in model.official_keys:
        if replacement is None and re.search(pattern, official):
            return None
        official = re.sub(pattern, replacement or "", official)
    return official


def rename_official(model: Host, state: Mapping[str, Value]) -> tuple[dict[str, Value], list[str]]:
    """`state` under our keys, and the official keys that were dropped."""
    names = {key: our_key(model, key) for key in state}
    kept = {ours: state[key] for key, ours in names.items() if ours is not None}
    return kept, [key for key, ours in names.items() if ours is None]


def _read(path: Path) -> Any:
    plain = path.suffix == ".safetensors"
    try:
        # Official checkpoints keep the arguments of the training script beside the weights. A Namespace is only data.
        # The list of what is safe is one for all threads, so they take turns.
        with _READING, torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what matters comes as an error
            return load_file(path) if plain else torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file can raise anything
        if code := re.search(r"GLOBAL (\S+)", str(error)):
            refused = f"path: {path} is refused, reading it would run code of others: it asks for {code[1]}"
            raise LrfdynError(f"{refused}; save only its state dict, where you trust it") from None
        reason = str(error).split(". ")[0] or type(error).__name__  # PyTorch goes on about running code after all
        what = "a safetensors file" if plain else "a PyTorch checkpoint"
        raise LrfdynError(f"path: {path} is damaged or not {what} ({reason})") from None


def _unwrap(content: Any, path: Path) -> tuple[dict[str, Tensor], str]:
    """The state dict in what a file holds, and the key it was found under."""
    keys = content if isinstance(content, Mapping) else {}
    for key, state in [("", content), *((key, keys.get(key)) for key in (*WRAPPERS, *AVERAGES))]:
        entries = state.items() if isinstance(state, Mapping) else ()
        if entries and all(isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in entries):
            return dict(entries), key
    found = f"the keys {_few([str(key) for key in keys])}" if keys else type(content).__name__
    raise LrfdynError(f"path: {path} has no state dict, alone or under {', '.join(WRAPPERS)}; found {found}")


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (", ".join(names[:3]) or "nothing") + more
