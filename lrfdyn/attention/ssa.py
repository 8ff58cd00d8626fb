"""Attentions of queries and keys: SSA (Spikformer), with local receptive fields, causal, with a softmax, and SDSA."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lrfdyn.attention.base import Attention, AttentionHost, Grid, Operations, Spikes, StateTerm, WeightBlocks
from lrfdyn.attention.layout import from_heads, in_layout, query_blocks, to_heads, to_tokens
from lrfdyn.attention.registry import register_attention
from lrfdyn.checks import check_types
from lrfdyn.errors import require, shown
from lrfdyn.nn.layers import fold_time, norm_fire
from lrfdyn.nn.neurons import FoldedNorm, scale_and_shift
from lrfdyn.ops.bits import step_bits_of, with_step_bits
from lrfdyn.ops.dispatch import use_triton
from lrfdyn.ops.lrf import lrf, lrf_reference
from lrfdyn.ops.spike_attention import causal_spike_attention, spike_attention


def whole_image(layer: Attention, grid: Grid | None) -> list[StateTerm]:
    """The projections of all tokens: every query waits for the last key."""
    tokens, what = math.prod(grid or layer.grid), "spikes" if layer.host.spiking else "numbers"
    return [
        StateTerm(f"q, k {what}", "2 N d", 2 * tokens * layer.dim, layer.spike_bits),
        StateTerm(f"v {what}", "N d", tokens * layer.value_dim, layer.spike_bits),
    ]


@register_attention("ssa", label="SSA")
class SSA(Attention):
    """s q (k^T v), no softmax.

    `train_qk=False` is a control: the weights of q and k, those of their norms included, stay as they were drawn. They
    take no gradient and no optimiser has them; gradients still pass through q and k to the input, and the running
    statistics of their norms move as ever.
    """

    causal: ClassVar[bool] = False

    def __init__(self, dim: int, heads: int, grid: Grid, host: AttentionHost, train_qk: bool = True) -> None:
        super().__init__(dim, heads, grid, host)
        check_types({"train_qk": train_qk}, {"train_qk": bool})
        self.train_qk = train_qk
        for name in ("q", "k"):
            self.get_submodule(name).requires_grad_(train_qk)

    def mix(self, *spikes: Tensor) -> Tensor:
        return self.mix_and_values(spikes)[0]

    def mix_and_values(self, spikes: Sequence[Tensor], fork: bool = False) -> tuple[Tensor, Tensor]:
        """The mixed tokens, and v again: with `fork`, both gradients of v are added in one pass on a GPU."""
        values = spikes[-1]
        heads = partial(to_heads, heads=self.heads)
        if self.causal:
            q, k, v = map(heads, spikes)
            return from_heads(causal_spike_attention(q, k, v, self.scale)[0], like=values), values
        (q, k, v), bits = zip(*(in_layout(heads, x) for x in spikes), strict=True)
        packed: Any = bits if all(x is not None for x in bits) else None
        if not (fork and use_triton(*spikes)):
            return from_heads(spike_attention(q, k, v, self.scale, packed), like=values), values
        y, again = spike_attention(q, k, v, self.scale, packed, fork=True)
        again = with_step_bits(from_heads(again, like=values), step_bits_of(values))
        return from_heads(y, like=values), again

    def mixing_weights(self, spikes: Spikes, grid: Grid, block: int) -> WeightBlocks:
        q, k = (to_heads(spikes[name], self.heads) for name in ("q", "k"))
        images, _, tokens, _ = k.shape
        for queries in query_blocks(tokens, images * max(self.heads * tokens, self.value_dim), block):
            weights = self.query_weights(q[:, :, queries.start : queries.stop], k, queries, grid)
            yield queries, weights.unflatten(0, spikes["q"].shape[:2]).sum(0)

    def query_weights(self, q: Tensor, k: Tensor, queries: range, grid: Grid) -> Tensor:
        """The weights `[T * B, queries, N]` of queries `[T * B, heads, queries, e]` on keys `[T * B, heads, N, e]`."""
        return self.scores(q, k, queries).abs().mean(1)

    def scores(self, q: Tensor, k: Tensor, queries: range) -> Tensor:
        """s q k^T of these queries, `[T * B, heads, queries, N]`."""
        scores = self.scale * (q @ k.mT)
        return scores.tril(queries.start) if self.causal else scores

    def operation_counts(self, spikes: Spikes, grid: Grid) -> dict[str, Operations]:
        q, k, v = (to_heads(spikes[name], self.heads) for name in ("q", "k", "v"))
        # k^T v: one accumulate where k and v of a head both fire. q (k^T v): a spike of q takes a row of the matrix.
        pairs = (k.sum(-1) * v.sum(-1)).sum()
        return {"k^T v": Operations(pairs), "q (k^T v)": Operations(q.sum() * v.shape[-1])}

    def state_terms(self, grid: Grid | None = None) -> list[StateTerm]:
        state = StateTerm("k^T v matrix", "d^2 / h", self.dim * self.value_dim // self.heads, 32)
        return [state] if self.causal else [state, *whole_image(self, grid)]


class LocalReceptiveFields(nn.Module):
    """sum_d DWConv3x3(x; dilation d), added to a residual: one learnable 3x3 stencil per dilation and channel. With
    `norm`, a batch norm of the sum comes before it is added; without dilations there is nothing to normalise."""

    weight: Tensor
    norm: nn.Module | None

    def __init__(self, channels: int, dilations: Sequence[int], norm: bool = False) -> None:
        super().__init__()
        check_types({"dilations": dilations, "norm": norm}, {"dilations": Sequence[int], "norm": bool})
        self.dilations = tuple(dilations)
        different = len(set(self.dilations)) == len(self.dilations) and all(1 <= d <= 2**16 for d in self.dilations)
        require(different, f"dilations: expected different integers >= 1, at most 65536, got {shown(self.dilations)}")
        if self.dilations:
            self.weight = nn.Parameter(torch.empty(len(self.dilations), channels, 3, 3))
            nn.init.uniform_(self.weight, -1 / 3, 1 / 3)  # a convolution of nine inputs per output
        else:
            # Nothing to learn, and nothing in checkpoints: without dilations the keys are those of the attention alone.
            # On a device with memory even in a model without any, which no file would fill.
            self.register_buffer("weight", torch.empty(0, channels, 3, 3, device="cpu"), persistent=False)
        self.norm = nn.BatchNorm2d(channels) if norm and self.dilations else None

    def forward(self, x: Tensor, residual: Tensor, scale: float = 1.0) -> Tensor:
        """`residual` + `scale` times the stencils over `x`, both `[T, B, C, H, W]`."""
        if not self.dilations:
            return residual
        tokens = x.flatten(0, 1)
        added: Tensor | None = tokens if residual is x else residual.flatten(0, 1)
        weight, norm = self.weight, self.norm
        if norm is None and scale != 1:
            weight = scale * weight
        y = lrf(tokens, weight, self.dilations, added if norm is None else None, step_bits_of(x))
        y = y.unflatten(0, x.shape[:2])
        if norm is None:
            return y
        return norm_fire(norm, None, y, residual) if scale == 1 else residual + scale * norm_fire(norm, None, y)

    def stencils(self) -> Tensor:
        """The weights `[len(dilations), C, 3, 3]` with what the norm multiplies by in evaluation."""
        if self.norm is None or isinstance(self.norm, FoldedNorm):
            return self.weight
        return self.weight * scale_and_shift(self.norm)[0].reshape(-1, 1, 1)

    def taps(self, queries: range, grid: Grid) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """The stencils over a range of tokens, offset by offset: which tokens of the range have a neighbour on the
        grid there, that neighbour, and its weights `[C]`, those of all dilations added, behind the norm in evaluation
        (what the norm adds comes from no token)."""
        offsets: dict[tuple[int, int], Tensor] = {}
        for stencil, dilation in zip(self.stencils(), self.dilations, strict=True):
            for a, b in product(range(3), repeat=2):
                offset, weight = ((a - 1) * dilation, (b - 1) * dilation), stencil[:, a, b]
                offsets[offset] = offsets[offset] + weight if offset in offsets else weight
        height, width = grid
        token = torch.arange(queries.start, queries.stop, device=self.weight.device)
        for (dy, dx), weight in offsets.items():
            y, x = token // width + dy, token % width + dx
            rows = ((y >= 0) & (y < height) & (x >= 0) & (x < width)).nonzero().squeeze(1)
            yield rows, (y * width + x)[rows], weight

    def uses(self, grid: Grid) -> Tensor:
        """How many weights of a channel each token meets, `[H, W]`: as many as it reads, the stencils are symmetric."""
        ones = torch.ones(len(self.dilations), 1, 3, 3, dtype=torch.float64)
        return lrf_reference(ones.new_ones(1, 1, *grid), ones, self.dilations)[0, 0]

    def reach(self, height: int) -> int:
        """How many rows below a token the stencils read on a grid of `height` rows: 0 without stencils."""
        return max((d for d in self.dilations if d < height), default=0)

    def extra_repr(self) -> str:
        return f"channels={self.weight.shape[1]}, dilations={self.dilations}"


@register_attention("lrf_ssa", label="LRF-SSA")
class LRFSSA(SSA):
    """s q (k^T v) + sum_d DWConv3x3(v; dilation d). The stencils read v, which SSA holds for the whole image anyway, so
    the state is that of SSA.

    The paper leaves two points open. `norm=True` puts a batch norm on the sum of the stencils, in front of the sum with
    the other term: 9 weights per dilation and channel and 2 of the norm, as the paper's parameter counts have them with
    dilations (1, 3, 5). `scale_lrf=True` multiplies both terms by s, as Eq. 14 is written; by default the stencils
    learn a scale of their own.
    """

    def __init__(
        self, dim: int, heads: int, grid: Grid, host: AttentionHost, dilations: Sequence[int] = (3, 5),
        norm: bool = False, scale_lrf: bool = False, train_qk: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(dim, heads, grid, host, train_qk)
        check_types({"scale_lrf": scale_lrf}, {"scale_lrf": bool})
        self.lrf = LocalReceptiveFields(self.value_dim, dilations, norm)
        self.lrf_scale = self.scale if scale_lrf else 1.0

    def mix(self, *spikes: Tensor) -> Tensor:
        mixed, v = self.mix_and_values(spikes, fork=True)
        return self.lrf(v, mixed, self.lrf_scale)

    def query_weights(self, q: Tensor, k: Tensor, queries: range, grid: Grid) -> Tensor:
        scores = self.scores(q, k, queries)
        weights = scores.abs().mean(1)
        for rows, keys, taps in self.lrf.taps(queries, grid):
            # Absolute values per channel, since stencils of opposite sign must not cancel.
            near = scores[:, :, rows, keys].unsqueeze(2) + (self.lrf_scale * taps).reshape(1, self.heads, -1, 1)
            weights[:, rows, keys] = near.abs().mean((1, 2))
        return weights

    def operation_counts(self, spikes: Spikes, grid: Grid) -> dict[str, Operations]:
        counts = super().operation_counts(spikes, grid)
        if self.lrf.dilations:
            v = spikes["v"].sum((0, 1, 2))
            counts["lrf"] = Operations((v * self.lrf.uses(grid).to(v)).sum())
        return counts


@register_attention("causal_ssa", label="causal SSA")
class CausalSSA(LRFSSA):
    """s sum_{j <= n} (q_n k_j) v_j in raster order, + sum_d DWConv3x3(v; dilation d). The stencils (none by default)
    see the rows below too, so only the first term is causal."""

    causal = True

    def __init__(
        self, dim: int, heads: int, grid: Grid, host: AttentionHost, dilations: Sequence[int] = (),
        norm: bool = False, scale_lrf: bool = False, train_qk: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(dim, heads, grid, host, dilations, norm, scale_lrf, train_qk)

    def state_terms(self, grid: Grid | None = None) -> list[StateTerm]:
        terms = super().state_terms(grid)
        height, width = grid or self.grid
        if reach := self.lrf.reach(height):
            # A token waits for the rows below that its stencils reach, and its query and key with it.
            rows, waiting, bits = min(2 * reach + 1, height), min(reach + 1, height), self.spike_bits
            terms += [
                StateTerm("line buffers", f"{rows} rows of W d", rows * width * self.value_dim, bits),
                StateTerm("q, k spikes", f"2 · {waiting} rows of W d", 2 * waiting * width * self.dim, bits),
            ]
        return terms


@register_attention("vsa", label="VSA")
class VSA(SSA):
    """softmax(q k^T / sqrt(d_h)) v on spikes. An average of sparse spikes stays far below any threshold, so it is
    normalised before the host's ordinary neuron. In a host without spikes (ViT) it is the plain softmax attention."""

    normalized = True
    takes_numbers = True

    def __init__(self, dim: int, heads: int, grid: Grid, host: AttentionHost, train_qk: bool = True) -> None:
        super().__init__(dim, heads, grid, host, train_qk)
        self.norm = nn.BatchNorm2d(self.value_dim) if host.spiking else nn.Identity()

    def spikes(self, *projected: Tensor) -> Tensor:
        if type(self).mix is not VSA.mix:  # of a subclass, which may end in anything
            return super().spikes(*projected)
        return norm_fire(self.norm, self.fire, self.averages(*projected))

    def mix(self, *spikes: Tensor) -> Tensor:
        return norm_fire(self.norm, None, self.averages(*spikes))

    def averages(self, *spikes: Tensor) -> Tensor:
        """What comes before the norm."""
        q, k, v = (to_heads(x, self.heads) for x in spikes)
        if torch.compiler.is_compiling():  # the traced backward pass expects the strides of contiguous tensors
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        return from_heads(F.scaled_dot_product_attention(q, k, v), like=spikes[-1])

    def query_weights(self, q: Tensor, k: Tensor, queries: range, grid: Grid) -> Tensor:
        return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1).mean(1)

    def operation_counts(self, spikes: Spikes, grid: Grid) -> dict[str, Operations]:
        q, k, v = (to_heads(spikes[name], self.heads) for name in ("q", "k", "v"))
        if not self.host.spiking:
            each = Operations(0.0, float(q.numel() * math.prod(grid)))
            return {"q k^T": each, "softmax v": each}
        # Scores of spikes: one accumulate where q and k both fire. Then every spike of v is added to all N queries,
        # weighted: the weight is what is accumulated.
        scores, values = (q.sum(2) * k.sum(2)).sum(), v.sum() * math.prod(grid)
        return {"q k^T": Operations(scores), "softmax v": Operations(values)}

    def state_terms(self, grid: Grid | None = None) -> list[StateTerm]:
        matrix = self.heads * math.prod(grid or self.grid) ** 2
        return [StateTerm("attention matrix", "h N^2", matrix, 32), *whole_image(self, grid)]


