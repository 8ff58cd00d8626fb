"""Semantic segmentation: any host's stages, or a timm network's, under a Semantic FPN head (Kirillov et al., 2019),
spiking as in SDT-V3, or with ReLU for the networks it is compared with."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lrfdyn.checks import check_types, checked, hints_of
from lrfdyn.errors import LrfdynError, require, require_integer
from lrfdyn.models.base import FeatureInfo, ModelConfig, SpikingModel
from lrfdyn.models.registry import create_model, host_options, model_class
from lrfdyn.models.timm_networks import create_timm
from lrfdyn.nn.layers import ConvBN, MembraneConv, fold_time
from lrfdyn.nn.neurons import LIF, IntegerSpike
from lrfdyn.sources import find_source

TIMM = "timm/"
ANN_HEAD = {"neck_width": 256}  # Semantic FPN as the ANN rows of the table were published
Neuron = Callable[[], nn.Module]


class PlainConv(nn.Module):
    """A convolution with bias and nothing around it, as the neck of the ANN version has them."""

    def __init__(self, c_in: int, c_out: int, kernel: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(c_in, c_out, kernel, padding=kernel // 2)

    def forward(self, x: Tensor) -> Tensor:
        return fold_time(self.conv, x)


class ReluConv(ConvBN):
    """ReLU(BN(Conv(x)))."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # no residual and no pool
        return F.relu(super().forward(x))


class ScalePath(nn.Module):
    """Takes a stage `[T, B, c_in, H, W]` to the common grid: a convolution per doubling, or one alone with a stride."""

    def __init__(self, stride: int, output_stride: int, c_in: int, c_out: int, neuron: Neuron | None) -> None:
        super().__init__()
        self.doublings = round(math.log2(stride / output_stride))
        whole = stride * 2**-self.doublings == output_stride
        require(whole, f"output_stride: expected a power of two apart from the stride {stride}, got {output_stride}")
        self.convs = nn.ModuleList()
        for width, step in [(c_in, 2 ** max(0, -self.doublings)), *[(c_out, 1)] * (self.doublings - 1)]:
            if neuron is None:
                self.convs.append(ReluConv(width, c_out, kernel=3, stride=step))
            else:
                self.convs.append(MembraneConv(width, c_out, neuron(), kernel=3, stride=step))

    def forward(self, x: Tensor) -> Tensor:
        for i, conv in enumerate(self.convs):
            x = conv(x)
            if i < self.doublings:
                x = fold_time(lambda y: F.interpolate(y, scale_factor=2, mode="bilinear"), x)
        return x


def resize(x: Tensor, like: Tensor, mode: str) -> Tensor:
    """Interpolates `[T, B, C, H, W]` to the grid of `like`."""
    size = like.shape[-2:]
    return x if x.shape[-2:] == size else fold_time(lambda y: F.interpolate(y, size=size, mode=mode), x)


