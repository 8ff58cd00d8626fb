"""SEW-ResNet (Fang et al., 2021): spikes on the shortcuts, added element-wise."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lrfdyn.models.registry import register_model
from lrfdyn.models.resnet import ResNetConfig, SpikingResNet
from lrfdyn.nn.layers import ConvBN, SpikingConv, convolve, max_pool, run_stages
from lrfdyn.nn.neurons import IF


class Stem(ConvBN):
    """Convolution and batch norm of a static image run once, so that its statistics do not count the time steps."""

    def forward(self, x: Tensor) -> Tensor:
        return convolve(lambda frames: self.bn(self.conv(frames)), x)


def if_conv(c_in: int, c_out: int, kernel: int = 1, stride: int = 1) -> SpikingConv:
    return SpikingConv(c_in, c_out, IF(), kernel, stride)


@register_model("sew_resnet18", depths=(2, 2, 2, 2))
@register_model("sew_resnet34", depths=(3, 4, 6, 3))
class SEWResNet(SpikingResNet):
    """SEW-ResNet: images `[B, C, H, W]` or `[T, B, C, H, W]` to logits `[B, classes]`. Options are the fields of
    `ResNetConfig`."""

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

    def __init__(self, **options: Any) -> None:
        # A max pool comes before stage 1.
        super().__init__(ResNetConfig(**options), Stem, if_conv, if_conv, IF(), first_stride=1)

    def forward_stages(self, x: Tensor, only_last: bool = False) -> list[Tensor]:
        return run_stages(self.stages, max_pool(self.neuron(self.stem(x))), only_last)

    def head_input(self, x: Tensor) -> Tensor:
        return x.mean((0, 3, 4))