def window_maximum(x: Tensor) -> Tensor:
    """The maximum over 3 x 3 windows of the last two of four axes; the shape stays."""
    return F.max_pool2d(x, 3, 1, 1)


@register_attention("sdsa", label="SDSA")
class SDSA(Attention):
    """q * SN{sum_j k_j * v_j} (SDT-V1): spikes of a sum over all tokens gate the query, one gate per channel.

    A host with `window_maxima` has four maxima over windows of 3 x 3 in it, as the official code for event cameras: of
    k and of v over neighbours on the grid, of k * v and of the gated queries over neighbours in raster order and
    neighbouring channels of a head.
    """

    def spikes(self, *projected: Tensor) -> Tensor:
        q, k, v = projected
        return self.token_maximum(self.widen(q) * self.fire(self.mix(k, v)))

    def mix(self, *spikes: Tensor) -> Tensor:
        """sum_j k_j * v_j, `[T, B, value_dim, 1, 1]`."""
        return self.products(*spikes[-2:]).sum((3, 4), keepdim=True)

    def products(self, k: Tensor, v: Tensor) -> Tensor:
        """k * v, `[T, B, value_dim, H, W]`."""
        if self.host.window_maxima:
            k, v = (fold_time(window_maximum, x) for x in (k, v))
        return self.token_maximum(self.widen(k) * v)

    def token_maximum(self, x: Tensor) -> Tensor:
        """The maximum over tokens in raster order and channels of a head, or `x` where the host asks for none."""
        return from_heads(window_maximum(to_heads(x, self.heads)), like=x) if self.host.window_maxima else x

    def mixing_weights(self, spikes: Spikes, grid: Grid, block: int) -> WeightBlocks:
        """k_j * v_j, mean over channels: what token j adds to the gate, for every query the same."""
        given = to_tokens(self.products(spikes["k"], spikes["v"])).abs().mean(-1)
        given = given.unflatten(0, spikes["v"].shape[:2]).sum(0)
        for queries in query_blocks(given.shape[1], given.numel(), block):
            yield queries, given.unsqueeze(1).expand(-1, len(queries), -1)

    def operation_counts(self, spikes: Spikes, grid: Grid) -> dict[str, Operations]:
        return {"k * v": Operations(self.products(spikes["k"], spikes["v"]).sum())}

    def state_terms(self, grid: Grid | None = None) -> list[StateTerm]:
        return [StateTerm("k * v sum", "d", self.value_dim, 32), *whole_image(self, grid)]
