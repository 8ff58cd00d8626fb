"""Semantic segmentation: classes, inference on images of any size, metrics, pictures."""

from lrfdyn.segmentation import data  # noqa: F401  its data set registers itself
