"""What every host is: images to logits over T time steps, a configuration, a key map to the official code."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lrfdyn.errors import require


@dataclass(frozen=True)
class FeatureInfo:
    """A stage's feature map: its channels, and image pixels per grid cell."""

    channels: int
    stride: int


class SpikingModel(nn.Module):
    """`forward` takes static images `[B, C, H, W]`, shown for `time_steps` steps, or event frames `[T, B, C, H, W]`."""

    # Regular expressions from official keys to ours; a replacement of None drops the entry (never used in forward).
    official_keys: ClassVar[tuple[tuple[str, str | None], ...]] = ()
    smallest_image: int = 1
    feature_info: list[FeatureInfo]
    grid: tuple[int, int]

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = {k: v for k, v in config.items() if k not in ("self", "__class__")}
        self.time_steps: int = config["time_steps"]
        self.in_channels: int = config["in_channels"]
        require(self.time_steps >= 1, f"time_steps: expected an integer >= 1, got {self.time_steps}")
        require(config["num_classes"] >= 1, f"num_classes: expected an integer >= 1, got {config['num_classes']}")

    def describe_stages(self, channels: Sequence[int], strides: Sequence[int], image_size: int | None = None) -> None:
        """Sets `feature_info` and `smallest_image`, and `grid`, the last stage's, of an `image_size`."""
        self.feature_info = [FeatureInfo(c, stride) for c, stride in zip(channels, strides, strict=True)]
        self.smallest_image = strides[-1]
        if image_size is None:
            return
        require(
            image_size >= strides[-1],
            f"image_size: expected at least {strides[-1]} (the stride of the last stage), got {image_size}",
        )
        side = -(-image_size // strides[-1])
        self.grid = (side, side)

    def forward_stages(self, x: Tensor) -> list[Tensor]:
        """The feature maps `[T, B, C, H, W]` of time-major input, one per stage, described by `feature_info`."""
        raise NotImplementedError

    def forward_head(self, x: Tensor) -> Tensor:
        """Logits `[B, classes]` of the last feature map."""
        raise NotImplementedError

    def forward_features(self, images: Tensor) -> Tensor:
        """The last feature map, `[T, B, C, H, W]`."""
        return self.forward_stages(self.to_time_major(images))[-1]

    def feature_maps(self, images: Tensor) -> list[Tensor]:
        """The feature maps of all stages, `[T, B, C, H, W]` each."""
        return self.forward_stages(self.to_time_major(images))

    def forward(self, images: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(images))

    def to_time_major(self, images: Tensor) -> Tensor:
        """`[T, B, C, H, W]` in channels-last memory."""
        require(
            images.dim() in (4, 5),
            f"images: expected [B, C, H, W] or [T, B, C, H, W], got {images.dim()} dimensions {list(images.shape)}",
        )
        require(
            images.shape[-3] == self.in_channels,
            f"images: expected {self.in_channels} channels, got {images.shape[-3]} in {list(images.shape)}",
        )
        require(0 not in images.shape, f"images: expected no empty dimension, got {list(images.shape)}")
        require(
            min(images.shape[-2:]) >= self.smallest_image,
            f"images: expected at least {self.smallest_image} pixels a side, got {list(images.shape[-2:])}",
        )
        static = images.dim() == 4
        folded = images if static else images.flatten(0, 1)
        folded = folded.contiguous(memory_format=torch.channels_last)
        if not static:
            return folded.unflatten(0, images.shape[:2])
        return folded.unsqueeze(0).expand(self.time_steps, -1, -1, -1, -1)

    @classmethod
    def options(cls) -> dict[str, inspect.Parameter]:
        """The constructor's arguments."""
        return dict(inspect.signature(cls).parameters)
