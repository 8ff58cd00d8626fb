"""The whole state of a training in one file: what is in it is enough to go on as if nothing had happened.

Tensors (weights, optimiser, moving average, random generators) and JSON (position, scaler, log) are one safetensors
file with a checksum over both. A file is put in place in one step, the last two are kept, and one that is damaged is
passed over for the older one.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from lrfdyn.io.weights import checksum, list_checkpoints, save_tensors, tensors_under
from lrfdyn.training.optim import MovingAverage, uncaptured_steps

KEPT = 2
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def write_checkpoint(folder: Path, step: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> Path:
    """Puts the file in place and removes those before the last two, and those of later steps: they are damaged, or of a
    course that was given up when the run went on from an earlier one. A full disk is an OSError and changes nothing."""
    meta = json.loads(json.dumps(meta))
    path = folder / f"step-{step:09d}.safetensors"
    try:
        save_tensors(path, tensors, {**meta, "checksum": checksum(tensors, meta)})
    except SafetensorError as error:  # its way to say that the system refused to write
        raise OSError(str(error)) from None
    found = list_checkpoints(folder)
    kept = [file for file in found if file <= path][:KEPT]
    for old in {*found} - {*kept}:
        old.unlink(missing_ok=True)
    return path


def training_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, average: MovingAverage | None
) -> dict[str, Tensor]:
    """Weights, optimiser state and moving average in full, by the names of the plain model, whatever wraps or shards
    it. Every process must call this; the first one gets the tensors."""
    tensors = {f"model.{name}": value for name, value in _weights(model).items()}
    moments: Any = get_optimizer_state_dict(model, optimizer, options=WHOLE).get("state", {})
    for name, entries in moments.items():
        tensors |= {f"optimizer.{name}.{key}": torch.as_tensor(value) for key, value in entries.items()}
    if average is not None:
        with average.swapped():
            # Copied, because they share memory with the model, which comes back into it.
            tensors |= {f"ema.{name}": value.clone() for name, value in _weights(model).items()}
    return {name: value.detach().cpu() for name, value in tensors.items()}


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return cast(dict[str, Tensor], get_model_state_dict(model, options=WHOLE))


def restore_training(
    tensors: Mapping[str, Tensor], model: nn.Module, optimizer: torch.optim.Optimizer, average: MovingAverage | None
) -> None:
    """The inverse. Every process reads the file, so nothing has to be sent. All values come into the tensors that are
    there: a captured step reads and writes these and no others, and fused optimisers want moments laid out like their
    (channels-last) weights."""
    options = StateDictOptions(full_state_dict=True)
    if average is not None:
        set_model_state_dict(model, tensors_under(tensors, "ema."), options=options)
        with torch.no_grad():
            for value, live in zip(average.values, average.live(), strict=True):
                value.copy_(live)
    set_model_state_dict(model, tensors_under(tensors, "model."), options=options)
    moments: dict[str, dict[str, Tensor]] = {}
    for name, value in tensors_under(tensors, "optimizer.").items():
        parameter, _, key = name.rpartition(".")
        moments.setdefault(parameter, {})[key] = value.clone()
    if not moments:  # SGD without momentum
        return
    with uncaptured_steps():  # torch makes one, of nothing, where there are no moments yet
        groups = get_optimizer_state_dict(model, optimizer)["param_groups"]
    rates = [group["lr"] for group in optimizer.param_groups]
    places = {weight: dict(entries) for weight, entries in optimizer.state.items()}
    set_optimizer_state_dict(model, optimizer, {"state": moments, "param_groups": groups}, options=options)  # type: ignore[dict-item]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for weight, entries in optimizer.state.items():
        entries |= {key: place.copy_(entries[key]) for key, place in places[weight].items() if key in entries}


def random_state() -> dict[str, Any]:
    """The generators of this process, as JSON can hold them."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, internal, following = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "python": [version, list(internal), following],
        "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, gauss],
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state().numpy().tobytes().hex()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(_bytes(state["torch"]))
    version, internal, following = state["python"]
    random.setstate((version, tuple(internal), following))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), *rest))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_bytes(state["cuda"]))


def _bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def not_finite(tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """The names of weights that are not all numbers."""
    for name, value in tensors.items():
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            yield name