class FPNHead(nn.Module):
    """Maps of the stages `[T, B, C, H, W]`, the finest first, to logits `[B, classes, H / output_stride, W /
    output_stride]`. `neuron` makes the neuron in front of every convolution; None takes ReLU behind them and no norms
    in the neck. With `output_stride=4` (Semantic FPN's own) the head of SDT-V3 has the 1.4 M parameters that are
    published; its published code fuses at stride 2, with two convolutions more."""

    def __init__(
        self,
        stages: Sequence[FeatureInfo],
        num_classes: int,
        neuron: Neuron | None,
        *,
        width: int = 128,
        neck_width: int | None = None,
        output_stride: int = 4,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        neck_width = width if neck_width is None else neck_width
        for name, value in (("width", width), ("neck_width", neck_width), ("output_stride", output_stride)):
            require_integer(name, value, 1)
        require(0 <= dropout < 1, f"dropout: expected a rate in [0, 1), got {dropout}")
        self.lateral, self.smooth, self.paths = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        for stage in stages:
            if neuron is None:
                self.lateral.append(PlainConv(stage.channels, neck_width, 1))
                self.smooth.append(PlainConv(neck_width, neck_width, 3))
            else:
                self.lateral.append(MembraneConv(stage.channels, neck_width, neuron(), bias=True))
                self.smooth.append(MembraneConv(neck_width, neck_width, neuron(), kernel=3, bias=True))
            self.paths.append(ScalePath(stage.stride, output_stride, neck_width, width, neuron))
        self.neuron = neuron() if neuron is not None else nn.Identity()
        self.dropout = nn.Dropout2d(dropout)
        self.classifier = nn.Conv2d(width, num_classes, 1)
        nn.init.normal_(self.classifier.weight, std=0.01)
        nn.init.zeros_(self.classifier.bias)  # type: ignore[arg-type]  # it has one

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        x = [lateral(m) for lateral, m in zip(self.lateral, maps, strict=True)]
        for i in range(len(x) - 1, 0, -1):
            x[i - 1] = x[i - 1] + resize(x[i], like=x[i - 1], mode="nearest")
        levels = [path(smooth(y)) for path, smooth, y in zip(self.paths, self.smooth, x, strict=True)]
        fused = levels[0]
        for level in levels[1:]:
            fused = fused + resize(level, like=fused, mode="bilinear")
        # The classifier is linear, so the mean over time may come before it.
        return self.classifier(self.dropout(self.neuron(fused).mean(0)))


class TimmStages(nn.Module):
    """The stages of a timm network as a host has them: maps `[1, B, C, H, W]` with strides from 4 on."""

    time_steps = 1

    def __init__(self, name: str, in_channels: int, pretrained: bool = False, **options: Any) -> None:
        super().__init__()
        # A model that a file describes is built without memory, and its weights are in the file.
        pretrained = pretrained and torch.get_default_device().type != "meta"
        how = {"pretrained": pretrained, "features_only": True, "in_chans": in_channels}
        self.net = create_timm("model", name, options, **how)
        info = list(zip(self.net.feature_info.channels(), self.net.feature_info.reduction(), strict=True))
        self.wanted = [i for i, (_, stride) in enumerate(info) if stride >= 4]
        self.feature_info = [FeatureInfo(*info[i]) for i in self.wanted]

    def feature_maps(self, images: Tensor) -> list[Tensor]:
        maps = self.net(images)
        return [maps[i].unsqueeze(0) for i in self.wanted]


@dataclass
class SegmenterConfig(ModelConfig):
    """The options of `Segmenter`."""

    num_classes: int = 150
    image_size: int = 512
    """Height and width of the images that the backbone is laid out for; others may still be shown."""
    time_steps: int | None = None  # type: ignore[assignment]
    """T of the backbone; None takes its default."""
    backbone: str = "sdt_v3_s"
    """A host's name, or "timm/NAME" for an ANN to compare with."""
    attention: str | None = None
    """Kind of the backbone's attention; None takes its default."""
    attention_options: dict[str, Any] | None = None
    """Options of that kind."""
    backbone_options: dict[str, Any] | None = None
    """Further options of the backbone."""
    head_options: dict[str, Any] | None = None
    """Options of `FPNHead`."""


class Segmenter(SpikingModel):
    """A backbone under a Semantic FPN head: images `[B, C, H, W]` to logits `[B, classes, H, W]`. Options are the
    fields of `SegmenterConfig`."""

    config_class = SegmenterConfig
    pipeline_tag = "image-segmentation"

    def __init__(self, **options: Any) -> None:
        config = SegmenterConfig(**options)
        backbone, in_channels = config.backbone, config.in_channels
        named = {name: getattr(config, name) for name in ("time_steps", "attention", "attention_options")}
        asked = {**(config.backbone_options or {}), **{key: value for key, value in named.items() if value is not None}}
        host: Any
        if backbone.startswith(TIMM):
            require(asked.pop("time_steps", 1) == 1, f"time_steps: {backbone} has one, got {config.time_steps}")
            host = TimmStages(backbone.removeprefix(TIMM), in_channels, **asked)
            asked.pop("pretrained", None)  # it is in the weights now
            config = replace(config, backbone_options=asked or None)
        else:
            if "image_size" in model_class(backbone).options():
                asked["image_size"] = config.image_size
            host = create_model(backbone, num_classes=0, in_channels=in_channels, **asked)
            config = replace(config, attention=host.config.get("attention"))
        super().__init__(replace(config, time_steps=host.time_steps))
        self.backbone, self.feature_info = host, host.feature_info
        self.smallest_image = self.stride
        self.head = self.fresh_classifier(config.num_classes)
        self.name = f"{backbone}_fpn"

    def fresh_classifier(self, num_classes: int) -> FPNHead:
        """A head with random weights and the host's kind of neuron."""
        require_integer("num_classes", num_classes, 1)
        neuron: Neuron | None = None
        if isinstance(self.backbone, SpikingModel):
            levels = self.backbone.config.get("levels")
            neuron = LIF if levels is None else partial(IntegerSpike, levels)
        options = {**(ANN_HEAD if neuron is None else {}), **(self.config["head_options"] or {})}
        like = next(self.parameters())
        try:
            return FPNHead(self.feature_info, num_classes, neuron, **options).to(like.device, like.dtype)
        except TypeError as error:
            raise LrfdynError(f"head_options: {error}") from None

    @property
    def size(self) -> dict[str, Any]:
        return self.backbone.size if isinstance(self.backbone, SpikingModel) else {}

    @property
    def stride(self) -> int:
        """Images are padded to a multiple of this."""
        return self.feature_info[-1].stride

    def forward(self, images: Tensor) -> Tensor:
        """Logits `[B, classes, H, W]` of images `[B, C, H, W]`."""
        logits, size = self.head(self.feature_maps(images)), images.shape[-2:]
        if logits.is_cuda and logits.requires_grad:
            return enlarge(logits, size)
        return F.interpolate(logits, size=size, mode="bilinear")

    def feature_maps(self, images: Tensor) -> list[Tensor]:
        return self.backbone.feature_maps(images)

    def forward_stages(self, x: Tensor, only_last: bool = False) -> list[Tensor]:
        return self.backbone.forward_stages(x, only_last)

    def get_classifier(self) -> nn.Module:
        return self.head.classifier  # type: ignore[return-value]


def enlarge(x: Tensor, size: Sequence[int]) -> Tensor:
    """`F.interpolate(x, size, mode="bilinear")` of `[B, C, H, W]` as two matrix products, for training on a GPU, where
    the gradient of `interpolate` is atomic additions, slow in 16 bits and of no fixed order."""

    def weights(length: int, new: int) -> Tensor:  # [length, new]
        unit = torch.eye(length, device=x.device)
        return F.interpolate(unit[None], size=new, mode="linear")[0].to(x.dtype)

    (height, width), (high, wide) = x.shape[-2:], size
    rows = x.flatten(0, 1) @ weights(width, wide)
    return torch.bmm(weights(height, high).mT.expand(len(rows), -1, -1), rows).unflatten(0, x.shape[:2])


@checked
def create_segmenter(name: str, **options: Any) -> Segmenter:
    """Builds a segmentation model with random weights on the backbone `name`, a host's name or "timm/NAME".

    `options` are the fields of `SegmenterConfig`, and further ones of `create_model` (`dilations`, `drop_path`, ...).
    The model takes images `[B, C, H, W]` and gives logits `[B, classes, H, W]`.

        model = lrfdyn.create_segmenter("sdt_v3_s", attention="lrf_dyn", num_classes=150)
        logits = model(torch.randn(1, 3, 512, 512))  # [1, 150, 512, 512]
    """
    own = {key: options.pop(key) for key in list(options) if key in Segmenter.options()}
    check_types(own, hints_of(SegmenterConfig))
    require("backbone" not in own, f"backbone: is the name, {name!r}, and cannot be an option too")
    if not name.startswith(TIMM):
        kind = {key: own.pop(key) for key in ("attention", "attention_options") if own.get(key)}
        options = host_options(name, {**kind, **options})
        own |= {key: options.pop(key) for key in ("attention", "attention_options") if key in options}
    backbone_options = {**options, **(own.pop("backbone_options", None) or {})}
    return Segmenter(backbone=name, backbone_options=backbone_options or None, **own)


def load_backbone(model: SpikingModel, source: str) -> None:
    """Fills the backbone of a `Segmenter` from a trained classifier of the same host, found by `lrfdyn.sources`."""
    assert isinstance(model, Segmenter)
    find_source(source, "model.backbone").fill(model.backbone, leave_out="head.")
