"""The layers that hosts share. Tensors are `[T, B, C, H, W]`; convolutions see time folded into the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from inspect import signature
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lrfdyn.checks import checked
from lrfdyn.errors import require
from lrfdyn.nn.neurons import FoldedNorm, fused_dynamics, fused_norm, fused_norm_and_neuron, observed
from lrfdyn.nn.sections import Section, lean_max_pool, residual_section, row_halo
from lrfdyn.ops.bits import split_spikes, step_bits_of
from lrfdyn.ops.bn_lif import bn_lif, joined
from lrfdyn.ops.bn_lif.reference import settle_strides
from lrfdyn.ops.dispatch import autocast_dtype, use_triton
from lrfdyn.ops.spike_conv import spike_conv


def fold_time(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Applies `function`, which takes `[T * B, ...]`, to `x`, `[T, B, ...]`, and parts time and batch again."""
    return function(x.flatten(0, 1)).unflatten(0, x.shape[:2])


def max_pool(x: Tensor) -> Tensor:
    """A 3x3 max pool with stride 2, which halves the grid of `[T, B, C, H, W]`."""
    return fold_time(lambda y: F.max_pool2d(y, 3, 2, 1), x)


def is_repeated(x: Tensor) -> bool:
    """Whether all time steps of `x` are one and the same memory: a static image shown T times."""
    return x.shape[0] > 1 and x.stride(0) == 0


