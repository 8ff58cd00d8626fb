"""Semantic segmentation: classes, inference on images of any size, metrics, pictures."""

from lrfdyn.segmentation import data  # noqa: F401  its data set registers itself
from lrfdyn.segmentation.model import Segmenter, create_segmenter

__all__ = ["Segmenter", "create_segmenter"]
