"""SDT-V2, Meta-SpikeFormer (Yao et al., 2024), with any attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lrfdyn.attention import AttentionHost
from lrfdyn.errors import require
from lrfdyn.models.metaformer import OFFICIAL_KEYS, MetaFormer, MetaFormerConfig
from lrfdyn.models.registry import register_model
from lrfdyn.nn.layers import (
    ConvBN,
    MembraneBlock,
    MembraneConv,
    MembraneMLP,
    add_output,
    convolve_spikes,
    fold_time,
    norm_fire,
)
from lrfdyn.nn.neurons import LIF, observed
from lrfdyn.ops.dispatch import transformed


class SeparableConv(nn.Module):
    """A depth-wise between two 1x1 convolutions on potentials `[T, B, dim, H, W]`, no norm and neuron behind it; plus
    a `residual`."""

    def __init__(self, dim: int, kernel: int, neuron: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.expand = MembraneConv(dim, 2 * dim, neuron())
        self.neuron = neuron()
        self.depthwise = nn.Conv2d(2 * dim, 2 * dim, kernel, padding=kernel // 2, groups=2 * dim, bias=False)
        self.contract = ConvBN(2 * dim, dim)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        spikes = MembraneConv.chain([self.expand], x, neuron=self.neuron)
        spikes = convolve_spikes(self.depthwise, spikes)
        return self.contract(spikes) if residual is None else add_output(residual, self.contract, spikes)


class RepConv(nn.Module):
    """A chain of linear layers on `[N, C, H, W]` that equals one 3x3 convolution once its statistics are fixed."""

    def __init__(self, c_in: int, c_out: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(c_in, c_in, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(c_in)
        self.depthwise = nn.Conv2d(c_in, c_in, 3, groups=c_in, bias=False)
        self.conv2 = nn.Conv2d(c_in, c_out, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(c_out)

    def forward(self, x: Tensor) -> Tensor:
        return self.over_steps(x.unsqueeze(0)).squeeze(0)

    def over_steps(self, x: Tensor) -> Tensor:
        """The same of `[T, B, C, H, W]`; on a GPU its backward pass takes spikes as bits."""
        y = norm_fire(self.bn1, None, convolve_spikes(self.conv1, x))
        y = fold_time(lambda y: self.conv2(self.depthwise(with_border(y, self.bn1))), y)
        return norm_fire(self.bn2, None, y)


def with_border(y: Tensor, bn: Any) -> Tensor:
    """Puts one more pixel on each side of `y`, `[N, C, H, W]`, which `bn` gave: what `bn` makes of 0 with its running
    statistics, in training those that `y` has just updated. The border carries no gradient."""
    require(bn.running_mean is not None, "bn: expected running statistics, which the border is made of, got none")
    with torch.no_grad():
        zero = bn.bias - bn.running_mean * bn.weight / torch.sqrt(bn.running_var + bn.eps)
        zero = zero.to(y.dtype).reshape(1, -1, 1, 1)
    if transformed():  # PyTorch's vmap over grad gets writes into a part of a tensor wrong
        border = F.pad(torch.zeros_like(y), (1, 1, 1, 1), value=1.0)
        return F.pad(y, (1, 1, 1, 1)) + border * zero.detach()
    with torch.no_grad():
        shape = (*y.shape[:2], y.shape[2] + 2, y.shape[3] + 2)
        out = zero.expand(shape).clone(memory_format=torch.channels_last)
    out[..., 1:-1, 1:-1] = y
    return out


class RepConvBN(nn.Module):
    """A `RepConv` and a batch norm on `[T, B, C, H, W]`, and the spikes of a neuron where there is one; plus a
    `residual`."""

    def __init__(self, c_in: int, c_out: int, neuron: nn.Module | None = None) -> None:
        super().__init__()
        self.conv = RepConv(c_in, c_out)
        self.bn = nn.BatchNorm2d(c_out)
        self.neuron = nn.Identity() if neuron is None else neuron

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        whole = type(self.conv) is RepConv and not observed(self.conv)
        y = self.conv.over_steps(x) if whole else fold_time(self.conv, x)
        none = type(self.neuron) is nn.Identity and not observed(self.neuron)
        return norm_fire(self.bn, None if none else self.neuron, y, residual)


def lif_rep_conv(c_in: int, c_out: int) -> RepConvBN:
    return RepConvBN(c_in, c_out, LIF())


ATTENTION_HOST = AttentionHost(project=lif_rep_conv, project_out=RepConvBN)


@dataclass
class SDTV2Config(MetaFormerConfig):
    """The options of SDT-V2."""

    distillation: bool = False
    """A second classifier on the same spikes: training gives the logits of both, evaluation their average."""


@register_model("sdt_v2_15m", widths=(64, 128, 256, 360))
@register_model("sdt_v2_31m", widths=(96, 192, 384, 480))
@register_model("sdt_v2_55m", widths=(128, 256, 512, 640))
class SDTV2(MetaFormer):
    """SDT-V2: images `[B, C, H, W]` or `[T, B, C, H, W]` to logits `[B, classes]`, with `distillation` in training to
    those of both classifiers. Options are the fields of `SDTV2Config`."""

    config_class = SDTV2Config
    official_keys = (
        (r"\.Conv\.(pwconv|bn)1\.", r".separable.expand.\1."),
        (r"\.Conv\.dwconv\.", ".separable.depthwise."),
        (r"\.Conv\.(pwconv|bn)2\.", r".separable.contract.\1."),
        (r"\.pwconv\.", ".conv."),
        (r"_conv\.0\.body\.0\.", ".conv.conv1."),
        (r"_conv\.0\.body\.1\.bn\.", ".conv.bn1."),
        (r"_conv\.0\.body\.2\.0\.", ".conv.depthwise."),
        (r"_conv\.0\.body\.2\.1\.", ".conv.conv2."),
        (r"_conv\.0\.body\.2\.2\.", ".conv.bn2."),
        (r"_conv\.1\.", ".bn."),
        (r"^head_kd\.", "distillation_head."),
        *OFFICIAL_KEYS,
    )
    separable = SeparableConv

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        second = self.config["distillation"]
        self.distillation_head = self.fresh_classifier(self.num_classes) if second else None

    def make_block(self, config: SDTV2Config, width: int, drop_path: float) -> MembraneBlock:
        attn = config.make_attention(width, self.grid, ATTENTION_HOST)
        return MembraneBlock(LIF(), attn, MembraneMLP(width, config.hidden_width(width), LIF), drop_path)

    def reset_classifier(self, num_classes: int) -> None:
        super().reset_classifier(num_classes)
        if self.distillation_head is not None:
            self.distillation_head = self.fresh_classifier(num_classes)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Any:
        if self.distillation_head is None or pre_logits:
            return super().forward_head(x, pre_logits)
        spikes = self.head_input(x)
        logits, distilled = self.head(spikes).mean(0), self.distillation_head(spikes).mean(0)
        return (logits, distilled) if self.training else (logits + distilled) / 2

    def head_steps(self, x: Tensor) -> Tensor:
        if self.distillation_head is None:
            return super().head_steps(x)
        spikes = self.head_input(x)
        return (self.head(spikes) + self.distillation_head(spikes)) / 2
