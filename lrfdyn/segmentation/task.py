"""The task of semantic segmentation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lrfdyn.data import Batch, DataSource
from lrfdyn.data.preprocess import Preprocessing
from lrfdyn.errors import require
from lrfdyn.models import SpikingModel
from lrfdyn.segmentation.data import MaskedData
from lrfdyn.segmentation.drawing import class_names
from lrfdyn.segmentation.inference import check_window, segment
from lrfdyn.segmentation.metric import build_confusion, class_rows, require_torchmetrics, scores
from lrfdyn.segmentation.model import Segmenter, create_segmenter, load_backbone
from lrfdyn.segmentation.pairs import IGNORED
from lrfdyn.training.config import TrainConfig
from lrfdyn.training.tasks import Task, TestRun, register_task


@register_task("segmentation")
class Segmentation(Task):
    """One class per pixel: logits are `[B, classes, H, W]`, targets `[B, H, W]`."""

    results = ("miou", "mean_accuracy", "pixel_accuracy", "test_loss")
    headline = "miou"
    pipeline = "image-segmentation"

    def build_model(self, config: TrainConfig, num_classes: int, image_size: int, in_channels: int) -> Segmenter:
        for key, given in (("distill.teacher", config.distill.teacher), ("loss.tet", config.loss.tet)):
            require(given is None, f"{key}: is for classification, and this is segmentation")
        sizes = {"num_classes": num_classes, "image_size": image_size, "in_channels": in_channels}
        head = config.model.head or None
        return create_segmenter(config.model.name, head_options=head, **sizes, **config.model.arguments())

    def preprocessing(self, source: DataSource) -> Preprocessing:
        return replace(Preprocessing.of_data(source), interpolation="bilinear")

    def prepare(self, model: SpikingModel, config: TrainConfig, source: DataSource) -> None:
        assert isinstance(model, Segmenter)
        assert isinstance(source, MaskedData)
        require_torchmetrics()
        check_window(source.window, model.stride)
        source.check_test_pairs()
        if config.model.backbone is not None:
            load_backbone(model, config.model.backbone)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Over all pixels, those without a class as zeros: how many a process happens to have changes nothing."""
        return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum") / targets.numel()

    def targets(self, batch: Batch, dtype: torch.dtype) -> Tensor:
        return batch.targets

    def blank_targets(self, logits: Tensor) -> Tensor:
        return torch.zeros(logits.shape[0], *logits.shape[2:], dtype=torch.long)

    @torch.no_grad()
    def test(self, model: nn.Module, run: TestRun) -> dict[str, Any]:
        """Return mIoU and accuracies in percent, the loss per labelled pixel, and the numbers of every class."""
        source = run.source
        assert isinstance(source, MaskedData)
        model.eval()
        # Without the wrapper of several processes: they test different sizes, and must not wait for each other.
        plain: Any = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        confusion = build_confusion(source.num_classes).to(run.accelerator.device)
        sums = torch.zeros(2, dtype=torch.float64, device=run.accelerator.device)  # loss, labelled pixels
        for batch in run.batches(multiple=plain.stride):
            with run.accelerator.autocast():
                images, size = batch.images.to(run.dtype), batch.labels.shape[-2:]
                logits = segment(plain, images, size, window=source.window, flip=source.flip)
            if batch.count == 0:
                continue
            confusion.update(logits.argmax(1), batch.labels)
            losses = F.cross_entropy(logits, batch.labels, ignore_index=IGNORED, reduction="none")
            sums += torch.stack((losses.double().sum(), (batch.labels != IGNORED).sum().double()))
        loss_sum, count = run.accelerator.reduce(sums, "sum").tolist()
        require(count > 0, "data: expected at least one labelled pixel in the test images")
        matrix = confusion.compute().double().cpu()  # the sum over all processes
        rows = class_rows(matrix, source.class_names or class_names(source.num_classes))
        return {"test_loss": loss_sum / count, **scores(matrix), "classes": rows}
