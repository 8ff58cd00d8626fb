"""What every host is: images to logits over T time steps, a configuration, a key map to the official code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lrfdyn.attention import ATTENTIONS
from lrfdyn.checks import check_fields
from lrfdyn.errors import require, require_integer, shown
from lrfdyn.io.hub import HubMixin
from lrfdyn.nn.layers import init_weights
from lrfdyn.nn.sections import Section
from lrfdyn.ops.dispatch import transformed, under_autocast

# The integers among the hosts' arguments, and the least and the most that each may be. Building a network takes a
# second for a hundred blocks, and a neuron runs step by step; a tensor of the largest widths can still be addressed.
LIMITS = dict.fromkeys(("in_channels", "image_size", "dim", "heads", "levels"), (1, 2**16))
LIMITS |= {"time_steps": (1, 1000), "depth": (1, 1000), "num_classes": (0, 2**20)}


@dataclass
class ModelConfig:
    """The options of every host. A host with more of them extends this class, and names it as its `config_class`."""

    in_channels: int = 3
    """Channels of an image."""
    num_classes: int = 1000
    """Classes that the logits are for. With 0 the model gives the features in front of the classifier."""
    time_steps: int = 4
    """T, how many times a static image is shown."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name in LIMITS and value is not None:
                require_integer(name, value, *LIMITS[name])
        check_fields(self)
        for name, (_, most) in (("widths", LIMITS["dim"]), ("depths", LIMITS["depth"])):
            largest = max(getattr(self, name, ()), default=0)
            require(largest <= most, f"{name}: expected at most {most}, got {shown(largest)}")


@dataclass(frozen=True)
class FeatureInfo:
    """The channels of a stage's feature map, and its stride: how many image pixels a side a grid cell stands for."""

    channels: int
    stride: int


def shown_once(time_steps: int) -> None:
    """Checks the time steps of a network without spikes."""
    given = f"time_steps: a network without spikes shows an image once; expected 1, got {time_steps}"
    require(time_steps == 1, given)


def classifier(width: int, num_classes: int) -> nn.Module:
    """A linear layer, or nothing where there are no classes: the model then gives the features in front of it."""
    return nn.Linear(width, num_classes) if num_classes else nn.Identity()


