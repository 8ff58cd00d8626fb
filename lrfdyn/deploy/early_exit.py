"""Inference that stops when it is sure: an image leaves its batch, and only the others have further time steps."""

from __future__ import annotations

import torch
from torch import Tensor

from lrfdyn.checks import checked
from lrfdyn.deploy.time_stream import TimeStream, require_alone
from lrfdyn.errors import require
from lrfdyn.models import SpikingModel


def confidence(logits: Tensor) -> Tensor:
    """The largest probability `[...]` that softmax makes of logits `[..., classes]`."""
    return logits.double().softmax(-1).amax(-1)


class EarlyExit:
    """A classifier that runs an image until the largest probability, by softmax of the logits so far, passes
    `threshold`, or all time steps.

    - `model`: A model of this package in evaluation mode. Its weights are shared and not copied.
    - `threshold`: From 0, at which one step is enough, to 1, which no probability passes. `lrfdyn evaluate --exit` says
      what it costs.

    Example:

        logits, steps = EarlyExit(model, 0.9)(images)  # [B, classes], [B]
    """

    @checked
    def __init__(self, model: SpikingModel, threshold: float) -> None:
        require(0 <= threshold <= 1, f"threshold: expected a number from 0 to 1, got {threshold}")
        require_alone(model)
        self.stream, self.threshold, self.time_steps = TimeStream(model), threshold, model.time_steps

    @torch.no_grad()
    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """The logits `[B, classes]` of images `[B, C, H, W]` or frames `[T, B, C, H, W]`, and how many steps each of
        them took, `[B]`."""
        film = images.dim() == 5
        last, stream = len(images) if film else self.time_steps, self.stream
        going = torch.arange(images.shape[-4], device=images.device)
        stream.reset()
        found: list[tuple[Tensor, Tensor, Tensor]] = []  # which images have left, with what, after how many steps
        for step in range(1, last + 1):
            logits = stream.step((images[step - 1] if film else images)[going])
            leaves = confidence(logits) > self.threshold
            if step == last:
                leaves = torch.ones_like(leaves)
            found.append((going[leaves], logits[leaves], torch.full_like(going[leaves], step)))
            if leaves.all():
                break
            if leaves.any():
                stream.keep(~leaves)
                going = going[~leaves]
        stream.reset()
        order, logits, steps = (torch.cat(parts) for parts in zip(*found, strict=True))
        back = order.argsort()
        return logits[back], steps[back]
