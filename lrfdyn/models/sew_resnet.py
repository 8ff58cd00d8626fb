"""SEW-ResNet (Fang et al., 2021): spikes on the shortcuts, added element-wise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from lrfdyn.models.registry import register_model
from lrfdyn.models.resnet import WIDTHS, SpikingResNet
from lrfdyn.nn.layers import ConvBN, SpikingConv, convolve, max_pool, run_stages
from lrfdyn.nn.neurons import IF


class Stem(ConvBN):
    """Convolution and batch norm of a static image run once, so that its statistics do not count the time steps."""

    def forward(self, x: Tensor) -> Tensor:
        return convolve(lambda frames: self.bn(self.conv(frames)), x)


class SEWResNet(SpikingResNet):
    """`depths` are the basic blocks of each stage."""

    first_stride = 1  # a max pool comes before stage 1
    official_keys = (
        (r"^conv1\.", "stem.conv."),
        (r"^bn1\.", "stem.bn."),
        *(
            (rf"^layer{stage + 1}\.(\d+)\.{official}\.", rf"stages.{stage}.\1.{ours}.")
            for stage in range(4)
            for official, ours in (
                (r"(conv[12])\.module\.0", r"\2.conv"),
                (r"(conv[12])\.module\.1", r"\2.bn"),
                (r"downsample\.0\.module\.0", "shortcut.conv"),
                (r"downsample\.0\.module\.1", "shortcut.bn"),
            )
        ),
        (r"^fc\.", "head."),
    )

    def __init__(
        self,
        depths: Sequence[int] = (3, 4, 6, 3),
        widths: Sequence[int] = WIDTHS,
        in_channels: int = 3,
        num_classes: int = 1000,
        time_steps: int = 4,
        drop_path: float = 0.0,
    ) -> None:
        super().__init__(locals())

    def make_stem(self, width: int) -> nn.Module:
        return Stem(self.in_channels, width, kernel=7, stride=2)

    def make_neuron(self) -> nn.Module:
        return IF()

    def make_conv(self, c_in: int, c_out: int, stride: int) -> nn.Module:
        return SpikingConv(c_in, c_out, IF(), kernel=3, stride=stride)

    def make_shortcut(self, c_in: int, c_out: int, stride: int) -> nn.Module:
        return SpikingConv(c_in, c_out, IF(), stride=stride)

    def forward_stages(self, x: Tensor, only_last: bool = False) -> list[Tensor]:
        return run_stages(self.stages, max_pool(self.neuron(self.stem(x))), only_last)

    def head_input(self, x: Tensor) -> Tensor:
        return x.mean((0, 3, 4))


@register_model
def sew_resnet18(**options: Any) -> SEWResNet:
    return SEWResNet(**{"depths": (2, 2, 2, 2), **options})


@register_model
def sew_resnet34(**options: Any) -> SEWResNet:
    return SEWResNet(**{"depths": (3, 4, 6, 3), **options})
