"""LRF-Dyn: dendrites run over the tokens instead of an attention matrix, local receptive fields on top.

X   = dendrites(u)                          k numbers of state per channel (and direction)
Y   = X + sum_d DWConv3x3(X; dilation d)
out = SN{BN(Y)}
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lrfdyn.attention.base import Attention, AttentionHost, Grid, Operations, Spikes, StateTerm, WeightBlocks
from lrfdyn.attention.layout import from_tokens, in_layout, query_blocks, to_tokens
from lrfdyn.attention.registry import register_attention
from lrfdyn.attention.row_stream import BUFFERS, RowStream
from lrfdyn.attention.ssa import LocalReceptiveFields
from lrfdyn.errors import require, require_integer, unknown_name
from lrfdyn.nn.layers import norm_fire
from lrfdyn.ops.bits import packed_width
from lrfdyn.ops.dendrite import dendrite, initial_dendrites, paired_modes
from lrfdyn.ops.dendrite.modes import Modes, mode_kernel, split_directions
from lrfdyn.ops.lrf import lrf

TOKENS = ("value", "qkv")
COUPLINGS = ("opposite", "same")  # signs of the coupling of two dendrites, there and back
MOST_DENDRITES = 1024  # per channel: the paper has 8, and memory grows with them


class Dendrites(nn.Module):
    """k linear dendrites per channel, coupled in pairs and trained as the modes of these: k/2 damped oscillators, or k
    real decays where the `coupling` of a pair has the same sign there and back (see `ops.dendrite`). With two
    `directions`, k more with parameters of their own run over the tokens from the last to the first, and the two
    potentials are added: a token's own spike counts in both. Parameters then have a leading axis of two."""

    turns: nn.Parameter | None
    # Time constants and frequencies, for which zero is no neutral value.
    without_weight_decay: ClassVar[tuple[str, ...]] = ("raw_decay", "turns")

    def __init__(
        self, channels: int, dendrites: int, width: int, directions: int = 1, coupling: str = "opposite"
    ) -> None:
        super().__init__()
        require_integer("dendrites", dendrites, 2, MOST_DENDRITES)
        require(dendrites % 2 == 0, f"dendrites: expected an even number (pairs are coupled), got {dendrites}")
        require_integer("directions", directions, 1, 2)
        if coupling not in COUPLINGS:
            raise unknown_name("coupling", coupling, COUPLINGS)
        self.directions, self.coupling, sign = directions, coupling, 1 if coupling == "same" else -1
        sets = [paired_modes(*initial_dendrites(channels, dendrites, width, sign), sign) for _ in range(directions)]
        decay, frequency, weight = (
            x[0] if directions == 1 or x[0] is None else torch.stack(x) for x in zip(*sets, strict=True)
        )
        dtype = torch.get_default_dtype()
        # softplus keeps every decay positive, so the recurrence is stable wherever the optimiser goes.
        self.raw_decay = nn.Parameter((decay + torch.log(-torch.expm1(-decay))).to(dtype))
        # In turns per row, so that the weights mean the same on a grid of another width.
        turns = None if frequency is None else nn.Parameter((frequency * width / (2 * math.pi)).to(dtype))
        self.register_parameter("turns", turns)
        self.weight = nn.Parameter(weight.to(dtype))

    def modes(self, width: int) -> Modes:
        """Decays, frequencies in radians per token (None of real modes), and weights, on rows of `width` tokens."""
        frequency = None if self.turns is None else self.turns * (2 * math.pi / width)
        return F.softplus(self.raw_decay), frequency, self.weight

    def modes_by_direction(self, width: int) -> list[Modes]:
        """The same of every direction, without the axis of directions: first those from the first token on."""
        modes = self.modes(width)
        return [modes] if self.directions == 1 else split_directions(modes)

    def forward(self, u: Tensor) -> Tensor:
        """Soma potentials of `u` `[T, B, C, H, W]` along the raster order of each time step, in all directions."""
        tokens, packed = in_layout(to_tokens, u)
        soma, _ = dendrite(tokens, *self.modes(u.shape[-1]), packed=packed)
        return from_tokens(soma, like=u)

    def kernel(self, grid: Grid) -> Tensor:
        """kappa over the tokens of a grid, `[N, C]`, or `[2, N, C]` of two directions."""
        kernels = [mode_kernel(*modes, grid[0] * grid[1]) for modes in self.modes_by_direction(grid[1])]
        return kernels[0] if self.directions == 1 else torch.stack(kernels)

    def extra_repr(self) -> str:
        channels, pairs = self.weight.shape[-3:-1]
        directions = "" if self.directions == 1 else f", directions={self.directions}"
        coupling = "" if self.turns is not None else f", coupling={self.coupling!r}"
        return f"channels={channels}, dendrites={2 * pairs}{directions}{coupling}"


