"""Distillation: a trained network's answers are mixed into the targets.

Cross-entropy is linear in its target, so this equals the weighted sum of the two losses, and it happens outside of the
training step: a captured step needs no change.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from lrfdyn.data import DataSource
from lrfdyn.errors import LrfdynError, require
from lrfdyn.training.config import DistillConfig

Distill = Callable[[Tensor, Tensor], Tensor]


def build_distill(config: DistillConfig, source: DataSource, device: torch.device) -> Distill | None:
    """A function of images and targets that gives the mixed targets; None without a teacher."""
    if config.teacher is None:
        return None
    try:
        import timm
    except ImportError:
        raise LrfdynError("distill.teacher: teachers are timm models; pip install 'lrfdyn[timm]'") from None
    try:
        teacher = timm.create_model(config.teacher, pretrained=True)
    except (RuntimeError, OSError) as error:  # no such model; no connection to load it
        raise LrfdynError(f"distill.teacher: timm cannot make {config.teacher!r} ({error})") from None
    classes = getattr(teacher, "num_classes", None)
    require(
        classes == source.num_classes,
        f"distill.teacher: expected {source.num_classes} classes, {config.teacher} has {classes}",
    )
    facts = getattr(teacher, "pretrained_cfg", None) or {}
    mean, deviation = tuple(facts.get("mean") or source.mean), tuple(facts.get("std") or source.deviation)
    require(
        len(mean) == len(deviation) == source.in_channels,
        f"distill.teacher: expected {source.in_channels} channels, {config.teacher} has {len(mean)}",
    )
    teacher = teacher.to(device).eval().requires_grad_(False)
    # From the statistics that the data are normalised by to those that the teacher was trained with.
    ours, scale, theirs, by = (
        torch.tensor(x, device=device).view(-1, 1, 1) for x in (source.mean, source.deviation, mean, deviation)
    )
    return blended(lambda images: teacher(images * (scale / by) + (ours - theirs) / by), config)


def blended(teacher: Callable[[Tensor], Tensor], config: DistillConfig) -> Distill:
    """Mixes the answers of `teacher`, logits `[B, classes]`, into targets of the same shape."""

    @torch.no_grad()
    def distill(images: Tensor, targets: Tensor) -> Tensor:
        logits = teacher(images).to(targets.dtype)
        if config.kind == "hard":
            answer = F.one_hot(logits.argmax(1), targets.shape[1]).to(targets.dtype)
        else:
            answer = logits.softmax(1)
        return targets.lerp(answer, config.weight)

    return distill
