"""SEW-ResNet (Fang et al., 2021) and MS-ResNet (Hu et al., 2024), the hosts without attention, and a ResNet without
spikes, their reference and a teacher."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

from torch import Tensor, nn

from lrfdyn.errors import require
from lrfdyn.models.base import ModelConfig, SpikingModel, classifier, shown_once
from lrfdyn.models.registry import register_model
from lrfdyn.nn.layers import ConvBN, DropPath, MembraneConv, SpikingConv, convolve, drop_path_rates, max_pool
from lrfdyn.nn.neurons import IF, MSLIF
from lrfdyn.ops.bn_lif.reference import settle_strides


@dataclass
class ResNetConfig(ModelConfig):
    """The options of SEW-ResNet."""

    depths: Sequence[int] = (3, 4, 6, 3)
    """Number of basic blocks in each stage."""
    widths: Sequence[int] = (64, 128, 256, 512)
    """Channels of each stage."""
    drop_path: float = 0.0
    """Stochastic depth: the drop rate of the last block. Rates grow linearly from 0 at the first one."""


@dataclass
class MSResNetConfig(ResNetConfig):
    """The options of MS-ResNet."""

    time_steps: int = 6


@dataclass
class PlainResNetConfig(MSResNetConfig):
    """The options of the ResNet without spikes."""

    time_steps: int = 1
    """Always 1: without spikes, every time step would compute the same."""

    def __post_init__(self) -> None:
        super().__post_init__()
        shown_once(self.time_steps)


class BasicBlock(nn.Module):
    """Two convolutions on `[T, B, C, H, W]`, and a shortcut that is the identity where the shapes allow it."""

    def __init__(self, conv1: nn.Module, conv2: nn.Module, shortcut: nn.Module, drop_path: float) -> None:
        super().__init__()
        self.conv1, self.conv2, self.shortcut = conv1, conv2, shortcut
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop_path(self.conv2(self.conv1(x))) + self.shortcut(x)


class SpikingResNet(SpikingModel):
    """A residual network. The stem halves the image's side, stage 1 ends at a quarter of it, and each further stage
    halves it again; of a host for small images, both have the image's side. A host says which layers and neurons it
    has, and the stride of stage 1."""

    config_class: ClassVar[type[ResNetConfig]]
    stem_layer: ClassVar[type[ConvBN]] = ConvBN
    layer: ClassVar[type[SpikingConv | MembraneConv]]
    neuron_class: ClassVar[type[IF | MSLIF | nn.ReLU]]
    first_stride: ClassVar[int]
    small_images: ClassVar[bool] = False

    def __init__(self, **options: Any) -> None:
        config = self.config_class(**options)
        super().__init__(config)
        depths, widths = tuple(config.depths), tuple(config.widths)
        require(len(widths) >= 1 and min(widths) >= 1, f"widths: expected integers >= 1, got {widths}")
        known = len(depths) == len(widths) and min(depths) >= 1
        require(known, f"depths: expected {len(widths)} integers >= 1 (one for each width), got {depths}")
        small = self.small_images
        self.describe_stages(widths, [(1 if small else 4) * 2**i for i in range(len(widths))])
        rates = iter(drop_path_rates(config.drop_path, sum(depths)))

        def conv(c_in: int, c_out: int, **shape: int) -> nn.Module:
            return self.layer(c_in, c_out, self.neuron_class(), **shape)

        def block(c_in: int, c_out: int, stride: int) -> BasicBlock:
            convs = conv(c_in, c_out, kernel=3, stride=stride), conv(c_out, c_out, kernel=3)
            shortcut = conv if self.layer is SpikingConv else ConvBN  # potentials pass without a neuron
            same = stride == 1 and c_in == c_out
            return BasicBlock(*convs, nn.Identity() if same else shortcut(c_in, c_out, stride=stride), next(rates))

        kernel, stride = (3, 1) if small else (7, 2)
        self.stem = self.stem_layer(self.in_channels, widths[0], kernel=kernel, stride=stride)
        self.neuron = self.neuron_class()
        self.stages = nn.ModuleList()
        for i, (c_in, c_out) in enumerate(pairwise([widths[0], *widths])):
            first = block(c_in, c_out, 2 if i else self.first_stride)
            self.stages.append(nn.Sequential(first, *(block(c_out, c_out, 1) for _ in range(depths[i] - 1))))
        self.head = classifier(widths[-1], config.num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def head_map(self, x: Tensor) -> Tensor:
        return x

    def head_input(self, x: Tensor, each_step: bool = False) -> Tensor:
        return self.head_map(x).mean((3, 4) if each_step else (0, 3, 4))


class SEWStem(ConvBN):
    """Convolution and batch norm of a static image run once, so that its statistics do not count the time steps."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # no residual and no pool
        return convolve(lambda frames: self.bn(settle_strides(self.conv(frames))), x)


