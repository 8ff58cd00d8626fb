"""From the keys of the official code to ours."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

from torch import Tensor

from lrfdyn.errors import LrfdynError
from lrfdyn.models.base import SpikingModel

Value = TypeVar("Value")


def our_key(model: SpikingModel | type[SpikingModel], official: str) -> str | None:
    """Our name of an official key; None for entries that the official forward never uses."""
    for pattern, replacement in model.official_keys:
        if re.match(pattern, official):
            return None if replacement is None else re.sub(pattern, replacement, official)
    return official


def rename_official(
    model: SpikingModel | type[SpikingModel], state: Mapping[str, Value]
) -> tuple[dict[str, Value], list[str]]:
    """`state` under our keys, and the official keys that were dropped."""
    names = {key: our_key(model, key) for key in state}
    kept = {ours: state[key] for key, ours in names.items() if ours is not None}
    return kept, [key for key, ours in names.items() if ours is None]


def from_official(model: SpikingModel, state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """A state dict for `model` from the official one, and the dropped keys. Linear layers and 1-D convolutions
    become 1x1 convolutions."""
    own = model.state_dict()
    renamed, dropped = rename_official(model, state)
    missing, unknown = sorted(own.keys() - renamed.keys()), sorted(renamed.keys() - own.keys())
    if missing or unknown:
        raise LrfdynError(f"state: does not fit the model; missing {missing[:3]}, unexpected {unknown[:3]}")
    for key, value in renamed.items():
        if value.numel() != own[key].numel():
            raise LrfdynError(f"state: {key} expected {list(own[key].shape)}, got {list(value.shape)}")
    return {key: value.reshape(own[key].shape) for key, value in renamed.items()}, dropped
