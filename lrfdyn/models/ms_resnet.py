"""MS-ResNet (Hu et al., 2024): membrane potentials on the shortcuts, neurons only inside the residual branches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lrfdyn.models.registry import register_model
from lrfdyn.models.resnet import ResNetConfig, SpikingResNet
from lrfdyn.nn.layers import ConvBN, MembraneConv, run_stages
from lrfdyn.nn.neurons import MSLIF


def ms_conv(c_in: int, c_out: int, kernel: int = 1, stride: int = 1) -> MembraneConv:
    return MembraneConv(c_in, c_out, MSLIF(), kernel, stride)


@dataclass
class MSResNetConfig(ResNetConfig):
    """The options of MS-ResNet."""

    time_steps: int = 6


@register_model("ms_resnet18", depths=(2, 2, 2, 2))
@register_model("ms_resnet34", depths=(3, 4, 6, 3))
class MSResNet(SpikingResNet):
    """MS-ResNet: images `[B, C, H, W]` or `[T, B, C, H, W]` to logits `[B, classes]`. Options are the fields of
    `MSResNetConfig`."""

    config_class = MSResNetConfig
    official_keys = (
        (r"^conv1\.0\.", "stem.conv."),
        (r"^conv1\.1\.bn\.", "stem.bn."),
        *(
            (rf"^conv{stage + 2}_x\.(\d+)\.{official}\.", rf"stages.{stage}.\1.{ours}.")
            for stage in range(4)
            for official, ours in (
                (r"residual_function\.1", "conv1.conv"),
                (r"residual_function\.2\.bn", "conv1.bn"),
                (r"residual_function\.4", "conv2.conv"),
                (r"residual_function\.5\.bn", "conv2.bn"),
                (r"shortcut\.0", "shortcut.conv"),
                (r"shortcut\.1\.bn", "shortcut.bn"),
            )
        ),
        (r"^fc\.", "head."),
    )

    def __init__(self, **options: Any) -> None:
        super().__init__(MSResNetConfig(**options), ConvBN, ms_conv, ConvBN, MSLIF(), first_stride=2)

    def forward_stages(self, x: Tensor, only_last: bool = False) -> list[Tensor]:
        return run_stages(self.stages, self.stem(x), only_last)

    def head_input(self, x: Tensor) -> Tensor:
        return self.neuron(x).mean((0, 3, 4))