def convolve(conv: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Applies `conv` to every time step of `[T, B, C, H, W]`, once where all time steps are the same memory."""
    if is_repeated(x):
        return conv(x[0]).unsqueeze(0).expand(x.shape[0], -1, -1, -1, -1)
    return fold_time(conv, x)


def normalize(norm: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Applies a batch norm to `[T, B, C, H, W]`, with statistics over T, B, H and W."""
    return fold_time(lambda images: norm(settle_strides(images)), x)


@cache
def _arguments(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(signature(function).parameters)


def _adds_residual(layer: type[nn.Module]) -> bool:
    return "residual" in _arguments(layer.forward)


# A compiler takes the answer and does not look how it is found (see `torch.compiler.assume_constant_result`).
_adds_residual._dynamo_marked_constant = True  # type: ignore[attr-defined]


def add_output(residual: Tensor, layer: nn.Module, x: Tensor) -> Tensor:
    """`residual` plus what the layer makes of `x`. All layers of this package that stand at the end of a branch can be
    called with a `residual` and add it themselves; what a user puts in their place need not."""
    return layer(x, residual=residual) if _adds_residual(type(layer)) else residual + layer(x)


class DropPath(nn.Module):
    """Stochastic depth: in training, the residual branch `[T, B, ...]` of a sample is 0 at all time steps with
    probability `rate`, and divided by `1 - rate` otherwise."""

    @checked
    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, branch: Tensor) -> Tensor:
        if not self.training or self.rate == 0:
            return branch
        keep = 1 - self.rate
        shape = (1, branch.shape[1], *[1] * (branch.dim() - 2))
        return branch * (torch.empty(shape, dtype=branch.dtype, device=branch.device).bernoulli_(keep) / keep)

    def add(self, residual: Tensor, branch: nn.Module, x: Tensor) -> Tensor:
        """`residual` plus the branch of `x`, which adds it itself where nothing can be dropped."""
        if (self.training and self.rate > 0) or observed(self):
            return residual + self(branch(x))
        return add_output(residual, branch, x)

    def extra_repr(self) -> str:
        return f"rate={self.rate:g}"


def drop_path_rates(rate: float, depth: int) -> list[float]:
    """The drop-path rates of `depth` blocks, which grow linearly from 0 at the first to `rate` at the last."""
    require(isinstance(rate, int | float) and 0 <= rate < 1, f"drop_path: expected a rate in [0, 1), got {rate!r}")
    return [rate * i / max(depth - 1, 1) for i in range(depth)]


def _plain_convolution(conv: Any) -> bool:
    """Whether the fused path may read its weights and compute it: an ordinary one, not replaced, pruned or watched."""
    if type(conv) is not nn.Conv2d or observed(conv) or isinstance(conv.padding, str):
        return False
    return conv.dilation == (1, 1) and conv.padding_mode == "zeros"


def _spike_conv(x: Tensor, weight: Tensor, *, fork: bool = False, **convolution: Any) -> Any:
    """`spike_conv` in the type of autocast, which keeps the bits that `x` came with."""
    dtype = autocast_dtype(x)
    return spike_conv(x.to(dtype), weight.to(dtype), packed=step_bits_of(x), fork=fork, **convolution)


def _without_bias(conv: Any, x: Tensor) -> Tensor:
    """A plain convolution on a GPU, without its bias."""
    return _spike_conv(x, conv.weight, stride=conv.stride, padding=conv.padding, groups=conv.groups)


def convolve_spikes(conv: Any, x: Tensor) -> Tensor:
    """A convolution of spikes `[T, B, C, H, W]`, which are kept for its backward pass as bits if it has no bias."""
    plain = not is_repeated(x) and _plain_convolution(conv) and conv.bias is None
    if plain and use_triton(x, conv.weight):
        return _without_bias(conv, x)
    return convolve(conv, x)


def norm_fire(norm: Any, neuron: nn.Module | None, x: Tensor, residual: Tensor | None = None) -> Tensor:
    """`residual + SN{BN(x)}` of `[T, B, C, H, W]`, or without a neuron `residual + BN(x)`: one operation on a GPU."""
    fused = fused_norm_and_neuron(norm, neuron) if use_triton(x, residual) else None
    if fused is not None:
        return bn_lif(x, *fused, residual=residual)
    y = normalize(norm, x) if neuron is None else neuron(norm_fire(norm, None, x))
    return y if residual is None else residual + y


class ConvBN(nn.Module):
    """BN(Conv(x)), with padding: `[T, B, c_in, H, W]` becomes `[T, B, c_out, H / stride, W / stride]`, with a max pool
    behind it and a `residual` added where the caller asks for them."""

    def __init__(
        self, c_in: int, c_out: int, kernel: int = 1, stride: int = 1, groups: int = 1, bias: bool = False
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(c_in, c_out, kernel, stride, kernel // 2, groups=groups, bias=bias)
        self.bn = nn.BatchNorm2d(c_out)

    def forward(self, x: Tensor, residual: Tensor | None = None, pool: bool = False) -> Tensor:
        return self.fire(None, x, residual, pool)

    def fire(
        self, neuron: nn.Module | None, x: Tensor, residual: Tensor | None = None, pool: bool = False,
        pool_first: bool = False,
    ) -> Tensor:  # fmt: skip
        """The spikes of a neuron behind this layer, or potentials without one, and a pool behind the neuron or in front
        of it. On a GPU, norm, neuron, pool and sum are one operation."""
        on_gpu = _plain_convolution(self.conv) and use_triton(x, self.conv.weight, residual)
        fused = self._fused(neuron, x, residual, pool, pool_first) if on_gpu else None
        if fused is not None:
            return fused
        if neuron is None:
            y = convolve(self.conv, x)
            # Folded into the convolution a norm leaves nothing to do, and steps that are the same stay one memory.
            y = y if self._ends_in_convolution else normalize(self.bn, y)
        else:
            y = neuron(self.fire(None, x, pool=pool_first))
        y = max_pool(y) if pool else y
        return y if residual is None else residual + y

    @property
    def _ends_in_convolution(self) -> bool:
        return isinstance(self.bn, FoldedNorm) and not self.bn.shifts

    def _fused(self, neuron: Any, x: Tensor, residual: Tensor | None, pool: bool, pool_first: bool) -> Tensor | None:
        """Of a plain convolution; None where another part is observed by hooks or is of another kind, and where nothing
        follows the convolution."""
        if neuron is None and residual is None and not pool and self._ends_in_convolution:
            return None
        parts = fused_norm_and_neuron(self.bn, neuron)
        if parts is None:
            return None
        repeats = x.shape[0] if is_repeated(x) else 1
        y = _without_bias(self.conv, x[:1] if repeats > 1 else x)
        # The norm takes the bias of the convolution, so that no pass over memory is spent on adding it.
        options: dict[str, Any] = {"repeats": repeats, "pool": pool, "pool_first": pool_first}
        if pool and neuron is not None and residual is not None:  # no kernel adds to pooled spikes
            return residual + bn_lif(y, *parts, offset=self.conv.bias, **options)
        return bn_lif(y, *parts, offset=self.conv.bias, residual=residual, **options)

    def section(self, name: str, pool: bool = False) -> Section:
        """This layer, with a max pool behind it, as a section of potentials."""
        halo, stride = row_halo(self.conv), int(self.conv.stride[0])
        section = Section(name, self, (self,), self.conv.out_channels, "numbers", halo, stride)
        if not pool:
            return section
        return replace(section, run=lambda x: lean_max_pool(self(x)), halo=halo + stride, stride=2 * stride)


class SpikingConv(ConvBN):
    """SN{BN(Conv(x))}, with a max pool behind it and a `residual` added where the caller asks for them. On a GPU,
    norm, neuron, pool and sum are one operation."""

    def __init__(self, c_in: int, c_out: int, neuron: nn.Module, kernel: int = 1, **options: Any) -> None:
        super().__init__(c_in, c_out, kernel, **options)
        self.neuron = neuron

    def forward(self, x: Tensor, residual: Tensor | None = None, pool: bool = False) -> Tensor:
        return self.fire(self.neuron, x, residual, pool)

    def section(self, name: str, pool: bool = False) -> Section:
        """This layer, with a max pool behind it, as a section of spikes."""
        currents = super().forward

        def fire(x: Tensor) -> Tensor:
            return lean_max_pool(self.neuron(x)) if pool else self.neuron(x)

        section = super().section(name, pool)
        return replace(section, run=lambda x: self(x, pool=pool), holds="bits", halves=(currents, fire))

    @staticmethod
    def together(layers: Sequence[Any], x: Tensor) -> tuple[Sequence[Tensor], Tensor]:
        """The spikes of several layers of one input, and the input again, for a shortcut around what follows.

        On a GPU, 1x1 convolutions of the same kind are one matrix product, one norm and one neuron, and the gradient of
        the shortcut costs no pass of its own.
        """
        merged = _merged(layers, x)
        return ([layer(x) for layer in layers], x) if merged is None else merged


def _merged(layers: Sequence[SpikingConv], x: Tensor) -> tuple[Sequence[Tensor], Tensor] | None:
    """See `SpikingConv.together`; None off a GPU, where a part is observed by hooks, or the layers differ in kind."""
    plain = (type(layer) is SpikingConv and not observed(layer) and _plain_convolution(layer.conv) for layer in layers)
    if is_repeated(x) or not all(plain) or not use_triton(x, *(layer.conv.weight for layer in layers)):
        return None
    convs = [layer.conv for layer in layers]
    kinds = [fused_dynamics(layer.neuron) for layer in layers]
    if kinds[0] is None or any(kind != kinds[0] for kind in kinds):
        return None
    if any((c.kernel_size, c.stride, c.padding, c.groups) != ((1, 1), (1, 1), (0, 0), 1) for c in convs):
        return None
    if any((c.bias is None) != (convs[0].bias is None) for c in convs):
        return None
    norms = [norm for norm in (fused_norm(layer.bn, count_batch=False) for layer in layers) if norm is not None]
    if len(norms) < len(layers) or len({(norm.training, norm.momentum, norm.eps) for norm in norms}) > 1:
        return None
    if norms[0].training:
        counts = [layer.bn.num_batches_tracked for layer in layers]
        torch._foreach_add_([count for count in counts if count is not None], 1)
    dtype = autocast_dtype(x)
    weights = [c.weight.to(dtype) for c in convs]
    # Not by a name: nothing holds the joined weights while the neurons run, unless a backward pass needs them.
    y, shortcut = _spike_conv(x, torch.cat(weights) if weights[1:] else weights[0], fork=True)
    shortcut = shortcut if x.dtype == dtype else x  # sums of a type of their own keep it
    if len(layers) == 1:
        return [bn_lif(y, norms[0], kinds[0], offset=convs[0].bias)], shortcut
    biases = [c.bias for c in convs if c.bias is not None]
    with joined(norms) as norm:
        spikes = bn_lif(y, norm, kinds[0], offset=torch.cat(biases) if biases else None)
    return split_spikes(spikes, [c.out_channels for c in convs]), shortcut


class MembraneConv(ConvBN):
    """BN(Conv(SN{x})): the neuron comes first, so that potentials go in and potentials come out."""

    def __init__(self, c_in: int, c_out: int, neuron: nn.Module, kernel: int = 1, **options: Any) -> None:
        super().__init__(c_in, c_out, kernel, **options)
        self.neuron = neuron

    def forward(self, x: Tensor, residual: Tensor | None = None, pool: bool = False) -> Tensor:
        return super().forward(self.neuron(x), residual, pool)

    @staticmethod
    def chain(
        layers: Sequence[Any], x: Tensor, residual: Tensor | None = None, neuron: nn.Module | None = None
    ) -> Tensor:
        """What the layers make of x one after the other, or the spikes of a `neuron` behind them; plus a `residual`.

        On a GPU the potentials between two layers never exist: the norm of one and the neuron of the next are one
        operation, if nobody watches these layers.
        """
        plain = all(type(layer) is MembraneConv and not observed(layer) for layer in layers)
        if plain and use_triton(x, residual):
            x = layers[0].neuron(x)
            for layer, following in pairwise(layers):
                x = layer.fire(following.neuron, x)
            return layers[-1].fire(neuron, x, residual)
        for layer in layers:
            x = layer(x)
        x = x if neuron is None else neuron(x)
        return x if residual is None else residual + x


class MembraneMLP(nn.Module):
    """Two 1x1 convolutions with bias, each behind its neuron: potentials `[T, B, dim, H, W]` in and out, plus a
    `residual`."""

    def __init__(self, dim: int, hidden: int, neuron: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.fc1 = MembraneConv(dim, hidden, neuron(), bias=True)
        self.fc2 = MembraneConv(hidden, dim, neuron(), bias=True)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return MembraneConv.chain([self.fc1, self.fc2], x, residual)


class MembraneBlock(nn.Module):
    """Residual attention and MLP on potentials `[T, B, C, H, W]`, behind a residual `separable` convolution where there
    is one; `neuron` makes the spikes that the attention takes. The branches add what they are the residual of."""

    def __init__(
        self, neuron: nn.Module, attn: nn.Module, mlp: MembraneMLP, drop_path: float = 0.0, separable: Any = None
    ) -> None:
        super().__init__()
        self.neuron, self.attn, self.mlp = neuron, attn, mlp
        self.drop_path = DropPath(drop_path)
        self.separable = separable

    def forward(self, x: Tensor) -> Tensor:
        if self.separable is not None:
            x = self.drop_path.add(x, self.separable, x)
        x = self.drop_path.add(x, self.attn, self.neuron(x))
        return self.drop_path.add(x, self.mlp, x)

    def sections(self, name: str) -> Iterator[Section]:
        """The separable convolution, attention and MLP as sections."""
        neuron, attn, width = self.neuron, self.attn, self.mlp.fc2.conv.out_channels
        if self.separable is not None:
            yield residual_section(f"{name}.separable", self.separable, width)
        yield Section(f"{name}.attn", lambda x: x + attn(neuron(x)), (neuron, attn), width, "numbers", tiled=False)
        yield residual_section(f"{name}.mlp", self.mlp, width)


def init_weights(model: nn.Module) -> None:
    """Truncated normal for linear layers and 1x1 convolutions, as in ViT; other kernels keep PyTorch's default."""
    for module in model.modules():
        if isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1)):
            nn.init.trunc_normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