@register_attention("lrf_dyn", label="LRF-Dyn")
class LRFDyn(Attention):
    """Dendrites and local receptive fields over the tokens u. `token="value"`: u = v, no q and k. `token="qkv"`:
    u = k * v and the output is gated by q. `directions=2`: as many dendrites again run over the tokens from the last to
    the first, and X is the sum of both. The sign of the `coupling` between two dendrites, "opposite" or "same", is that
    of Eq. 13: k/2 damped oscillators, or k real decays."""

    normalized = True
    fixed_mixing = True

    def __init__(
        self, dim: int, heads: int, grid: Grid, host: AttentionHost,
        dilations: Sequence[int] = (3, 5), dendrites: int = 8, token: str = "value",
        directions: int = 1, coupling: str = "opposite",
    ) -> None:  # fmt: skip
        if token not in TOKENS:
            raise unknown_name("token", token, TOKENS)
        self.projections = ("v",) if token == "value" else ("q", "k", "v")
        super().__init__(dim, heads, grid, host)
        self.token = token
        self.dendrites = Dendrites(self.value_dim, dendrites, grid[1], directions, coupling)
        self.lrf = LocalReceptiveFields(self.value_dim, dilations)
        self.norm = nn.BatchNorm2d(self.value_dim)

    def spikes(self, *projected: Tensor) -> Tensor:
        if type(self).mix is not LRFDyn.mix:  # of a subclass, which may end in anything
            return super().spikes(*projected)
        return norm_fire(self.norm, self.fire, self.currents(*projected))

    def mix(self, *spikes: Tensor) -> Tensor:
        return norm_fire(self.norm, None, self.currents(*spikes))

    def currents(self, *spikes: Tensor) -> Tensor:
        """Y, before the norm."""
        x = self.dendrites(self.tokens(spikes))
        y = self.lrf(x, residual=x)
        return y if self.token == "value" else self.widen(spikes[0]) * y

    def tokens(self, spikes: Sequence[Tensor]) -> Tensor:
        """u, what the dendrites take of the projections' spikes."""
        return spikes[0] if self.token == "value" else self.widen(spikes[1]) * spikes[2]

    def mixing_weights(self, spikes: Spikes, grid: Grid, block: int) -> WeightBlocks:
        """|(I + LRF) Toeplitz(kappa)|, a few input tokens at a time, without the gates q and k of `token="qkv"`. With
        two directions the matrix has the second kernel above its diagonal, and both on it."""
        kernel = self.dendrites.kernel(grid).detach()
        n, channels = kernel.shape[-2:]
        token = torch.arange(n, device=kernel.device)
        columns = []
        for sources in query_blocks(n, n * channels, block):
            lag = token - token[sources.start : sources.stop].unsqueeze(1)
            pairs = zip(kernel.reshape(-1, n, channels), (lag, -lag), strict=False)
            parts = (kappa[lags.clamp(min=0)] * (lags >= 0).unsqueeze(-1) for kappa, lags in pairs)
            soma = reduce(torch.add, parts).mT.unflatten(2, grid)
            columns.append(lrf(soma, self.lrf.weight.detach(), self.lrf.dilations, soma).abs().mean(1).flatten(1))
        yield range(n), torch.cat(columns).T.unsqueeze(0)

    def operation_counts(self, spikes: Spikes, grid: Grid) -> dict[str, Operations]:
        u = self.tokens([spikes[name] for name in self.projections])
        pairs = self.dendrites.directions * self.dendrites.weight.shape[-2]  # k / 2 in each direction
        # An oscillator takes a token in one number, and four products turn and damp two. Real modes: two and two. The
        # read-out: two.
        turn, enters = (2.0, 2) if self.dendrites.coupling == "same" else (4.0, 1)
        products = {"dendrites, recurrence": turn * pairs * u.numel(), "dendrites, read-out": 2.0 * pairs * u.numel()}
        if self.lrf.dilations:
            products["lrf"] = u.numel() // math.prod(grid) * float(self.lrf.uses(grid).sum())
        counts = {part: Operations(multiply_accumulates=count) for part, count in products.items()}
        return {"dendrites, input": Operations(u.sum() * enters * pairs), **counts}

    def row_stream(
        self, time_steps: int = 1, batch: int = 1, grid: Grid | None = None, buffers: str = BUFFERS[0]
    ) -> RowStream:
        return RowStream(self, time_steps, batch, grid, buffers)

    def state_terms(self, grid: Grid | None = None, buffers: str = BUFFERS[0]) -> list[StateTerm]:
        """With the rows that the stencils reach held as `buffers` says (see `row_stream.py`)."""
        if buffers not in BUFFERS:
            raise unknown_name("buffers", buffers, BUFFERS)
        height, width = grid or self.grid
        reach, delay, modes = self.lrf.reach(height), self.delay(height), self.dendrites.weight.shape[-2]
        # One state at the last row that is still read, or one at every row that a stencil reads.
        states = 1 + 2 * sum(d < height for d in self.lrf.dilations) if buffers == "states" else 1
        if self.dendrites.directions == 2:  # on the way back one too, or one below every row
            states += height if buffers == "states" else 1
        formula = "k d" if states == 1 else f"{states} k d"
        terms = [StateTerm("dendrites", formula, states * 2 * modes * self.value_dim, 32)]

        def hold(name: str, rows: int, channels: int, bits: int) -> None:
            rows = min(rows, height)
            terms.append(StateTerm(name, f"{rows} rows of W d", rows * width * channels, bits))

        if delay and buffers == "potentials":
            hold("line buffers", delay + reach + 1, self.value_dim, 32)
        if delay and (buffers != "potentials" or self.dendrites.directions == 2):
            bits = self.token_levels()[0].bit_length()
            hold("token spikes", delay + reach + 1, 8 * packed_width(self.value_dim), bits)
        if delay and self.token == "qkv":
            # Queries wait until the rows below them that are read for their output have arrived.
            hold("q spikes", delay + 1, 8 * packed_width(self.dim), self.spike_levels("q")[0].bit_length())
        return terms

    def delay(self, height: int) -> int:
        """How many rows below a row must have arrived before its output can be computed on a grid of `height` rows:
        those that the stencils reach, and with two directions all."""
        return self.lrf.reach(height) if self.dendrites.directions == 1 else height - 1

    def token_levels(self) -> tuple[int, int]:
        """The largest integer that the dendrites' input u, v or k * v, stands for, and what it is divided by."""
        levels = [self.spike_levels(name) for name in (("v",) if self.token == "value" else ("k", "v"))]
        return math.prod(largest for largest, _ in levels), math.prod(divisor for _, divisor in levels)
