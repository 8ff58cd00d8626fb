"""What a recipe will take, before it takes it: the model on no device, and an estimate of its memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from lrfdyn.data import data_class
from lrfdyn.data.base import check_options
from lrfdyn.errors import LrfdynError, require
from lrfdyn.models.summary import count_parameters
from lrfdyn.training.build import attention_facts, build_data, build_model, data_options
from lrfdyn.training.config import TrainConfig
from lrfdyn.training.optim import parameter_groups
from lrfdyn.training.tasks import Task, task_of

STATES = {"adamw": 2, "lamb": 2, "sgd": 1}  # numbers that an optimiser keeps per parameter
PROBE_BATCHES = (2, 4)


@dataclass(frozen=True)
class Facts:
    """Of a data set, for a dry run on a machine that does not have it."""

    num_classes: int
    image_size: int
    in_channels: int
    train_images: int
    absent: str = ""  # why they are those of the official data set


def data_facts(config: TrainConfig) -> Facts:
    """Counted in `data.root`, which may hold a part of the data; of the official data set where it is not there."""
    data, source = config.data, data_class(config.data.name)
    check_options(data.name, data_options(config))
    if not hasattr(source, "train_images"):  # of one's own
        return _counted(config)
    classes, size = data.options.get("num_classes", source.num_classes), data.image_size or source.image_size
    known = Facts(classes, size, source.in_channels, source.train_images)
    if data.root is None:
        return known
    try:
        return _counted(config)
    except LrfdynError as error:
        if not str(error).startswith("root:"):
            raise
        return replace(known, absent=str(error).removeprefix("root: "))


def _counted(config: TrainConfig) -> Facts:
    source = build_data(config)
    return Facts(source.num_classes, source.image_size, source.in_channels, source.train_images)


def estimate(config: TrainConfig, processes: int = 1, memory: bool = True) -> dict[str, Any]:
    """Parameters, steps, and the bytes that each process will need; activations are an estimate."""
    require(processes >= 1, f"processes: expected an integer >= 1, got {processes}")
    facts = data_facts(config)
    micro_batch = config.micro_batch(processes)
    steps = facts.train_images // (micro_batch * processes) // config.run.accumulate
    require(steps >= 1, f"run.batch_size: expected at most the {facts.train_images} training images")
    with torch.device("meta"):
        model = build_model(config, facts.num_classes, facts.image_size, facts.in_channels)
    parameter_groups(model, config.optimizer)
    parameters = count_parameters(model)
    size = 8 if config.run.precision == "fp64" else 4
    result: dict[str, Any] = {
        "model": config.model.name,
        **attention_facts(model),
        "parameters": parameters,
        "train_images": facts.train_images,
        "batch_size": config.run.batch_size,
        "micro_batch": micro_batch,
        "steps_per_epoch": steps,
        "epochs": config.schedule.total_epochs,
        "steps": steps * config.schedule.total_epochs,
        "learning_rate": config.base_rate,
    }
    if facts.absent:
        result["images_not_counted"] = facts.absent
    if memory:
        buffers = sum(b.numel() * b.element_size() for b in model.buffers())
        averages = 0 if config.optimizer.ema_decay is None else size * parameters + buffers
        result["memory"] = {
            "parameters": size * parameters + buffers,
            "gradients": size * parameters,
            "optimizer": STATES[config.optimizer.name] * size * parameters,
            "ema": averages,
            "activations": activation_bytes(model, config, facts, micro_batch),
        }
    return result


def activation_bytes(model: nn.Module, config: TrainConfig, facts: Facts, batch: int) -> int:
    """What the plain operations keep for the backward pass, counted on tensors without memory for two small batches
    and extended to the real one. The fused kernels of a GPU keep less; work space and fragmentation come on top. The
    model, which must be on no device, is used up."""
    amp = {"bf16": torch.bfloat16, "fp16": torch.bfloat16}.get(config.run.precision)
    # Fake tensors say to be on a CPU: operations ask the device whether autocast is on, which meta cannot answer.
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu").train()
        few, more = (_kept_bytes(model, facts, size, amp, task_of(config.data.name)) for size in PROBE_BATCHES)
    per_image = (more - few) // (PROBE_BATCHES[1] - PROBE_BATCHES[0])
    kept = few + per_image * (batch - PROBE_BATCHES[0])
    return kept * (2 if config.run.precision == "fp64" else 1)


def _kept_bytes(model: nn.Module, facts: Facts, batch: int, amp: torch.dtype | None, task: Task) -> int:
    own = {p.untyped_storage()._cdata for p in model.parameters()}
    kept: dict[int, int] = {}
    alive: list[Tensor] = []  # a storage that is gone could lend its address to the next one

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage.nbytes()
            alive.append(tensor)
        return tensor

    images = torch.zeros(batch, facts.in_channels, facts.image_size, facts.image_size)
    with (
        torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
        torch.autocast("cpu", amp, enabled=amp is not None),
    ):
        logits = model(images)
        task.loss(logits, task.blank_targets(logits))
    return sum(kept.values())
