"""Inference with little memory: attention row by row, and whole models piece by piece."""

from __future__ import annotations

from lrfdyn.deploy.streaming import RowStream, StreamingAttention

__all__ = ["RowStream", "StreamingAttention"]
