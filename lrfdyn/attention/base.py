"""What all attentions share: projections from the host, one mixing step, one firing neuron."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from lrfdyn.errors import require, require_integer, require_integers


@dataclass(frozen=True)
class AttentionHost:
    """What an attention takes from the network it sits in.

    `project(c_in, c_out)` makes q, k or v: spikes of a normalised 1x1 convolution. `project_out(c_in, c_out)` makes
    the layer behind the attention. `fire()` makes the neuron on an unnormalised attention output, `neuron()` the
    host's ordinary one. All four are importable functions or partials of them, so that models can be pickled. A spike
    of q, k or v takes `spike_bits`.
    """

    project: Callable[[int, int], nn.Module]
    project_out: Callable[[int, int], nn.Module]
    neuron: Callable[[], nn.Module]
    fire: Callable[[], nn.Module]
    scale: float
    value_ratio: int = 1
    spike_bits: int = 1


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


class Attention(nn.Module):
    """x `[T, B, C, H, W]` in, the same shape out: `proj(SN{mix(q, k, v)})`."""

    projections: tuple[str, ...] = ("q", "k", "v")

    def __init__(self, dim: int, heads: int, grid: tuple[int, int], host: AttentionHost) -> None:
        super().__init__()
        require_integer("dim", dim, 1)
        require_integer("heads", heads, 1)
        require(dim % heads == 0, f"heads: expected a divisor of the width {dim}, got {heads}")
        require_integers("grid", grid)
        require(
            len(grid) == 2 and min(grid) >= 1,
            f"grid: expected the rows and columns of tokens, two integers, got {grid!r}",
        )
        self.dim, self.heads, self.grid = dim, heads, grid
        self.host = host  # what another kind of attention in the same place is built from
        self.value_dim = dim * host.value_ratio
        self.scale, self.spike_bits = host.scale, host.spike_bits
        for name in self.projections:
            setattr(self, name, host.project(dim, self.value_dim if name == "v" else dim))
        self.fire = self._firing_neuron(host)
        self.proj = host.project_out(self.value_dim, dim)

    def _firing_neuron(self, host: AttentionHost) -> nn.Module:
        return host.fire()

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """With `residual` (the host's last layer must take one), added to the output."""
        projected, shortcut = self._project(x)
        spikes = self.spikes(*projected)
        if residual is None:
            return self.proj(spikes)
        return self.proj(spikes, residual=shortcut if residual is x else residual)

    def spikes(self, *projected: Tensor) -> Tensor:
        """What the firing neuron sends to the last layer."""
        return self.fire(self.mix(*projected))

    def project(self, x: Tensor) -> list[Tensor]:
        """The spikes of the projections, in their order."""
        return list(self._project(x)[0])

    def _project(self, x: Tensor) -> tuple[Sequence[Tensor], Tensor]:
        """These spikes, and `x` for a shortcut around the attention: layers that can, compute them together."""
        require(x.dim() == 5, f"x: expected [T, B, C, H, W], got {list(x.shape)}")
        require(x.shape[2] == self.dim, f"x: expected {self.dim} channels [T, B, C, H, W], got {list(x.shape)}")
        layers = [getattr(self, name) for name in self.projections]
        if all(hasattr(layer, "together") for layer in layers):
            return layers[0].together(layers, x)
        return [layer(x) for layer in layers], x

    def mix(self, *spikes: Tensor) -> Tensor:
        """The attention output before the firing neuron, `[T, B, value_dim, H, W]`, of the projections' spikes."""
        raise NotImplementedError

    def weights(self, x: Tensor) -> Tensor:
        """How much of each token reaches each query, `[T * B, N, N]`: absolute values, mean over heads or channels,
        rows not normalised."""
        raise NotImplementedError

    def state_terms(self, grid: tuple[int, int] | None = None) -> list[StateTerm]:
        """What must be held at inference on this grid, term by term."""
        raise NotImplementedError

    def widen(self, x: Tensor) -> Tensor:
        """q or k `[T, B, dim, H, W]` on the channels of v: each channel repeated, which stays inside its head."""
        ratio = self.value_dim // self.dim
        return x.repeat_interleave(ratio, 2) if ratio > 1 else x

    def extra_repr(self) -> str:
        return f"dim={self.dim}, heads={self.heads}, grid={self.grid}"


def to_heads(x: Tensor, heads: int) -> Tensor:
    """`[T, B, C, H, W]` as `[T * B, heads, N, C / heads]`, without a copy where the memory allows."""
    return x.flatten(0, 1).flatten(2).unflatten(1, (heads, -1)).mT


def from_heads(y: Tensor, like: Tensor) -> Tensor:
    """`[T * B, heads, N, e]` as `[T, B, heads * e, H, W]` in channels-last memory."""
    return from_tokens(y.transpose(1, 2).flatten(2), like)


def to_tokens(x: Tensor) -> Tensor:
    """`[T, B, C, H, W]` as `[T * B, N, C]` in raster order."""
    return x.flatten(0, 1).flatten(2).mT


def from_tokens(y: Tensor, like: Tensor) -> Tensor:
    """`[T * B, N, C]` as `[T, B, C, H, W]` with the time, batch and grid of `like`."""
    time, batch, _, height, width = like.shape
    return y.reshape(time, batch, height, width, -1).permute(0, 1, 4, 2, 3)
