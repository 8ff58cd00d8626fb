"""Semantic segmentation: classes, inference on images of any size, metrics, pictures."""

from lrfdyn.segmentation import data, task  # noqa: F401  (they register themselves)
