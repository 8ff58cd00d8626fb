"""LRF-Dyn: dendrites run over the tokens instead of an attention matrix, local receptive fields on top.

X   = dendrites(u)                          k numbers of state per channel
Y   = X + sum_d DWConv3x3(X; dilation d)
out = SN{BN(Y)}
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lrfdyn.attention.base import Attention, AttentionHost, Grid, Operations, Spikes, StateTerm, WeightBlocks
from lrfdyn.attention.layout import from_tokens, query_blocks, to_tokens
from lrfdyn.attention.registry import register_attention
from lrfdyn.attention.row_stream import BUFFERS, RowStream
from lrfdyn.attention.ssa import LocalReceptiveFields
from lrfdyn.errors import require, require_integer, unknown_name
from lrfdyn.nn.neurons import fused_dynamics, fused_norm
from lrfdyn.ops.bits import packed_width, step_bits_of
from lrfdyn.ops.bn_lif import bn_lif
from lrfdyn.ops.dendrite import dendrite, initial_dendrites, paired_modes
from lrfdyn.ops.dendrite.modes import Modes, mode_kernel
from lrfdyn.ops.dispatch import use_triton
from lrfdyn.ops.lrf import lrf

TOKENS = ("value", "qkv")
COUPLINGS = ("opposite", "same")  # signs of the coupling of two dendrites, there and back
MOST_DENDRITES = 1024  # per channel: the paper has 8, and memory grows with them


class Dendrites(nn.Module):
    """k linear dendrites per channel, coupled in pairs and trained as the modes of these: k/2 damped oscillators, or k
    real decays where the coupling of a pair has the same sign in both directions (see `ops.dendrite`)."""

    turns: nn.Parameter | None
    # Time constants and frequencies, for which zero is no neutral value.
    without_weight_decay: ClassVar[tuple[str, ...]] = ("raw_decay", "turns")

    def __init__(self, channels: int, dendrites: int, width: int, coupling: str = "opposite") -> None:
        super().__init__()
        require_integer("dendrites", dendrites, 2, MOST_DENDRITES)
        require(dendrites % 2 == 0, f"dendrites: expected an even number (pairs are coupled), got {dendrites}")
        if coupling not in COUPLINGS:
            raise unknown_name("coupling", coupling, COUPLINGS)
        self.coupling, sign = coupling, 1 if coupling == "same" else -1
        decay, frequency, weight = paired_modes(*initial_dendrites(channels, dendrites, width, sign), sign)
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

    def forward(self, u: Tensor) -> Tensor:
        """Soma potentials of `u` `[T, B, C, H, W]` along the raster order of each time step."""
        bits = step_bits_of(u)  # left with spikes by the kernels of a GPU
        packed = None if bits is None else to_tokens(bits.unsqueeze(0))
        soma, _ = dendrite(to_tokens(u), *self.modes(u.shape[-1]), packed=packed)
        return from_tokens(soma, like=u)

    def kernel(self, grid: Grid) -> Tensor:
        """kappa over the tokens of a grid, `[N, C]`."""
        return mode_kernel(*self.modes(grid[1]), grid[0] * grid[1])

    def extra_repr(self) -> str:
        channels, pairs = self.raw_decay.shape[:2]
        return f"channels={channels}, dendrites={2 * pairs}, coupling={self.coupling!r}"


@register_attention("lrf_dyn", label="LRF-Dyn")
class LRFDyn(Attention):
    """Dendrites and local receptive fields over the tokens u. `token="value"`: u = v, no q and k. `token="qkv"`:
    u = k * v and the output is gated by q. The sign of the `coupling` between two dendrites, "opposite" or "same", is
    that of Eq. 13: k/2 damped oscillators, or k real decays."""

    normalized = True
    fixed_mixing = True

    def __init__(
        self, dim: int, heads: int, grid: Grid, host: AttentionHost,
        dilations: Sequence[int] = (3, 5), dendrites: int = 8, token: str = "value", coupling: str = "opposite",
    ) -> None:  # fmt: skip
        if token not in TOKENS:
            raise unknown_name("token", token, TOKENS)
        self.projections = ("v",) if token == "value" else ("q", "k", "v")
        super().__init__(dim, heads, grid, host)
        self.token = token
        self.dendrites = Dendrites(self.value_dim, dendrites, grid[1], coupling)
        self.lrf = LocalReceptiveFields(self.value_dim, dilations)
        self.norm = nn.BatchNorm2d(self.value_dim)

    def spikes(self, *projected: Tensor) -> Tensor:
        dynamics = fused_dynamics(self.fire) if use_triton(projected[-1]) else None
        norm = None if dynamics is None else fused_norm(self.norm)
        if dynamics is None or norm is None:
            return super().spikes(*projected)
        return bn_lif(self.currents(*projected), norm, dynamics)

    def mix(self, *spikes: Tensor) -> Tensor:
        return self.norm(self.currents(*spikes).flatten(0, 1)).unflatten(0, spikes[-1].shape[:2])

    def currents(self, *spikes: Tensor) -> Tensor:
        """Y, before the norm."""
        x = self.dendrites(self.tokens(spikes))
        y = self.lrf(x, residual=x)
        return y if self.token == "value" else self.widen(spikes[0]) * y

    def tokens(self, spikes: Sequence[Tensor]) -> Tensor:
        """u, what the dendrites take of the projections' spikes."""
        return spikes[0] if self.token == "value" else self.widen(spikes[1]) * spikes[2]

    def mixing_weights(self, spikes: Spikes, grid: Grid, block: int) -> WeightBlocks:
        """|(I + LRF) Toeplitz(kappa)|, a few input tokens at a time, without the gates q and k of `token="qkv"`."""
        kernel = self.dendrites.kernel(grid).detach()  # [N, C]
        n, channels = kernel.shape
        token = torch.arange(n, device=kernel.device)
        columns = []
        for sources in query_blocks(n, n * channels, block):
            lag = token - token[sources.start : sources.stop].unsqueeze(1)
            soma = (kernel[lag.clamp(min=0)] * (lag >= 0).unsqueeze(-1)).mT.unflatten(2, grid)
            columns.append(lrf(soma, self.lrf.weight.detach(), self.lrf.dilations, soma).abs().mean(1).flatten(1))
        yield range(n), torch.cat(columns).T.unsqueeze(0)

    def operation_counts(self, spikes: Spikes, grid: Grid) -> dict[str, Operations]:
        u = self.tokens([spikes[name] for name in self.projections])
        pairs = self.dendrites.weight.shape[1]  # k / 2
        # An oscillator takes a token in one number, and four products turn and damp two. Real modes: two and two. The
        # read-out: two.
        real = self.dendrites.coupling == "same"
        turn, enters = (2.0, 2) if real else (4.0, 1)
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
        reach, modes = self.lrf.reach(height), self.dendrites.weight.shape[1]
        # One state at the last row that is still read, or one at every row that a stencil reads.
        states = 1 + 2 * sum(d < height for d in self.lrf.dilations) if buffers == "states" else 1
        formula = "k d" if states == 1 else f"{states} k d"
        terms = [StateTerm("dendrites", formula, states * 2 * modes * self.value_dim, 32)]

        def hold(name: str, rows: int, channels: int, bits: int) -> None:
            rows = min(rows, height)
            terms.append(StateTerm(name, f"{rows} rows of W d", rows * width * channels, bits))

        if reach and buffers == "potentials":
            hold("line buffers", 2 * reach + 1, self.value_dim, 32)
        elif reach:
            hold("token spikes", 2 * reach + 1, 8 * packed_width(self.value_dim), self.token_levels()[0].bit_length())
        if reach and self.token == "qkv":
            # Queries wait until the rows below them that the stencils reach have arrived.
            hold("q spikes", reach + 1, 8 * packed_width(self.dim), self.spike_levels("q")[0].bit_length())
        return terms

    def token_levels(self) -> tuple[int, int]:
        """The largest integer that the dendrites' input u, v or k * v, stands for, and what it is divided by."""
        levels = [self.spike_levels(name) for name in (("v",) if self.token == "value" else ("k", "v"))]
        return math.prod(largest for largest, _ in levels), math.prod(divisor for _, divisor in levels)
