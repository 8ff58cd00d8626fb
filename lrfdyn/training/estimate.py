"""What a recipe will take, before it takes it: the model on no device, and an estimate of its memory."""

from __future__ import annotations

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
from lrfdyn.training.tasks import attention_facts, build_data, data_options, task_of

STATES = {"adamw": 2, "lamb": 2, "sgd": 1}  # numbers that an optimiser keeps per parameter
FEW, MORE = 2, 4  # images of the batches that activations are counted for


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
    return {key: given.get(key) or getattr(known, key) for key in keys if key in given or hasattr(known, key)}, absent


def estimate(config: TrainConfig, processes: int = 1, memory: bool = True) -> dict[str, Any]:
    """Parameters, steps, and the bytes that each process will need; activations are an estimate."""
    require(processes >= 1, f"processes: expected an integer >= 1, got {processes}")
    facts, absent = data_facts(config)
    images, test_images = facts.pop("train_images"), facts.pop("test_images", None)
    micro_batch, epochs = config.micro_batch(processes), config.schedule.total_epochs
    steps = images // (micro_batch * processes) // config.run.accumulate
    require(steps >= 1, f"run.batch_size: expected at most the {images} training images")
    with torch.device("meta"):
        model = task_of(config.data.name).build_model(config, **facts)
    parameter_groups(model, config.optimizer)
    parameters = count_parameters(model)
    result: dict[str, Any] = {
        "model": config.model.name,
        **model.size,
        **attention_facts(model),
        "parameters": parameters,
        "num_classes": facts["num_classes"],
        "train_images": images,
        **({} if test_images is None else {"test_images": test_images}),
        "batch_size": config.run.batch_size,
        "micro_batch": micro_batch,
        "steps_per_epoch": steps,
        "epochs": epochs,
        "steps": steps * epochs,
        "learning_rate": config.base_rate,
        **({"images_not_counted": absent} if absent else {}),
    }
    if memory:
        shape = facts["in_channels"], facts["image_size"], facts["image_size"]
        size = 8 if config.run.precision == "fp64" else 4
        weights = size * sum(p.numel() for p in model.parameters() if p.requires_grad)
        whole = size * parameters + sum(b.numel() * b.element_size() for b in model.buffers())
        result["memory"] = {
            "parameters": whole,
            "gradients": weights,
            "optimizer": STATES[config.optimizer.name] * weights,
            "ema": 0 if config.optimizer.ema_decay is None else whole,
            "activations": activation_bytes(model, config, shape, micro_batch),
        }
    return result


def activation_bytes(model: nn.Module, config: TrainConfig, shape: tuple[int, ...], batch: int) -> int:
    """What the plain operations keep for the backward pass of `batch` images `shape`, counted on tensors without memory
    for two small batches; the fused kernels of a GPU keep less. The model, which is on no device, is used up."""
    half, task = config.run.precision in ("bf16", "fp16"), task_of(config.data.name)

    def kept_bytes(images: int) -> int:
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
            logits = model(torch.zeros(images, *shape))
            task.loss(logits, task.blank_targets(logits))
        return sum(kept.values())

    # Fake tensors say to be on a CPU: operations ask the device whether autocast is on, which meta cannot answer.
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu").train()
        few, more = kept_bytes(FEW), kept_bytes(MORE)
    kept = few + (more - few) // (MORE - FEW) * (batch - FEW)
    return kept * (2 if config.run.precision == "fp64" else 1)
