"""Accuracy of weights on the test images, over all processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lrfdyn.devices import device_name
from lrfdyn.errors import LrfdynError
from lrfdyn.io.weights import check_fit
from lrfdyn.training.build import build_data, data_model
from lrfdyn.training.config import TrainConfig
from lrfdyn.training.processes import build_accelerator
from lrfdyn.training.tasks import TestRun, task_of


def evaluate_weights(
    config: TrainConfig,
    weights: Mapping[str, Tensor],
    name: Path,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """The accuracy of weights in the model and on the data of a configuration. `progress` is called with the number of
    images behind every batch, over all processes, and with that of all images."""
    accelerator = build_accelerator(config.run)
    source = build_data(config)
    model = data_model(config, source)
    try:
        check_fit(name, model, weights)
    except LrfdynError as error:  # the shape of a head tells not everybody that the data is another
        raise LrfdynError(f"{error} (the model is for the {source.num_classes} classes of the data)") from None
    model.load_state_dict(dict(weights))
    dtype = torch.float64 if config.run.precision == "fp64" else torch.float32
    model.to(accelerator.device, dtype)

    def seen(images: int) -> None:
        if progress is not None:
            progress(images * accelerator.num_processes, source.test_images)

    run = TestRun(source, config.run.test_batch_size, accelerator, dtype, seen)
    tested = task_of(config.data.name).test(model, run)
    facts = {"device": device_name(accelerator.device), "precision": config.run.precision}
    return {"num_classes": source.num_classes, **facts, **tested}
