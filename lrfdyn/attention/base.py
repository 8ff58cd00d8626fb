"""What all attentions share: what the network around them gives, and the layer itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from torch import Tensor, nn

from lrfdyn.checks import check_types, checked
from lrfdyn.errors import LrfdynError, require, require_integer
from lrfdyn.nn.layers import SpikingConv, add_output
from lrfdyn.nn.neurons import LIF, IntegerSpike, Neuron

if TYPE_CHECKING:
    from lrfdyn.attention.row_stream import RowStream

Grid = tuple[int, int]  # rows and columns of tokens
Spikes = Mapping[str, Tensor]  # of the projections by name, `[T, B, C, H, W]` each
WeightBlocks = Iterator[tuple[range, Tensor]]  # ranges of queries and their weights `[B, queries, N]`
HALF_THRESHOLD = partial(LIF, threshold=0.5)  # the neuron on an attention output of Spikformer and SDT


@checked
@dataclass(frozen=True)
class AttentionHost:
    """The layers that a network gives to the attentions in it.

    `project(c_in, c_out)` makes q, k or v: spikes of a normalised 1x1 convolution. `project_out(c_in, c_out)` makes
    the layer behind the attention. `fire()` makes the neuron on an unnormalised attention output, `neuron()` the
    host's ordinary one. All four are importable functions or partials of them, so that models can be pickled. v is
    `value_ratio` times as wide as q and k. The last neuron of a projection says how many bits its spikes take: one, or
    those of the levels of an `IntegerSpike`. A host that is not `spiking` has q, k and v of any numbers, and takes the
    kinds of attention that do (`takes_numbers`). `window_maxima` is for SDSA, see there.
    """

    project: Callable[[int, int], nn.Module]
    project_out: Callable[[int, int], nn.Module]
    neuron: Callable[[], nn.Module] = LIF
    fire: Callable[[], nn.Module] = HALF_THRESHOLD
    scale: float = 0.125  # whatever the width of a head, as in their official code
    value_ratio: int = 1
    spiking: bool = True
    window_maxima: bool = False


def lif_conv(c_in: int, c_out: int, bias: bool = False) -> SpikingConv:
    """A 1x1 convolution, a batch norm and a LIF neuron."""
    return SpikingConv(c_in, c_out, LIF(), bias=bias)


@checked
def lif_host(qkv_bias: bool = False) -> AttentionHost:
    """The host of Spikformer, and of an attention that is built without one: layers of `lif_conv`."""
    return AttentionHost(partial(lif_conv, bias=qkv_bias), partial(lif_conv, bias=True))


@dataclass(frozen=True)
class StateTerm:
    """A term of what attention must hold at inference, for one image, layer and time step."""

    name: str
    formula: str
    elements: int
    bits: int

    @property
    def bytes(self) -> int:
        return -(-self.elements * self.bits // 8)


class Operations(NamedTuple):
    """What a part of an attention computes: accumulates, or multiply-accumulates where there are any."""

    accumulates: Tensor | float = 0.0
    multiply_accumulates: float = 0.0


class Attention(nn.Module):
    """An attention layer: x `[T, B, dim, H, W]` in, `proj(SN{mix(q, k, v)})` of the same shape out.

    A kind of attention defines `mix`. What it knows about itself beyond that is in `mixing_weights`,
    `operation_counts` and `state_terms`; a kind that leaves one out (None) is measured without it.
    """

    kind: ClassVar[str] = "unregistered"  # its name, and
    label: ClassVar[str] = "unregistered"  # that in tables and figures: see `register_attention`
    projections: tuple[str, ...] = ("q", "k", "v")
    normalized: ClassVar[bool] = False  # True where mix ends in a norm: then the host's ordinary neuron fires
    takes_numbers: ClassVar[bool] = False  # True where q, k and v need not be spikes
    fixed_mixing: ClassVar[bool] = False  # True where mixing_weights are the same for all images

    def __init__(self, dim: int, heads: int, grid: Grid, host: AttentionHost) -> None:
        super().__init__()
        require_integer("dim", dim, 1)
        require_integer("heads", heads, 1)
        require(dim % heads == 0, f"heads: expected a divisor of the width {dim}, got {heads}")
        require_grid(grid)
        takes = host.spiking or self.takes_numbers
        require(takes, f"attention: {self.kind!r} works on spikes, and this network has none; expected 'vsa'")
        self.dim, self.heads, self.grid = dim, heads, grid
        self.host = host  # what another kind of attention in the same place is built from
        self.value_dim = dim * host.value_ratio
        self.scale = host.scale
        for name in self.projections:
            setattr(self, name, host.project(dim, self.value_dim if name == "v" else dim))
        self.fire = host.neuron() if self.normalized else host.fire()
        self.proj = host.project_out(self.value_dim, dim)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """With `residual`, added to the output."""
        projected, shortcut = self._project(x)
        spikes = self.spikes(*projected)
        if residual is None:
            return self.proj(spikes)
        return add_output(shortcut if residual is x else residual, self.proj, spikes)

    def spikes(self, *projected: Tensor) -> Tensor:
        """What the firing neuron sends to the last layer."""
        return self.fire(self.mix(*projected))

    def project(self, x: Tensor) -> list[Tensor]:
        """The spikes of the projections, in their order."""
        return list(self._project(x)[0])

    def _project(self, x: Tensor) -> tuple[Sequence[Tensor], Tensor]:
        """These spikes, and `x` for a shortcut around the attention: layers that can, compute them together."""
        self.check_input(x)
        layers = [getattr(self, name) for name in self.projections]
        if all(hasattr(layer, "together") for layer in layers):
            return layers[0].together(layers, x)
        return [layer(x) for layer in layers], x

    def check_input(self, x: Tensor) -> None:
        """An error where `x` is not `[T, B, dim, H, W]`, with at least one of each."""
        fits = x.dim() == 5 and x.shape[2] == self.dim
        require(fits, f"x: expected [T, B, {self.dim}, H, W], got {list(x.shape)}")
        require(0 not in x.shape, f"x: expected no empty dimension, got {list(x.shape)}")

    def spike_levels(self, projection: str) -> tuple[int, int]:
        """The largest integer that a spike of a projection stands for, and what it is divided by: as the projection's
        last neuron says, and 1 and 1 for spikes that are 0 or 1."""
        neurons = [m for m in self.get_submodule(projection).modules() if isinstance(m, Neuron)]
        last = neurons[-1] if neurons else None
        return (last.levels, last.levels if last.normalize else 1) if isinstance(last, IntegerSpike) else (1, 1)

    @property
    def spike_bits(self) -> int:
        """The bits of a spike of q, k or v, or of a number in the place of one."""
        return (
            32
            if not self.host.spiking
            else max((self.spike_levels(name)[0] for name in self.projections), default=1).bit_length()
        )

    def mix(self, *spikes: Tensor) -> Tensor:
        """The attention output before the firing neuron, `[T, B, value_dim, H, W]`, of the projections' spikes."""
        raise NotImplementedError

    def mixing_weights(self, spikes: Spikes, grid: Grid, block: int) -> WeightBlocks | None:
        """How much of each token reaches each query: ranges of queries in raster order, and for each of them weights
        `[B, queries, N]` (B = 1 where they do not depend on the image), of which about `block` numbers are held.

        Weights are absolute values, mean over heads or channels, added up over the time steps of `spikes`; rows are
        not normalised.
        """
        return None

    def operation_counts(self, spikes: Spikes, grid: Grid) -> dict[str, Operations] | None:
        """The operations of the parts behind the projections, for all of `spikes`, which hold whole numbers."""
        return None

    def state_terms(self, grid: Grid | None = None) -> list[StateTerm] | None:
        """What must be held at inference on this grid (default: the layer's own), term by term."""
        return None

    def row_stream(
        self, time_steps: int = 1, batch: int = 1, grid: Grid | None = None, buffers: str = "spikes"
    ) -> RowStream:
        """The mixing one row of tokens at a time, where a kind can: an object with the methods of `RowStream`."""
        raise LrfdynError(f"attention: {self.kind!r} has no streaming form")

    @property
    def streams(self) -> bool:
        """Whether this kind defines `row_stream`."""
        return type(self).row_stream is not Attention.row_stream

    def missing(self, what: str) -> str:
        """A line for reports about a fact that this kind leaves out."""
        return f"attention {self.kind!r} does not say {what}"

    def widen(self, x: Tensor) -> Tensor:
        """q or k `[T, B, dim, ...]` on the channels of v: each channel repeated, which stays inside its head."""
        ratio = self.value_dim // self.dim
        return x.repeat_interleave(ratio, 2) if ratio > 1 else x

    def extra_repr(self) -> str:
        return f"dim={self.dim}, heads={self.heads}, grid={self.grid}"


def require_grid(grid: Grid) -> None:
    check_types({"grid": grid}, {"grid": Sequence[int]})
    known = len(grid) == 2 and min(grid) >= 1
    require(known, f"grid: expected the rows and columns of tokens, two integers, got {grid!r}")
