"""mIoU and accuracies from one confusion matrix over the whole set."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from torch import Tensor

from lrfdyn.checks import checked
from lrfdyn.errors import require
from lrfdyn.segmentation.pairs import IGNORED


def require_torchmetrics() -> None:
    """Raise an error where torchmetrics is missing, without importing it, which takes seconds."""
    require(find_spec("torchmetrics") is not None, "test: mIoU needs torchmetrics; pip install 'lrfdyn[segmentation]'")


@checked
def build_confusion(classes: int) -> Any:
    """Return torchmetrics' confusion matrix `[true, predicted]`, summed over all processes when it is computed."""
    require_torchmetrics()
    from torchmetrics.classification import MulticlassConfusionMatrix

    return MulticlassConfusionMatrix(classes, ignore_index=IGNORED, validate_args=False)


def iou_and_accuracy(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return intersection over union and accuracy of every class; nan for one that does not occur."""
    hits, true, predicted = matrix.diagonal(), matrix.sum(1), matrix.sum(0)
    return hits / (true + predicted - hits), hits / true


@checked
def scores(matrix: Tensor) -> dict[str, float]:
    """Return mIoU and accuracies in percent, means over the classes for which there is a number."""
    iou, accuracy = iou_and_accuracy(matrix)
    return {
        "miou": 100 * float(iou.nanmean()),
        "mean_accuracy": 100 * float(accuracy.nanmean()),
        "pixel_accuracy": 100 * float(matrix.diagonal().sum() / matrix.sum()),
    }


def class_rows(matrix: Tensor, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return one row per class: percent, None where there is no number, and its pixels."""
    shares = zip(*(values.tolist() for values in iou_and_accuracy(matrix)), strict=True)
    percent = [[None if share != share else round(100 * share, 4) for share in row] for row in shares]
    return [
        {"class": name, "iou": iou, "accuracy": accuracy, "pixels": int(pixels)}
        for name, (iou, accuracy), pixels in zip(names, percent, matrix.sum(1), strict=True)
    ]
