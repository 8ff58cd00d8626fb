"""A run of the trainer against a loop that a reader can check line by line."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lrfdyn.data import create_data
from lrfdyn.errors import LrfdynError
from lrfdyn.io.weights import list_checkpoints, read_checkpoint
from lrfdyn.training.config import TrainConfig
from lrfdyn.training.optim import build_optimizer, rate_at, set_rate
from lrfdyn.training.tasks import task_of
from tests.training.runs import tiny, train

EPOCHS = 2
PLAIN: dict[str, dict[str, Any]] = {
    "model": {"drop_path": 0.0, "attention": "ssa"},
    "augmentation": {"mixup": 0.0, "cutmix": 1.0},
    "run": {"precision": "fp64"},
}


class Teacher(nn.Module):
    """It answers by the mean of the image, and knows nothing of other statistics than those of the data."""

    num_classes, pretrained_cfg = 10, None

    def forward(self, images: Tensor) -> Tensor:
        return torch.outer(images.mean((1, 2, 3)), torch.arange(10.0).to(images))


def plain_loop(config: TrainConfig) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights and their moving average after the last step."""
    source = create_data("digits", None, config.augmentation)
    torch.manual_seed(config.run.seed)
    model = task_of("digits").build_model(config, 10, 8, 1).double()
    model.step_logits, tet = config.loss.tet is not None, config.loss.tet or 0.0
    average = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = build_optimizer(model, config.optimizer, config.base_rate)
    parts, size, done = config.run.accumulate, config.run.batch_size // config.run.accumulate, 0
    steps = source.train_images // config.run.batch_size
    model.train()
    for epoch in range(EPOCHS):
        if epoch >= config.schedule.mix_epochs:
            source.augment = dataclasses.replace(config.augmentation, cutmix=0.0)
        batches = source.train_batches(epoch=epoch, seed=config.run.seed, batch_size=size)
        for step in range(steps):
            set_rate(optimizer, rate_at(config.schedule, config.base_rate, epoch + step / steps))
            optimizer.zero_grad()
            for _ in range(parts):
                batch = next(batches)
                images, targets = batch.images.double(), batch.targets.double()
                if config.distill.teacher is not None:
                    targets = 0.5 * targets + 0.5 * F.one_hot(Teacher()(batch.images).argmax(1), 10)
                logits = model(images)
                each = list(logits) if model.step_logits else [logits]
                loss = (1 - tet) * sum(F.cross_entropy(of, targets) for of in each) / len(each)
                ((loss + tet * ((logits - 1) ** 2).mean()) / parts).backward()
            nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_norm)
            optimizer.step()
            done += 1
            share = min(config.optimizer.ema_decay, (1 + done) / (10 + done))
            for name, value in model.state_dict().items():
                mean = share * average[name] + (1 - share) * value
                average[name] = mean if value.is_floating_point() else value.clone()
    return model.state_dict(), average


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"run": {"accumulate": 2, "seed": 3}},
        {"optimizer": {"clip_norm": 0.01}},
        {"distill": {"teacher": "by_the_mean"}},
        {"loss": {"tet": 0.1}},
    ],
    ids=["plain", "accumulated", "clipped", "distilled", "each_step"],
)
def test_run_is_the_plain_loop(settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clipping, accumulation, mixing until its epoch, the rate, the seed, a teacher, TET and the moving average."""
    monkeypatch.setitem(sys.modules, "timm", SimpleNamespace(create_model=lambda name, pretrained: Teacher()))
    sections = {key: {**PLAIN.get(key, {}), **settings.get(key, {})} for key in {*PLAIN, *settings}}
    config = tiny(**sections)
    train(config, tmp_path)
    tensors, _ = read_checkpoint(list_checkpoints(tmp_path / "checkpoints")[0])
    for prefix, expected in zip(("model.", "ema."), plain_loop(config), strict=True):
        for name, value in expected.items():
            torch.testing.assert_close(tensors[prefix + name], value.detach(), rtol=1e-7, atol=1e-9, msg=name)


def test_tet_needs_a_model_with_logits_of_every_step() -> None:
    config = tiny(loss={"tet": 0.0})
    model = task_of("digits").build_model(config, 10, 8, 1)
    task_of("digits").prepare(model, config, None)
    model.head_input = lambda x: x.mean((3, 4))
    with pytest.raises(LrfdynError, match=r"loss.tet: head_input of .* has no each_step"):
        task_of("digits").prepare(model, config, None)
