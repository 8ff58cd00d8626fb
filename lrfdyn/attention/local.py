"""Local receptive fields as a module: one learnable 3x3 stencil per dilation and channel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import torch
from torch import Tensor, nn

from lrfdyn.errors import require, require_integers
from lrfdyn.ops.bits import step_bits_of
from lrfdyn.ops.lrf import lrf, lrf_reference


class LocalReceptiveFields(nn.Module):
    """sum_d DWConv3x3(x; dilation d), added to a residual."""

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
        y = lrf(tokens, self.weight, self.dilations, added, step_bits_of(x))
        return y.unflatten(0, x.shape[:2])

    def taps(self, queries: range, grid: tuple[int, int]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """The stencils over a range of tokens, offset by offset: which tokens of the range have a neighbour on the
        grid there, that neighbour, and its weights `[C]`, those of all dilations added."""
        offsets: dict[tuple[int, int], Tensor] = {}
        for stencil, dilation in zip(self.weight, self.dilations, strict=True):
            for a, b in product(range(3), repeat=2):
                offset, weight = ((a - 1) * dilation, (b - 1) * dilation), stencil[:, a, b]
                offsets[offset] = offsets[offset] + weight if offset in offsets else weight
        height, width = grid
        token = torch.arange(queries.start, queries.stop, device=self.weight.device)
        for (dy, dx), weight in offsets.items():
            y, x = token // width + dy, token % width + dx
            rows = ((y >= 0) & (y < height) & (x >= 0) & (x < width)).nonzero().squeeze(1)
            yield rows, (y * width + x)[rows], weight

    def uses(self, grid: tuple[int, int]) -> Tensor:
        """How many weights of a channel each token meets, `[H, W]`: the stencils are symmetric, so as many as it
        reads."""
        ones = torch.ones(len(self.dilations), 1, 3, 3, dtype=torch.float64)
        return lrf_reference(ones.new_ones(1, 1, *grid), ones, self.dilations)[0, 0]

    def reach(self, height: int) -> int:
        """How many rows below a token the stencils read on a grid of `height` rows: 0 without stencils."""
        return max((d for d in self.dilations if d < height), default=0)

    def extra_repr(self) -> str:
        return f"channels={self.weight.shape[1]}, dilations={self.dilations}"
