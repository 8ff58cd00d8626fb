"""Local receptive fields as a module: one learnable 3x3 stencil per dilation and channel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lrfdyn.errors import require, require_integers
from lrfdyn.ops.lrf import lrf
from lrfdyn.ops.spike_bits import bits_of


class LocalReceptiveFields(nn.Module):
    """x + sum_d DWConv3x3(x; dilation d), or only the sum added to another tensor."""

    weight: Tensor

    def __init__(self, channels: int, dilations: Sequence[int]) -> None:
        super().__init__()
        require_integers("dilations", dilations)
        self.dilations = tuple(dilations)
        require(
            len(set(self.dilations)) == len(self.dilations) and all(d >= 1 for d in self.dilations),
            f"dilations: expected different integers >= 1, got {self.dilations}",
        )
        if self.dilations:
            self.weight = nn.Parameter(torch.empty(len(self.dilations), channels, 3, 3))
            nn.init.uniform_(self.weight, -1 / 3, 1 / 3)  # a convolution of nine inputs per output
        else:
            # Nothing to learn, and nothing in checkpoints: without dilations the keys are those of the attention alone.
            # On a device with memory even in a model without any, which no file would fill.
            self.register_buffer("weight", torch.empty(0, channels, 3, 3, device="cpu"), persistent=False)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """`residual` + the stencils over `x`, both `[T, B, C, H, W]`."""
        if not self.dilations:
            return residual
        tokens = x.flatten(0, 1)
        added = tokens if residual is x else residual.flatten(0, 1)
        # Spikes come with their bits from the kernels of a GPU.
        y = lrf(tokens, self.weight, self.dilations, added, bits_of(x))
        return y.unflatten(0, x.shape[:2])

    def matrix(self, grid: tuple[int, int]) -> Tensor:
        """The stencils as `[C, N, N]` over the grid: row = output token, column = input token."""
        height, width = grid
        n = height * width
        # Every token in turn is 1 and all others 0; the response to token j is column j.
        impulses = torch.eye(n, dtype=self.weight.dtype, device=self.weight.device)
        impulses = impulses.reshape(n, 1, height, width).expand(-1, self.weight.shape[1], -1, -1)
        return lrf(impulses, self.weight, self.dilations).flatten(2).permute(1, 2, 0)

    def reach(self, height: int) -> int:
        """How many rows below a token the stencils read on a grid of `height` rows: 0 without stencils."""
        return max((d for d in self.dilations if d < height), default=0)

    def extra_repr(self) -> str:
        return f"channels={self.weight.shape[1]}, dilations={self.dilations}"
