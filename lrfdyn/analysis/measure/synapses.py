"""How many weights the input at each place of a grid meets."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lrfdyn.errors import require


def axis_uses(size: int, kernel: int, stride: int, padding: int, dilation: int) -> Tensor:
    """Along one axis: how many outputs each of `size` inputs reaches."""
    outputs = (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
    at = torch.arange(outputs).unsqueeze(1) * stride - padding + torch.arange(kernel) * dilation
    return torch.bincount(at[(at >= 0) & (at < size)], minlength=size).double()


def grid_uses(
    height: int, width: int, kernel: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int],
    dilation: tuple[int, int],
) -> Tensor:  # fmt: skip
    """`[H, W]`: for one output channel, how many outputs each input reaches."""
    rows, columns = (
        axis_uses(size, kernel[i], stride[i], padding[i], dilation[i]) for i, size in enumerate((height, width))
    )
    return rows.unsqueeze(1) * columns


def conv_uses(conv: nn.Conv2d, height: int, width: int, device: torch.device) -> Tensor:
    require(
        not isinstance(conv.padding, str) and conv.padding_mode == "zeros",
        f"model: expected convolutions with zero padding by numbers, got padding={conv.padding!r}",
    )
    assert not isinstance(conv.padding, str)
    sizes: list[tuple[int, int]] = [tuple(v) for v in (conv.kernel_size, conv.stride, conv.padding, conv.dilation)]  # type: ignore[misc]
    return grid_uses(height, width, *sizes).to(device)


def stencil_uses(height: int, width: int, dilation: int, device: torch.device) -> Tensor:
    """Of a 3x3 stencil that keeps the size."""
    return grid_uses(height, width, (3, 3), (1, 1), (dilation, dilation), (dilation, dilation)).to(device)
