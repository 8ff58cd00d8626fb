"""What every host is: images to logits over T time steps, a configuration, a key map to the official code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lrfdyn.errors import require, require_integer, require_integers
from lrfdyn.io.hub import HubMixin

USUAL_IMAGE_SIZE = 224  # of hosts that take any size
# The integers among the hosts' arguments, and the least that each may be.
LEAST = {
    "time_steps": 1,
    "in_channels": 1,
    "num_classes": 0,
    "image_size": 1,
    "dim": 1,
    "depth": 1,
    "heads": 1,
    "levels": 1,
}


@dataclass(frozen=True)
class FeatureInfo:
    """A stage's feature map: its channels, and image pixels per grid cell."""

    channels: int
    stride: int


def classifier(width: int, num_classes: int) -> nn.Module:
    """A linear layer, or nothing where there are no classes: the model then gives the features in front of it."""
    return nn.Linear(width, num_classes) if num_classes else nn.Identity()


class SpikingModel(HubMixin):
    """`forward` takes static images `[B, C, H, W]`, shown for `time_steps` steps, or event frames `[T, B, C, H, W]`."""

    # Regular expressions from official keys to ours; a replacement of None drops the entry (never used in forward).
    official_keys: ClassVar[tuple[tuple[str, str | None], ...]] = ()
    smallest_image: int = 1
    head: nn.Module
    feature_info: list[FeatureInfo]
    grid: tuple[int, int]

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        for name, least in LEAST.items():
            if name in config:
                require_integer(name, config[name], least)
        for name in ("widths", "depths"):
            require_integers(name, config.get(name, ()))
        self.config = {k: v for k, v in config.items() if k not in ("self", "__class__")}
        self.time_steps: int = config["time_steps"]
        self.in_channels: int = config["in_channels"]

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

    def forward_stages(self, x: Tensor, only_last: bool = False) -> list[Tensor]:
        """The feature maps `[T, B, C, H, W]` of time-major input, one per stage, described by `feature_info`. With
        `only_last`, that of the last stage alone: the others are let go as soon as the next stage has read them."""
        raise NotImplementedError

    def head_input(self, x: Tensor) -> Tensor:
        """What the classifier takes of the last feature map: `[T, B, C]`, or `[B, C]` where time is averaged first."""
        raise NotImplementedError

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Logits `[B, classes]` of the last feature map, or with `pre_logits` the features `[B, C]` in front of the
        classifier."""
        features = self.head_input(x)
        y = features if pre_logits else self.head(features)
        return y.mean(0) if y.dim() == 3 else y

    def forward_features(self, images: Tensor) -> Tensor:
        """The last feature map, `[T, B, C, H, W]`."""
        return self.forward_stages(self.to_time_major(images), only_last=True)[-1]

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
        self._check_dtype(images)
        static = images.dim() == 4
        folded = images if static else images.flatten(0, 1)
        folded = folded.contiguous(memory_format=torch.channels_last)
        if not static:
            return folded.unflatten(0, images.shape[:2])
        return folded.unsqueeze(0).expand(self.time_steps, -1, -1, -1, -1)

    def _check_dtype(self, images: Tensor) -> None:
        require(images.is_floating_point(), f"images: expected floating-point numbers, got {images.dtype}")
        like = next(self.parameters(), images)  # the copies that nn.DataParallel makes have no parameters
        require(
            images.dtype == like.dtype or torch.is_autocast_enabled(images.device.type),
            f"images: expected {like.dtype}, as the model is, or autocast, got {images.dtype}",
        )

    @property
    def num_features(self) -> int:
        """Channels of the last feature map, which the classifier takes."""
        return self.feature_info[-1].channels

    @property
    def input_size(self) -> tuple[int, int, int]:
        """Channels, height and width of the images that the model was laid out for."""
        size = self.config.get("image_size", USUAL_IMAGE_SIZE)
        return self.in_channels, size, size

    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int) -> None:
        """A fresh classifier for other classes; 0 removes it."""
        require_integer("num_classes", num_classes, LEAST["num_classes"])
        self.head = self.fresh_classifier(num_classes)
        self.config["num_classes"] = num_classes
        self.class_names = None

    def fresh_classifier(self, num_classes: int) -> nn.Module:
        layer = classifier(self.num_features, num_classes)
        if isinstance(layer, nn.Linear):
            nn.init.trunc_normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)
        like = next(self.parameters())
        return layer.to(like.device, like.dtype)

    def official_warning(self) -> str | None:
        """What to know when official weights are loaded into this model."""
        return None
