"""The whole state of a training: what a checkpoint (see `lrfdyn.io.weights`) holds is enough to go on as if nothing
had happened. A file is put in place in one step, and the last two are kept."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as states
from torch.optim import Optimizer

from lrfdyn.data import DataSource
from lrfdyn.errors import require
from lrfdyn.io.weights import checksum, list_checkpoints, save_tensors, tensors_under
from lrfdyn.training.optim import NOT_CAPTURED, MovingAverage, without_warning

WHOLE = states.StateDictOptions(full_state_dict=True, cpu_offload=True)


def write_checkpoint(folder: Path, step: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> Path:
    """Puts the file in place and removes those before the last two, and those of later steps: they are damaged, or of a
    course that was given up when the run went on from an earlier one. A full disk is an OSError and changes nothing."""
    meta = json.loads(json.dumps(meta))
    path = folder / f"step-{step:09d}.safetensors"
    save_tensors(path, tensors, {**meta, "checksum": checksum(tensors, meta)})
    found = list_checkpoints(folder)
    for old in {*found} - {*[file for file in found if file <= path][:2]}:
        old.unlink(missing_ok=True)
    return path


def training_tensors(model: nn.Module, optimizer: Optimizer, average: MovingAverage | None) -> dict[str, Tensor]:
    """Weights, optimiser state and moving average in full, by the names of the plain model, whatever wraps or shards
    it. Every process must call this; the first one gets the tensors."""
    weights: Any = states.get_model_state_dict(model, options=WHOLE)
    tensors: dict[str, Tensor] = {f"model.{name}": value for name, value in weights.items()}
    moments: Any = states.get_optimizer_state_dict(model, optimizer, options=WHOLE).get("state", {})
    for name, entries in moments.items():
        tensors |= {f"optimizer.{name}.{key}": torch.as_tensor(value) for key, value in entries.items()}
    if average is not None:
        with average.swapped():
            weights = states.get_model_state_dict(model, options=WHOLE)
            # Copied, because they share memory with the model, which comes back into it.
            tensors |= {f"ema.{name}": value.clone() for name, value in weights.items()}
    return {name: value.detach().cpu() for name, value in tensors.items()}


def restore_training(
    tensors: Mapping[str, Tensor], model: nn.Module, optimizer: Optimizer, average: MovingAverage | None
) -> None:
    """The inverse. Every process reads the file, so nothing has to be sent. All values come into the tensors that are
    there: a captured step reads and writes these and no others, and fused optimisers want moments laid out like their
    (channels-last) weights."""
    options = states.StateDictOptions(full_state_dict=True)
    if average is not None:
        states.set_model_state_dict(model, tensors_under(tensors, "ema."), options=options)
        with torch.no_grad():
            for value, live in zip(average.values, average.live(), strict=True):
                value.copy_(live)
    states.set_model_state_dict(model, tensors_under(tensors, "model."), options=options)
    moments: dict[str, dict[str, Tensor]] = {}
    for name, value in tensors_under(tensors, "optimizer.").items():
        parameter, _, key = name.rpartition(".")
        moments.setdefault(parameter, {})[key] = value.clone()
    if not moments:  # SGD without momentum
        return
    with without_warning(NOT_CAPTURED):  # torch makes one, of nothing, where there are no moments yet
        groups = states.get_optimizer_state_dict(model, optimizer)["param_groups"]
    rates = [group["lr"] for group in optimizer.param_groups]
    places = {weight: dict(entries) for weight, entries in optimizer.state.items()}
    whole: Any = {"state": moments, "param_groups": groups}
    states.set_optimizer_state_dict(model, optimizer, whole, options=options)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for weight, entries in optimizer.state.items():
        entries |= {key: place.copy_(entries[key]) for key, place in places[weight].items() if key in entries}


def random_state() -> dict[str, Any]:
    """The generators of this process, as JSON can hold them; that of a GPU where it is in use."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    on_device = {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_initialized() else {}
    generators = {"torch": torch.get_rng_state(), **on_device}
    return {
        **{name: state.numpy().tobytes().hex() for name, state in generators.items()},
        "python": random.getstate(),
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    for name, restore in (("torch", torch.set_rng_state), ("cuda", torch.cuda.set_rng_state)):
        if name in state and (name == "torch" or torch.cuda.is_available()):
            restore(torch.frombuffer(bytearray.fromhex(state[name]), dtype=torch.uint8))
    version, internal, following = state["python"]
    random.setstate((version, tuple(internal), following))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), *rest))


def data_identity(source: DataSource) -> dict[str, Any]:
    """What a checkpoint keeps of its data, which may move to another folder but not change."""
    names = None if source.class_names is None else list(source.class_names)
    return {"images": source.train_images, "classes": source.num_classes, "class_names": names}


def check_same_data(path: Path, meta: Mapping[str, Any], source: DataSource) -> None:
    """Whether the run of a checkpoint may go on with this data; what either of them does not know is passed."""
    here = data_identity(source)
    for what in ("images", "classes"):
        there = meta.get(what, here[what])
        words = f"{path} was trained on {there} {what}, and data.root has {here[what]} here"
        require(there == here[what], f"resume: {words}")
    for index, (there, name) in enumerate(zip(meta.get("class_names") or (), here["class_names"] or (), strict=False)):
        require(there == name, f"resume: class {index} of {path} is {there!r}, and in data.root it is {name!r}")