@register_model("sew_resnet18", depths=(2, 2, 2, 2))
@register_model("sew_resnet34", depths=(3, 4, 6, 3))
class SEWResNet(SpikingResNet):
    """SEW-ResNet: images `[B, C, H, W]` or `[T, B, C, H, W]` to logits `[B, classes]`. Its shortcuts carry spikes,
    added element-wise. Options are the fields of `ResNetConfig`."""

    config_class = ResNetConfig
    stem_layer, layer, neuron_class, first_stride = SEWStem, SpikingConv, IF, 1
    official_keys = (
        (r"downsample\.0\.", "shortcut."),
        *((rf"^layer{i + 1}\.", f"stages.{i}.") for i in range(4)),
        (r"\.module\.0\.", ".conv."),
        (r"\.module\.1\.", ".bn."),
        (r"^(conv|bn)1\.", r"stem.\1."),
        (r"^fc\.", "head."),
    )

    def forward_stages(self, x: Tensor, only_last: bool = False) -> list[Tensor]:
        return self.run_stages(max_pool(self.neuron(self.stem(x))), only_last)


@register_model("ms_resnet18", depths=(2, 2, 2, 2))
@register_model("ms_resnet34", depths=(3, 4, 6, 3))
class MSResNet(SpikingResNet):
    """MS-ResNet: images `[B, C, H, W]` or `[T, B, C, H, W]` to logits `[B, classes]`. Its shortcuts carry membrane
    potentials, and neurons are only inside the residual branches. Options are the fields of `MSResNetConfig`."""

    config_class: ClassVar[type[MSResNetConfig]] = MSResNetConfig
    layer, first_stride = MembraneConv, 2
    neuron_class: ClassVar[type[MSLIF | nn.ReLU]] = MSLIF
    official_keys = (
        *((rf"^conv{i + 2}_x\.", f"stages.{i}.") for i in range(4)),
        (r"^conv1\.0\.", "stem.conv."),
        (r"^conv1\.1\.bn\.", "stem.bn."),
        (r"residual_function\.1\.", "conv1.conv."),
        (r"residual_function\.2\.bn\.", "conv1.bn."),
        (r"residual_function\.4\.", "conv2.conv."),
        (r"residual_function\.5\.bn\.", "conv2.bn."),
        (r"shortcut\.0\.", "shortcut.conv."),
        (r"shortcut\.1\.bn\.", "shortcut.bn."),
        (r"^fc\.", "head."),
    )

    def head_map(self, x: Tensor) -> Tensor:
        return self.neuron(x)


@register_model("resnet18_cifar", depths=(2, 2, 2, 2), num_classes=100)
class PlainResNet(MSResNet):
    """A residual network without spikes for small images: images `[B, C, H, W]` to logits `[B, classes]`. It is
    MS-ResNet with ReLUs in the place of its neurons, and a stem that keeps the image's side. Options are the fields of
    `PlainResNetConfig`."""

    config_class = PlainResNetConfig
    spiking = False
    neuron_class, first_stride, small_images = nn.ReLU, 1, True
    usual_image_size = 32
    official_keys = ()
