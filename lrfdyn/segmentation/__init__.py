"""Semantic segmentation: classes, inference on images of any size, metrics, pictures."""

from lrfdyn.segmentation import task  # noqa: F401  (registers itself)