class SpikingModel(HubMixin):
    """A host network: images to logits `[B, classes]` over T time steps.

    `forward` takes static images `[B, C, H, W]`, which are shown for `time_steps` steps, or event frames
    `[T, B, C, H, W]`. `config` holds the options that the model was built with, so that `type(model)(**model.config)`
    is a fresh one of the same kind. A host sets `stem`, `stages` and `head`, or runs in its own way (`forward_stages`,
    `head_input`).
    """

    config_class: ClassVar[type[ModelConfig]] = ModelConfig
    # Regular expressions that make our keys of official ones, each in turn; None drops an entry (unused in forward).
    official_keys: tuple[tuple[str, str | None], ...] = ()
    spiking: ClassVar[bool] = True  # False: numbers flow where other hosts have spikes
    usual_image_size: ClassVar[int] = 224  # of hosts that take any size
    official_warning: str | None = None  # when official weights are loaded into this model
    smallest_image: int = 1
    step_logits: bool = False  # in training, `forward` gives the logits of every time step, [T, B, classes]
    stem: Any  # modules
    stages: Any
    head: nn.Module
    feature_info: list[FeatureInfo]
    grid: tuple[int, int]

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = dict(vars(config))
        self.time_steps, self.in_channels = config.time_steps, config.in_channels

    @classmethod
    def options(cls) -> dict[str, Any]:
        """The options of the constructor with their defaults."""
        return {field.name: field.default for field in fields(cls.config_class)}

    @classmethod
    def attentions(cls) -> list[str]:
        """The kinds that the option `attention` takes; none where there is no such option."""
        known = [kind for kind in ATTENTIONS if cls.spiking or ATTENTIONS[kind].takes_numbers]
        return known if "attention" in cls.options() else []

    def describe_stages(self, channels: Sequence[int], strides: Sequence[int], image_size: int | None = None) -> None:
        """Sets `feature_info` and `smallest_image` from the channels and strides of all stages, and `grid`, the rows
        and columns of tokens in the last stage, for images of `image_size`."""
        self.feature_info = [FeatureInfo(c, stride) for c, stride in zip(channels, strides, strict=True)]
        self.smallest_image = last = strides[-1]
        if image_size is not None:
            message = f"image_size: expected at least {last} (the stride of the last stage), got {image_size}"
            require(image_size >= last, message)
            self.grid = (-(-image_size // last), -(-image_size // last))

    def sections(self) -> Iterator[Section]:
        """The chain of sections up to the last feature map, for inference in little memory: one if a host says none."""
        width, stride = self.num_features, self.feature_info[-1].stride
        yield Section(
            "features", lambda x: self.forward_stages(x, True)[-1], (self,), width, "numbers", 0, stride, tiled=False
        )

    def forward_stages(self, x: Tensor, only_last: bool = False) -> list[Tensor]:
        """The feature maps `[T, B, C, H, W]` of time-major input, one per stage, described by `feature_info`. With
        `only_last`, that of the last stage alone: the others are let go as soon as the next stage has read them."""
        return self.run_stages(self.stem(x), only_last)

    def run_stages(self, x: Tensor, only_last: bool) -> list[Tensor]:
        """The outputs of `stages`, which follow each other, or that of the last alone."""
        maps = []
        for stage in self.stages:
            x = stage(x)
            if not only_last:
                maps.append(x)
        return maps or [x]

    def head_input(self, x: Tensor, each_step: bool = False) -> Tensor:
        """What the classifier takes of the last feature map: `[T, B, C]`, or here, but for `each_step`, its mean over
        time too, `[B, C]`."""
        # Channels moved last, so that the gradient of the mean is laid out like x.
        return x.permute(0, 1, 3, 4, 2).mean((2, 3) if each_step else (0, 2, 3))

    def head_map(self, x: Tensor) -> Tensor | None:
        """The map of spikes `[T, B, C, H, W]` whose mean over grid and time the classifier takes of the last feature
        map; None where logits of every step are averaged instead, and where a host does not say. `TimeStream` adds it
        up step by step. A call runs the neuron of the head, as `head_input` does."""
        return None

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Logits `[B, classes]` of the last feature map, or with `pre_logits` what the classifier takes, `[B, C]`."""
        if self.training and self.step_logits and not pre_logits:
            return self.head_steps(x)
        features = self.head_input(x)
        y = features if pre_logits else self.head(features)
        return y.mean(0) if y.dim() == 3 else y

    def head_steps(self, x: Tensor) -> Tensor:
        """Logits `[T, B, classes]` of every time step of the last feature map, whose mean `forward_head` gives."""
        return self.head(self.head_input(x, True))

    def forward_features(self, images: Tensor) -> Tensor:
        """The last feature map, `[T, B, C, H, W]`."""
        return self.forward_stages(self.to_time_major(images), only_last=True)[-1]

    def feature_maps(self, images: Tensor) -> list[Tensor]:
        """The feature maps of all stages, `[T, B, C, H, W]` each."""
        return self.forward_stages(self.to_time_major(images))

    def forward(self, images: Tensor) -> Tensor:
        """Logits `[B, classes]` of images `[B, C, H, W]`, shown `time_steps` times, or of frames `[T, B, C, H, W]`."""
        return self.forward_head(self.forward_features(images))

    def forward_steps(self, images: Tensor) -> Tensor:
        """Logits `[T, B, classes]` of every time step by itself. The mean of the first k is what the model
        gives when it sees k steps."""
        return self.head_steps(self.forward_features(images))

    def to_time_major(self, images: Tensor) -> Tensor:
        """Checked images as `[T, B, C, H, W]` in channels-last memory; the steps of static ones share their memory."""
        require(isinstance(images, Tensor), f"images: expected a tensor, got {shown(images)}")
        shape, channels, least = list(images.shape), self.in_channels, self.smallest_image
        require(len(shape) in (4, 5), f"images: expected [B, C, H, W] or [T, B, C, H, W], got {shape}")
        require(shape[-3] == channels, f"images: expected {channels} channels, got {shape[-3]} in {shape}")
        require(0 not in shape, f"images: expected no empty dimension, got {shape}")
        require(min(shape[-2:]) >= least, f"images: expected at least {least} pixels a side, got {shape[-2:]}")
        require(images.is_floating_point(), f"images: expected floating-point numbers, got {images.dtype}")
        dtype = next(self.parameters(), images).dtype  # the copies that nn.DataParallel makes have no parameters
        same = images.dtype == dtype or under_autocast(images)
        require(same, f"images: expected {dtype}, as the model is, or autocast, got {images.dtype}")
        folded = images.flatten(0, -4)
        if not transformed():  # vmap has no memory formats
            folded = folded.contiguous(memory_format=torch.channels_last)
        if images.dim() == 5:
            return folded.unflatten(0, images.shape[:2])
        return folded.unsqueeze(0).expand(self.time_steps, -1, -1, -1, -1)

    @property
    def num_features(self) -> int:
        """Channels of the last feature map, which the classifier takes."""
        return self.feature_info[-1].channels

    @property
    def input_size(self) -> tuple[int, int, int]:
        """Channels, height and width of the images that the model was laid out for."""
        size = self.config.get("image_size", self.usual_image_size)
        return self.in_channels, size, size

    def get_classifier(self) -> nn.Module:
        """The layer that makes logits of features."""
        return self.head

    def reset_classifier(self, num_classes: int) -> None:
        """Puts a fresh classifier for `num_classes` in the place of the old one; 0 removes it."""
        require_integer("num_classes", num_classes, *LIMITS["num_classes"])
        self.head = self.fresh_classifier(num_classes)
        self.config["num_classes"] = num_classes
        self.class_names = None

    def fresh_classifier(self, num_classes: int) -> nn.Module:
        """A classifier with random weights, on the device and in the number format of the model."""
        layer = classifier(self.num_features, num_classes)
        init_weights(layer)
        like = next(self.parameters())
        return layer.to(like.device, like.dtype)


class Backbone(nn.Module):
    """A model without classifier: `forward` takes images `[B, C, H, W]` and gives the maps `[B, C, H, W]` of the stages
    `out_indices`, each the mean over the time steps: all for None, the last n for an integer n, else those of the
    sequence, in which -1 is the last.

    `stages` describes all stages. The classifier is removed; stages behind the last wanted one still run.
    """

    def __init__(self, model: SpikingModel, out_indices: int | Sequence[int] | None = None) -> None:
        super().__init__()
        self.stages, count = list(model.feature_info), len(model.feature_info)
        wanted = range(count) if out_indices is None else out_indices
        wanted = range(-wanted, 0) if isinstance(wanted, int) else wanted
        known = len(wanted) > 0 and all(-count <= i < count for i in wanted)
        require(known, f"out_indices: expected some of the {count} stages (0 to {count - 1}), got {out_indices}")
        self.out_indices = tuple(i % count for i in wanted)
        model.reset_classifier(0)
        self.model = model

    def forward(self, images: Tensor) -> list[Tensor]:
        maps = self.model.feature_maps(images)
        return [maps[i].mean(0) for i in self.out_indices]
