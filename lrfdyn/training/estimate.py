"""What a recipe will take, before it takes it: the model on no device, and an estimate of its memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from lrfdyn.data import data_class
from lrfdyn.data.base import check_options
from lrfdyn.errors import LrfdynError, require
from lrfdyn.models.summary import count_parameters
from lrfdyn.training.config import DATA_FACTS, TrainConfig
from lrfdyn.training.optim import parameter_groups
from lrfdyn.training.stages import Stage, Switch, plan_stages
from lrfdyn.training.tasks import attention_facts, build_data, data_options, task_of

STATES = {"adamw": 2, "lamb": 2, "muon": 2, "sgd": 1}  # numbers that an optimiser keeps per parameter
MATRIX_STATES = 1  # of those that Muon itself trains
FEW, MORE = 2, 4  # images of the batches that activations are counted for
MOST_STEPS = 16  # time steps that they are counted for; every further one keeps as much


def data_facts(config: TrainConfig) -> tuple[dict[str, int], str]:
    """`DATA_FACTS` and the numbers of training and test images, counted in `data.root`, which may hold a part of the
    data. Where it is not there they are those of the official data set, and the text says why."""
    data, known, keys = config.data, data_class(config.data.name), (*DATA_FACTS, "train_images", "test_images")
    check_options(data.name, data_options(config))
    official, absent = hasattr(known, "train_images"), ""
    if data.root is not None or not official:
        try:
            source = build_data(config)
            return {key: getattr(source, key) for key in keys}, ""
        except LrfdynError as error:
            if not official or not str(error).startswith("root:"):
                raise
            absent = str(error).removeprefix("root: ")
    given = {"num_classes": data.options.get("num_classes"), "image_size": data.image_size}
    facts = {key: given.get(key) or getattr(known, key) for key in keys if key in given or hasattr(known, key)}
    if data.held_out is not None:
        facts |= {"train_images": facts["train_images"] - data.held_out, "test_images": data.held_out}
    return facts, absent


def estimate(config: TrainConfig, processes: int = 1, memory: bool = True) -> dict[str, Any]:
    """Parameters, steps, and the bytes that each process will need; activations are an estimate."""
    require(processes >= 1, f"processes: expected an integer >= 1, got {processes}")
    facts, absent = data_facts(config)
    images, test_images = facts.pop("train_images"), facts.pop("test_images", None)
    stages = plan_stages(config, images, processes)
    with torch.device("meta"):
        model = task_of(config.data.name).build_model(config, **facts)
    Switch(model, config)
    groups, parameters = parameter_groups(model, config.optimizer), count_parameters(model)
    result: dict[str, Any] = {
        "model": config.model.name,
        **model.size,
        **attention_facts(model),
        "parameters": parameters,
        "num_classes": facts["num_classes"],
        "train_images": images,
        **({} if test_images is None else {"test_images": test_images}),
        "batch_size": config.run.batch_size,
        "micro_batch": stages[-1].micro_batch,
        "steps_per_epoch": stages[-1].steps,
        "epochs": config.schedule.total_epochs,
        "steps": stages[-1].end,
        "learning_rate": config.base_rate,
        **({"images_not_counted": absent} if absent else {}),
    }
    if memory:
        size, shape = 8 if config.run.precision == "fp64" else 4, (facts["in_channels"], facts["image_size"])
        weights = size * sum(p.numel() for p in model.parameters() if p.requires_grad)
        kept = {False: STATES[config.optimizer.name], True: MATRIX_STATES}
        moments = sum(kept["matrices" in group] * p.numel() for group in groups for p in group["params"])
        whole = size * parameters + sum(b.numel() * b.element_size() for b in model.buffers())
        result["memory"] = {
            "parameters": whole,
            "gradients": weights,
            "optimizer": moments * size,
            "ema": 0 if config.optimizer.ema_decay is None else whole,
            "activations": activation_bytes(model, stages, *shape),
        }
    return result


def activation_bytes(model: nn.Module, stages: Sequence[Stage], channels: int, size: int) -> int:
    """What the plain operations keep for the backward pass of a batch, in the stage where it is most, counted on
    tensors without memory for two small batches; the fused kernels of a GPU keep less. The model, which is on no
    device, is used up."""
    config = stages[-1].config
    half, task, switch = config.run.precision in ("bf16", "fp16"), task_of(config.data.name), Switch(model, config)

    framed = data_class(config.data.name).framed

    def kept_bytes(images: int, side: int, *frames: int) -> int:
        own = {p.untyped_storage()._cdata for p in model.parameters()}
        kept: dict[int, int] = {}
        alive: list[Tensor] = []  # a storage that is gone could lend its address to the next one

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in own:
                kept[storage._cdata] = storage.nbytes()
                alive.append(tensor)
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
        with hooks, torch.autocast("cpu", torch.bfloat16, enabled=half):
            logits = model(torch.zeros(*frames, images, channels, side, side))
            task.loss(logits, task.blank_targets(logits))
        return sum(kept.values())

    # Fake tensors say to be on a CPU: operations ask the device whether autocast is on, which meta cannot answer.
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu").train()
        most = 0
        for stage in stages:
            steps = switch.enter(stage.settings)
            counted = []
            for part in (steps,) if steps <= MOST_STEPS else (MOST_STEPS // 2, MOST_STEPS):
                switch.enter(dataclasses.replace(stage.settings, time_steps=part))
                side, frames = stage.settings.image_size or size, (part,) if framed else ()
                few, more = (kept_bytes(images, side, *frames) for images in (FEW, MORE))
                counted.append(few + (more - few) // (MORE - FEW) * (stage.micro_batch - FEW))
            each = (counted[-1] - counted[0]) // (MOST_STEPS // 2)
            most = max(most, counted[-1] + each * max(steps - MOST_STEPS, 0))
    return most * (2 if config.run.precision == "fp64" else 1)
