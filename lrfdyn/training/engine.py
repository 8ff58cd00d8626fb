"""The training loop: the same seed gives the same weights, whether or not the run was interrupted."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from lrfdyn.data.digits import Split
from lrfdyn.errors import LrfdynError, require
from lrfdyn.io.weights import check_fit, load_tensors, save_tensors


@dataclass(frozen=True)
class Recipe:
    epochs: int = 8
    batch_size: int = 32
    learning_rate: float = 0.01
    weight_decay: float = 0.02
    warmup: float = 0.2  # share of all steps
    label_smoothing: float = 0.1

    def __post_init__(self) -> None:
        require(self.epochs >= 1, f"epochs: expected an integer >= 1, got {self.epochs}")
        require(self.batch_size >= 2, f"batch_size: expected an integer >= 2 (batch norm), got {self.batch_size}")
        require(self.learning_rate > 0, f"learning_rate: expected a positive number, got {self.learning_rate}")

    def rate_at(self, progress: float) -> float:
        """Linear warm-up, then half a cosine to zero; `progress` runs from 0 to 1."""
        if progress < self.warmup:
            return self.learning_rate * progress / self.warmup
        return self.learning_rate * (1 + math.cos(math.pi * (progress - self.warmup) / (1 - self.warmup))) / 2


def evaluate(model: nn.Module, images: Tensor, labels: Tensor, batch_size: int = 256) -> tuple[float, float]:
    """Mean loss and accuracy."""
    model.eval()
    loss, correct = 0.0, 0
    with torch.inference_mode():
        for x, y in zip(images.split(batch_size), labels.split(batch_size), strict=True):
            logits = model(x)
            loss += F.cross_entropy(logits, y, reduction="sum").item()
            correct += int((logits.argmax(1) == y).sum())
    return loss / len(labels), correct / len(labels)


def fit(
    model: nn.Module,
    split: Split,
    recipe: Recipe,
    seed: int,
    checkpoint: Path | None = None,
    on_epoch: Callable[[dict[str, Any]], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """Trains and returns the learning curve. With `checkpoint`, every epoch is saved there and a run that finds the
    file goes on behind its last epoch; the order of the data depends on seed and epoch only."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay)
    curve: list[dict[str, Any]] = []
    if checkpoint is not None and checkpoint.exists():
        curve = load_training(checkpoint, model, optimizer)["curve"]
        for record in curve:
            on_epoch(record)
    steps = len(split.train_labels) // recipe.batch_size
    require(steps >= 1, f"batch_size: expected at most the {len(split.train_labels)} training images")
    for epoch in range(len(curve), recipe.epochs):
        start = time.perf_counter()
        generator = torch.Generator().manual_seed(seed * 100_003 + epoch)
        order = torch.randperm(len(split.train_labels), generator=generator)
        loss_sum, correct = 0.0, 0
        model.train()
        for step in range(steps):
            batch = order[step * recipe.batch_size : (step + 1) * recipe.batch_size]
            labels = split.train_labels[batch]
            for group in optimizer.param_groups:
                group["lr"] = recipe.rate_at((epoch * steps + step + 1) / (recipe.epochs * steps))
            logits = model(split.train_images[batch])
            loss = F.cross_entropy(logits, labels, label_smoothing=recipe.label_smoothing)
            if not math.isfinite(loss.item()):
                raise LrfdynError(f"learning_rate: the loss is {loss.item()} in epoch {epoch + 1}; lower it")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss_sum += loss.item()
            correct += int((logits.argmax(1) == labels).sum())
        test_loss, test_accuracy = evaluate(model, split.test_images, split.test_labels)
        record = {
            "epoch": epoch + 1,
            "train_loss": loss_sum / steps,
            "train_accuracy": correct / (steps * recipe.batch_size),
            "test_loss": test_loss,
            "test_accuracy": test_accuracy,
            "seconds": time.perf_counter() - start,
        }
        curve.append(record)
        if checkpoint is not None:
            save_training(checkpoint, model, optimizer, {"curve": curve})
        on_epoch(record)
    return curve


def save_training(path: Path, model: nn.Module, optimizer: Optimizer, meta: Mapping[str, Any]) -> None:
    """Weights, optimiser state and `meta` in one file."""
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{name}": torch.as_tensor(value) for name, value in state.items()}
    save_tensors(path, tensors, meta)


def load_training(path: Path, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The inverse of `save_training`; a checkpoint of another training is an error."""
    tensors, meta = load_tensors(path)
    weights: dict[str, Tensor] = {}
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        part, _, rest = name.partition(".")
        index, _, key = rest.partition(".")
        if part == "model":
            weights[rest] = value
        elif part == "optimizer" and index.isdecimal():
            state.setdefault(int(index), {})[key] = value
        else:
            raise LrfdynError(f"checkpoint: {path} is not of a training: unknown entry {name}")
    check_fit(path, model, weights)
    model.load_state_dict(weights)
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    return meta
