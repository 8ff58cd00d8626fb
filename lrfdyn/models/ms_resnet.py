"""MS-ResNet (Hu et al., 2024): membrane potentials on the shortcuts, neurons only inside the residual branches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from lrfdyn.models.registry import register_model
from lrfdyn.models.resnet import WIDTHS, SpikingResNet
from lrfdyn.nn.layers import ConvBN, MembraneConv, run_stages
from lrfdyn.nn.neurons import MSLIF


class MSResNet(SpikingResNet):
    """`depths` are the basic blocks of each stage."""

    first_stride = 2
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

    def __init__(
        self,
        depths: Sequence[int] = (3, 4, 6, 3),
        widths: Sequence[int] = WIDTHS,
        in_channels: int = 3,
        num_classes: int = 1000,
        time_steps: int = 6,
        drop_path: float = 0.0,
    ) -> None:
        super().__init__(locals())

    def make_stem(self, width: int) -> nn.Module:
        return ConvBN(self.in_channels, width, kernel=7, stride=2)

    def make_neuron(self) -> nn.Module:
        return MSLIF()

    def make_conv(self, c_in: int, c_out: int, stride: int) -> nn.Module:
        return MembraneConv(c_in, c_out, MSLIF(), kernel=3, stride=stride)

    def make_shortcut(self, c_in: int, c_out: int, stride: int) -> nn.Module:
        return ConvBN(c_in, c_out, stride=stride)

    def forward_stages(self, x: Tensor, only_last: bool = False) -> list[Tensor]:
        return run_stages(self.stages, self.stem(x), only_last)

    def head_input(self, x: Tensor) -> Tensor:
        return self.neuron(x).mean((0, 3, 4))


@register_model
def ms_resnet18(**options: Any) -> MSResNet:
    return MSResNet(**{"depths": (2, 2, 2, 2), **options})


@register_model
def ms_resnet34(**options: Any) -> MSResNet:
    return MSResNet(**{"depths": (3, 4, 6, 3), **options})
