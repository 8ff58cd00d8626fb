"""A model as a graph of the Neuromorphic Intermediate Representation (NIR): convolutions, pools and neurons, and edges
that add up where they meet.

The model's own forward pass is followed once, for one time step, with signals in the place of numbers. What a layer
does to a signal becomes a node, or an edge; what NIR has no node for is an error that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, count
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lrfdyn.attention import Attention
from lrfdyn.attention.lrf_dyn import Dendrites
from lrfdyn.attention.ssa import LocalReceptiveFields
from lrfdyn.convert.fold import fold_batch_norm
from lrfdyn.deploy.export.exportable import PlainRepConv
from lrfdyn.deploy.export.formats import importing
from lrfdyn.errors import LrfdynError, require
from lrfdyn.models.base import SpikingModel
from lrfdyn.models.sdt_v2 import RepConvBN
from lrfdyn.nn.neurons import FoldedNorm, Neuron, SpikingNeuron
from lrfdyn.ops.dendrite.modes import mode_kernel
from lrfdyn.ops.lif import Dynamics

TIME_STEP = 1e-4  # seconds: what readers of NIR take for a step, since a graph itself does not say it
Shape = tuple[int, ...]


class Signal(Tensor):
    """What the nodes `sources` of a graph send, added up: a tensor without memory, whose `axes` are named T, B, C, H
    and W, and by several letters where some were joined."""

    graph: Graph
    sources: tuple[str, ...]
    axes: tuple[str, ...]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in FOLLOWED:
            return FOLLOWED[func](*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass(), suppress(RuntimeError):
            out = func(*args, **(kwargs or {}))
            if not any(isinstance(part, Tensor) for part in _parts(out)):  # a size, a type
                return out
        signal = next(part for arg in args for part in _parts(arg) if isinstance(part, Signal))
        raise signal.graph.refusal(f"the operation {func.__name__}")

    def like(self, shape: Sequence[int], axes: Sequence[str], sources: Sequence[str] | None = None) -> Signal:
        """A signal of the same graph, of the same sources unless others are given."""
        return self.graph.signal(shape, axes, self.sources if sources is None else sources)


def _parts(x: Any) -> Sequence[Any]:
    return x if isinstance(x, list | tuple) else (x,)


def _flatten(x: Signal, start: int = 0, end: int = -1) -> Signal:
    first, last = start % x.dim(), end % x.dim() + 1
    axes = (*x.axes[:first], "".join(x.axes[first:last]), *x.axes[last:])
    return x.like((*x.shape[:first], x.shape[first:last].numel(), *x.shape[last:]), axes)


def _unflatten(x: Signal, axis: int, sizes: Sequence[int]) -> Signal:
    parts = x.axes[axis]
    if len(parts) != len(sizes):
        raise x.graph.refusal("the split of an axis, as into heads,")
    shape = torch.empty(x.shape, device="meta").unflatten(axis, sizes).shape
    first = axis % x.dim()
    return x.like(shape, (*x.axes[:first], *parts, *x.axes[first + 1 :]))


def _permute(x: Signal, *order: int) -> Signal:
    return x.like([x.shape[i] for i in order], [x.axes[i] for i in order])


def _add(x: Any, y: Any) -> Signal:
    signal = x if isinstance(x, Signal) else y
    if not (isinstance(x, Signal) and isinstance(y, Signal)):
        raise signal.graph.refusal("the sum with a constant")
    if x.axes != y.axes or x.shape != y.shape or set(x.sources) & set(y.sources):
        raise signal.graph.refusal("this sum")
    return x.like(x.shape, x.axes, (*x.sources, *y.sources))


def _mean(x: Signal, axes: int | Sequence[int]) -> Signal:
    """Over the grid, and over the time steps: of those, a graph for one step leaves the mean to its reader."""
    over = {axis % x.dim() for axis in ((axes,) if isinstance(axes, int) else axes)}
    left = [i for i in range(x.dim()) if i not in over]
    letters = set("".join(x.axes[i] for i in over))
    if letters not in ({"T"}, {"H", "W"}, {"T", "H", "W"}):
        raise x.graph.refusal(f"the mean over {' and '.join(sorted(letters))}")
    sources = x.graph.average("mean", x, x.graph.grid(x)) if "H" in letters else x.sources
    return x.like([x.shape[i] for i in left], [x.axes[i] for i in left], sources)


def _max_pool(
    x: Signal, kernel_size: int, stride: int, padding: int = 0, dilation: int = 1, ceil_mode: bool = False, **_: Any
) -> Signal:
    """Of spikes: where their average is above zero."""
    graph, (source, *others) = x.graph, x.sources
    if others or type(graph.nodes[source]).__name__ not in ("LIF", "IF"):
        raise graph.refusal("the maximum of potentials (that of spikes is a pool and a threshold)")
    if dilation != 1 or ceil_mode:
        raise graph.refusal("this max pool")
    (averaged,) = graph.average("pool", x, (kernel_size,) * 2, (stride,) * 2, (padding,) * 2)
    # One spike gives a charge of 1 / (2 k^2), and whatever gives any charge fires: the potential is always back at 0.
    half = Dynamics.lif(threshold=1 / (4 * kernel_size**2), strict=True)
    shape = graph.shapes[averaged]
    return x.like((x.shape[0], *shape), x.axes, graph.fire("pool_neuron", [averaged], half))


FOLLOWED: dict[Any, Callable[..., Any]] = {
    Tensor.flatten: _flatten,
    Tensor.unflatten: _unflatten,
    Tensor.permute: _permute,
    Tensor.mean: _mean,
    F.max_pool2d: _max_pool,
    **dict.fromkeys((Tensor.add, Tensor.__add__, Tensor.__radd__, torch.add), _add),
}


class Graph:
    """Nodes and edges of a NIR graph while a model is followed; `shapes` are those of the nodes' outputs, and `place`
    holds the modules that the forward pass is in."""

    def __init__(self, nir: Any, host: str, shape: Shape, dtype: torch.dtype, dense: bool) -> None:
        self.nir, self.dtype, self.dense = nir, dtype, dense
        self.nodes: dict[str, Any] = {"input": nir.Input(np.array(shape))}
        self.shapes: dict[str, Shape] = {"input": shape}
        self.edges: list[tuple[str, str]] = []
        self.place = [("", host)]

    def signal(self, shape: Sequence[int], axes: Sequence[str], sources: Sequence[str]) -> Signal:
        signal = torch.empty(tuple(shape), dtype=self.dtype, device="meta").as_subclass(Signal)
        signal.graph, signal.axes, signal.sources = self, tuple(axes), tuple(sources)
        return signal

    def refusal(self, what: str) -> LrfdynError:
        path, kind = self.place[-1]
        return LrfdynError(f"model: NIR has no node for {what} in {path or 'the network'} ({kind})")

    def name(self, part: str = "") -> str:
        """A free name for a node: that of the module in which the forward pass is, and of a part of it."""
        name = ".".join(filter(None, (self.place[-1][0], part)))
        names = chain([name], (f"{name}_{i}" for i in count(2)))
        return next(free for free in names if free not in self.nodes)

    def add(self, part: str, node: Any, sources: Sequence[str], shape: Sequence[int]) -> tuple[str]:
        """A node that takes the sum of what `sources` send and gives `shape`."""
        name = self.name(part)
        self.nodes[name], self.shapes[name] = node, tuple(shape)
        self.edges += [(source, name) for source in sources]
        return (name,)

    def grid(self, x: Signal) -> tuple[int, int]:
        _, height, width = self.shapes[x.sources[0]]
        return height, width

    def average(
        self, part: str, x: Signal, kernel: Shape, stride: Shape | None = None, padding: Shape = (0, 0)
    ) -> tuple[str]:
        stride = stride or kernel
        node = self.nir.AvgPool2d(np.array(kernel), np.array(stride), np.array(padding))
        sizes = zip(self.grid(x), kernel, stride, padding, strict=True)
        grid = [(size + 2 * p - k) // s + 1 for size, k, s, p in sizes]
        return self.add(part, node, x.sources, (self.shapes[x.sources[0]][0], *grid))

    def fire(self, part: str, sources: Sequence[str], dynamics: Dynamics) -> tuple[str]:
        """The neuron U[t] = kept U[t-1] + gain I[t]. A neuron of NIR fires above its threshold and not at it: the
        threshold is the next smaller number, in the type of the model."""
        kept, gain = dynamics.leak * dynamics.decay, dynamics.gain
        if dynamics.v_reset != 0 or not 0 <= kept <= 1:
            raise self.refusal(f"a neuron with the reset {dynamics.v_reset:g} that keeps {kept:g} of its potential")
        threshold = torch.tensor(dynamics.threshold, dtype=self.dtype)
        if not dynamics.strict:
            threshold = torch.nextafter(threshold, torch.tensor(-torch.inf, dtype=self.dtype))
        shape = self.shapes[sources[0]]
        fires = {"v_threshold": np.full(shape, threshold.item()), "v_reset": np.zeros(shape)}
        if kept == 1:
            node = self.nir.IF(r=np.full(shape, gain / TIME_STEP), **fires)
        else:
            tau, r = np.full(shape, TIME_STEP / (1 - kept)), np.full(shape, gain / (1 - kept))
            node = self.nir.LIF(tau=tau, r=r, v_leak=np.zeros(shape), **fires)
        return self.add(part, node, sources, shape)

    def convolve(
        self, part: str, x: Signal, weight: Tensor, bias: Tensor | None = None, groups: int = 1, **how: Any
    ) -> Signal:
        """A convolution of `[TB, C, H, W]`; `how` are stride, padding and dilation, two integers each."""
        if x.axes != ("TB", "C", "H", "W"):
            raise self.refusal(f"a convolution over {x.axes}")
        how = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), **how}
        with torch._C.DisableTorchFunctionSubclass():
            shape = F.conv2d(torch.empty(x.shape, device="meta"), weight.float().to("meta"), groups=groups, **how).shape
        if self.dense and groups > 1:
            weight, groups = _without_groups(weight, groups), 1
        bias = weight.new_zeros(len(weight)) if bias is None else bias
        values = {"weight": _array(weight), "bias": _array(bias), "groups": groups}
        node = self.nir.Conv2d(input_shape=self.grid(x), **values, **how)
        return x.like(shape, x.axes, self.add(part, node, x.sources, shape[1:]))

    # What these modules compute is a node of its own.

    def convolution(self, layer: nn.Conv2d, x: Signal) -> Signal:
        if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
            raise self.refusal("this padding")
        how: Any = {name: getattr(layer, name) for name in ("stride", "padding", "dilation", "groups")}
        return self.convolve("", x, layer.weight, layer.bias, **how)

    def neuron(self, layer: SpikingNeuron, x: Signal) -> Signal:
        if x.axes[:3] != ("T", "B", "C"):
            raise self.refusal("a neuron behind a mean over time")
        return x.like(x.shape, x.axes, self.fire("", x.sources, layer.dynamics))

    def dendrites(self, layer: Dendrites, x: Signal) -> Signal:
        weight = scan_weight(layer, self.grid(x))
        padding = tuple(size - 1 for size in self.grid(x))
        y = self.convolve("", _flatten(x, 0, 1), weight, groups=len(weight), padding=padding)
        return x.like(x.shape, x.axes, y.sources)

    def stencils(self, layer: LocalReceptiveFields, x: Signal, residual: Signal, scale: float = 1.0) -> Signal:
        if layer.norm is not None or scale != 1:
            raise self.refusal("scaled stencils")
        sources = residual.sources
        for weight, d in zip(layer.weight.unsqueeze(2), layer.dilations, strict=True):
            how: Any = {"padding": (d, d), "dilation": (d, d), "groups": len(weight)}
            sources += self.convolve(f"dilation_{d}", _flatten(x, 0, 1), weight, **how).sources
        return x.like(x.shape, x.axes, sources)

    def shift(self, layer: FoldedNorm, x: Signal) -> Signal:
        """Into the bias of the last convolution that gives to `x`, which nothing else has taken yet."""
        if not layer.shifts:
            return x
        last = x.sources[-1]
        if type(self.nodes[last]).__name__ != "Conv2d" or any(source == last for source, _ in self.edges):
            raise self.refusal("a norm that is not behind a convolution")
        self.nodes[last].bias = self.nodes[last].bias + _array(layer.shift)
        return x

    def linear(self, layer: nn.Linear, x: Signal) -> Signal:
        shape = self.shapes[x.sources[0]]
        if x.axes[-2:] != ("B", "C") or shape != (layer.in_features, 1, 1):
            raise self.refusal(f"a linear layer over {x.axes}")
        flat = self.add("flatten", self.nir.Flatten(np.array(shape), 0, -1), x.sources, shape[:1])
        bias = layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias
        node = self.nir.Affine(_array(layer.weight), _array(bias))
        sources = self.add("", node, flat, (layer.out_features,))
        return x.like((*x.shape[:-1], layer.out_features), x.axes, sources)


def _array(x: Tensor) -> np.ndarray:
    return x.detach().cpu().numpy()


def _without_groups(weight: Tensor, groups: int) -> Tensor:
    """The weights of a convolution without groups, zero between them."""
    outs, ins = len(weight) // groups, weight.shape[1]
    out = weight.new_zeros(len(weight), ins * groups, *weight.shape[2:])
    for i in range(groups):
        rows = slice(i * outs, (i + 1) * outs)
        out[rows, i * ins : (i + 1) * ins] = weight[rows]
    return out


def scan_weight(dendrites: Dendrites, grid: tuple[int, int]) -> Tensor:
    """The dendrites on a grid as a depth-wise convolution with a padding of (H-1, W-1): weights
    `[C, 1, 2H-1, 2W-1]`.

    A token dy rows above and dx columns to the left of another comes dy W + dx tokens before it in raster order, so
    every place in the kernel has one lag, and padding leaves out what is not on the grid. Where the lag is negative the
    token comes later, and counts in the second direction alone."""
    height, width = grid
    dy = torch.arange(height - 1, -height, -1).unsqueeze(1)
    lag = dy * width + torch.arange(width - 1, -width, -1)
    out: Any = 0
    for sign, (decay, frequency, weight) in zip((1, -1), dendrites.modes_by_direction(width), strict=False):
        modes = (decay.detach().double(), None if frequency is None else frequency.detach().double())
        kernel = mode_kernel(*modes, weight.detach().double(), height * width)
        lags = sign * lag
        out = out + kernel[lags.clamp(min=0)] * (lags >= 0).unsqueeze(-1)
    return out.permute(2, 0, 1).unsqueeze(1).to(dendrites.weight.dtype)


# By what a module computes: a class that has a forward of its own is followed into it.
FORMS: dict[Any, Callable[..., Signal]] = {
    nn.Conv2d.forward: Graph.convolution,
    nn.Linear.forward: Graph.linear,
    SpikingNeuron.forward: Graph.neuron,
    Dendrites.forward: Graph.dendrites,
    LocalReceptiveFields.forward: Graph.stencils,
    FoldedNorm.forward: Graph.shift,
}


@torch.no_grad()
def nir_graph(model: SpikingModel, size: tuple[int, int], dense: bool = False) -> Any:
    """A `nir.NIRGraph` of one time step of `model`, which must be in evaluation mode, for images of `size` (height,
    width). Its output `[classes]` has to be averaged over the time steps; the input is the same image at each.

    Nodes have the names of the modules. The weights have the type of the model. Depth-wise convolutions have groups, or
    with `dense` zeros between the channels.
    """
    with importing("format: nir", "nir"):
        import nir
    for path, module in model.named_modules():
        if isinstance(module, Attention):
            one, needs = len(module.projections) == 1, f"products of {', '.join(module.projections)}"
            reason = f"{path} ({module.kind}) needs {needs}, and no node of NIR multiplies two signals"
            require(one, f"model: {reason}; lrf_dyn with the value token needs none")
        elif isinstance(module, Neuron):
            plain, kind = type(module).forward is SpikingNeuron.forward, type(module).__name__
            require(plain, f"model: {path} ({kind}) is no neuron of NIR, which charges, sends a spike of 1 and resets")
    followed = fold_batch_norm(model)
    for path, module in list(followed.named_modules()):
        if isinstance(module, RepConvBN):
            followed.set_submodule(path, PlainRepConv(module))
    shape = (model.in_channels, *size)
    graph = Graph(nir, type(model).__name__, shape, next(model.parameters()).dtype, dense)
    for path, module in followed.named_modules():
        if path:
            _note_place(graph, module, path)
        form = FORMS.get(type(module).forward)
        if form is not None:
            module.forward = partial(form, graph, module)  # type: ignore[method-assign]
    x = graph.signal((1, 1, *shape), "TBCHW", ["input"])
    logits: Any = followed.forward_head(followed.forward_stages(x, only_last=True)[-1])
    given = graph.shapes[logits.sources[0]]
    graph.add("output", nir.Output(np.array(given)), logits.sources, given)
    return nir.NIRGraph(graph.nodes, graph.edges, type_check=False)


def _note_place(graph: Graph, module: nn.Module, path: str) -> None:
    def enter(*_: Any) -> None:
        graph.place.append((path, type(module).__name__))

    def leave(*_: Any) -> None:
        graph.place.pop()

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave)
