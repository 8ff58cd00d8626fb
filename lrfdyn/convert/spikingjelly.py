"""SpikingJelly's `SpikingSelfAttention` as one of our attentions. Nothing here imports SpikingJelly."""

from __future__ import annotations

from collections.abc import Callable, Container
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lrfdyn.attention import SSA, Attention, AttentionHost
from lrfdyn.errors import LrfdynError, require
from lrfdyn.nn.layers import SpikingConv
from lrfdyn.nn.neurons import SpikingNeuron
from lrfdyn.ops.lif import Dynamics

# Classes of `spikingjelly.activation_based.surrogate` to the names of ours; `alpha` means the same.
SURROGATES = {"Sigmoid": "sigmoid", "ATan": "atan", "Rect": "rectangle"}
DEFAULT_GRID = (14, 14)


def is_spikingjelly(module: object, names: Container[str] = ("SpikingSelfAttention",)) -> bool:
    """Whether `module` is of one of SpikingJelly's classes itself: a subclass may compute another thing."""
    cls = type(module)
    return cls.__name__ in names and cls.__module__.split(".")[0] == "spikingjelly"


def stated_grid(model: nn.Module) -> tuple[int, int]:
    """The grid of tokens that the stem of a model was made for."""
    grids = (getattr(module, "grid_size", None) for module in model.modules())
    return next((grid for grid in grids if isinstance(grid, tuple) and len(grid) == 2), DEFAULT_GRID)


class FlatAttention(nn.Module):
    """One of our attentions where the network hands over tokens `[T, B, C, N]` instead of a grid."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention = attention
        self.seen_grid: tuple[int, int] | None = None

    def note_grid(self, _block: nn.Module, args: tuple[Any, ...]) -> None:
        """A hook in front of the block around this layer, which still sees `[T, B, C, H, W]`."""
        if args and isinstance(args[0], Tensor) and args[0].dim() == 5:
            self.seen_grid = (args[0].shape[3], args[0].shape[4])

    def forward(self, x: Tensor) -> Tensor:
        require(x.dim() == 4, f"x: expected [T, B, C, N], got {list(x.shape)}")
        for grid in (self.seen_grid, self.attention.grid):
            if grid is not None and grid[0] * grid[1] == x.shape[3]:
                return self.attention(x.unflatten(3, grid)).flatten(3)
        expected = f"x: expected the tokens of a grid {self.attention.grid}"
        raise LrfdynError(f"{expected}, got {x.shape[3]} tokens; pass `grid` to swap_attention")

    @classmethod
    def take_over(cls, layer: Any, grid: tuple[int, int]) -> FlatAttention:
        """SSA that computes what SpikingJelly's layer does, with its weights."""
        parts = ("qkv_conv_bn", "qkv_lif", "attn_lif", "proj_conv_bn", "proj_lif", "dim", "num_heads", "scale")
        missing = [name for name in parts if not hasattr(layer, name)]
        require(not missing, f"model: expected SpikingJelly 2.0's SpikingSelfAttention, which has {missing}")
        conv, bn, project = _read_layer(layer.qkv_conv_bn, layer.qkv_lif, layer.dim, 3 * layer.dim)
        out_conv, out_bn, project_out = _read_layer(layer.proj_conv_bn, layer.proj_lif, layer.dim, layer.dim)
        neuron, fire = (partial(SpikingNeuron, dynamics_of(lif)) for lif in (layer.qkv_lif, layer.attn_lif))
        host = AttentionHost(project, project_out, neuron, fire, layer.scale)
        attention = SSA(layer.dim, layer.num_heads, grid, host).train(layer.training)
        for i, name in enumerate(("q", "k", "v")):  # the order of the rows in their common matrix
            _copy(getattr(attention, name), conv, bn, slice(i * layer.dim, (i + 1) * layer.dim))
        _copy(attention.proj, out_conv, out_bn, slice(None))
        adapter = cls(attention)
        adapter.training = layer.training  # its own only: batch norms may have been set apart
        return adapter


def dynamics_of(neuron: Any) -> Dynamics:
    """The dynamics of one of SpikingJelly's neurons; an error where we have none that are the same."""
    known = is_spikingjelly(neuron, ("LIFNode", "IFNode"))
    require(known, f"model: expected neurons LIFNode or IFNode, got {type(neuron).__name__}")
    for name, value in (("v_reset", 0.0), ("store_v_seq", False), ("_neuron_precision", None)):
        given = getattr(neuron, name)
        require(given == value, f"model: expected neurons with {name.lstrip('_')}={value}, got {given}")
    surrogate = neuron.surrogate_function
    known = is_spikingjelly(surrogate, SURROGATES) and surrogate.spiking
    require(known, f"model: expected a spiking surrogate {', '.join(SURROGATES)}, got {surrogate}")
    rate = 1 / neuron.tau if hasattr(neuron, "tau") else 0.0
    return Dynamics(
        leak=1 - rate,
        gain=rate if getattr(neuron, "decay_input", False) else 1.0,
        threshold=neuron.v_threshold,
        surrogate=SURROGATES[type(surrogate).__name__],
        alpha=surrogate.alpha,
        detach_reset=neuron.detach_reset,
    )


def _read_layer(
    pair: Any, neuron: Any, c_in: int, c_out: int
) -> tuple[nn.Conv1d, nn.BatchNorm1d, Callable[[int, int], SpikingConv]]:
    """The 1x1 convolution and the batch norm of a container, if they are what ours are, and what makes such layers."""
    conv, bn = pair
    form = ("in_channels", "out_channels", "kernel_size", "stride", "groups")
    plain = isinstance(conv, nn.Conv1d) and [getattr(conv, key) for key in form] == [c_in, c_out, (1,), (1,), 1]
    require(plain, f"model: expected a 1x1 convolution of {c_in} to {c_out} channels, got {conv}")
    whole = isinstance(bn, nn.BatchNorm1d) and bn.affine and bn.track_running_stats and bn.momentum is not None
    require(whole, f"model: expected a batch norm with weights and running statistics, got {bn}")
    return conv, bn, partial(_make_layer, conv.bias is not None, bn.eps, bn.momentum, dynamics_of(neuron))


def _make_layer(bias: bool, eps: float, momentum: Any, dynamics: Dynamics, c_in: int, c_out: int) -> SpikingConv:
    layer = SpikingConv(c_in, c_out, SpikingNeuron(dynamics), bias=bias)
    layer.bn.eps, layer.bn.momentum = eps, momentum
    return layer


@torch.no_grad()
def _copy(layer: Any, conv: nn.Conv1d, bn: nn.BatchNorm1d, rows: slice) -> None:
    """Puts these rows of the weights of `conv` and `bn` into `layer`."""
    for own, theirs in ((layer.conv, conv), (layer.bn, bn)):
        own.to(device=theirs.weight.device, dtype=theirs.weight.dtype).train(theirs.training)
        for name, value in [*theirs.named_parameters(), *theirs.named_buffers()]:
            target = getattr(own, name)
            target.copy_((value[rows] if value.dim() else value).reshape(target.shape))
            target.requires_grad_(value.requires_grad)
