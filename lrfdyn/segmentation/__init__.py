"""Semantic segmentation: classes, inference on images of any size, metrics, pictures."""
