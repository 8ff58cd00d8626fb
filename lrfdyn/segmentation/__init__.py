"""Semantic segmentation: model, data, inference on images of any size, metrics, pictures."""

from lrfdyn.segmentation import data, pets, shards, task  # noqa: F401  (they register themselves)
from lrfdyn.segmentation.model import Segmenter, create_segmenter

__all__ = ["Segmenter", "create_segmenter"]
