"""Distillation: a trained network's answers are mixed into the targets.

Cross-entropy is linear in its target, so this equals the weighted sum of the two losses, and it happens outside of the
training step: a captured step needs no change.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lrfdyn.errors import LrfdynError, require
from lrfdyn.training.config import DistillConfig

Distill = Callable[[Tensor, Tensor], Tensor]


def build_distill(config: DistillConfig, num_classes: int, device: torch.device) -> Distill | None:
    """A function of images and targets that gives the mixed targets; None without a teacher."""
    if config.teacher is None:
        return None
    try:
        import timm
    except ImportError:
        raise LrfdynError("distill.teacher: teachers are timm models; pip install 'lrfdyn[timm]'") from None
    try:
        teacher = timm.create_model(config.teacher, pretrained=True)
    except RuntimeError as error:
        raise LrfdynError(f"distill.teacher: timm cannot make {config.teacher!r} ({error})") from None
    classes = getattr(teacher, "num_classes", None)
    require(classes == num_classes, f"distill.teacher: expected {num_classes} classes, {config.teacher} has {classes}")
    return blended(teacher.to(device).eval().requires_grad_(False), config)


def blended(teacher: nn.Module, config: DistillConfig) -> Distill:
    @torch.no_grad()
    def distill(images: Tensor, targets: Tensor) -> Tensor:
        logits = teacher(images)
        if config.kind == "hard":
            answer = F.one_hot(logits.argmax(1), targets.shape[1]).to(targets.dtype)
        else:
            answer = logits.softmax(1).to(targets.dtype)
        return targets.lerp(answer, config.weight)

    return distill
