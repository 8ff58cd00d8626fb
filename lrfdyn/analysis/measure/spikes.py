"""Firing rates, and synaptic operations and their energy, counted from the spikes that a model really sends.

A spike into a layer is one accumulate (AC) per weight it meets: borders are exact, and an integer n is n spikes. A
layer whose input is not spikes multiplies and accumulates (MAC) with every weight, whatever the value. The first layer
of a static image is such a layer. The products inside an attention are those of its `operation_counts`.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lrfdyn.analysis.measure.observe import ImageTensors, images_in, observe, watch_attentions
from lrfdyn.attention import Attention
from lrfdyn.attention.base import Spikes
from lrfdyn.checks import checked
from lrfdyn.errors import require
from lrfdyn.models.qkformer import TokenAttention
from lrfdyn.models.sdt_v2 import RepConv
from lrfdyn.nn.neurons import IntegerSpike, Neuron

TOLERANCE = 1e-3  # how far from a whole number a spike may be: 1/3 three times is not 1


class FiringRates:
    """Counts the spikes of every neuron layer; an integer spike n/D counts as n/D."""

    def __init__(self) -> None:
        self.spikes: defaultdict[str, Tensor | float] = defaultdict(float)
        self.neurons: Counter[str] = Counter()

    def watch(self, model: nn.Module) -> list[RemovableHandle]:
        neurons = [(name, module) for name, module in model.named_modules() if isinstance(module, Neuron)]
        return [module.register_forward_hook(partial(self._add, name)) for name, module in neurons]

    def _add(self, name: str, _module: nn.Module, _args: Any, spikes: Tensor) -> None:
        self.spikes[name] += spikes.detach().double().sum()  # stays on the device: no waiting inside the pass
        self.neurons[name] += spikes.numel()

    def record(self) -> dict[str, Any]:
        spikes = {name: float(total) for name, total in self.spikes.items()}
        by_layer = {name: total / self.neurons[name] for name, total in spikes.items()}
        return {"mean": sum(spikes.values()) / self.neurons.total() if by_layer else None, "by_layer": by_layer}


@checked
def firing_rates(model: nn.Module, images: ImageTensors) -> dict[str, Any]:
    """Return the firing rates of a model on images `[n, C, H, W]` or batches of them: `mean`, spikes per neuron and
    time step over all neurons (None without any), and `by_layer`, the same of every neuron layer."""
    return observe(model, images, FiringRates())[0]


@checked
@dataclass(frozen=True)
class EnergyModel:
    """What an operation costs, and what counts as which. The costs are those of 32-bit arithmetic at 45 nm."""

    accumulate_pj: float = 0.9
    multiply_accumulate_pj: float = 4.6
    mac_layers: tuple[str, ...] = ()  # shell patterns of layers that multiply even if their input is spikes
    repeat_first: bool = False  # count the first layer of a static image at every time step, not once

    def __post_init__(self) -> None:
        for name in ("accumulate_pj", "multiply_accumulate_pj"):
            require(getattr(self, name) >= 0, f"{name}: expected a number >= 0, got {getattr(self, name)}")

    def multiplies(self, layer: str) -> bool:
        """Whether `mac_layers` names a layer."""
        return any(fnmatch(layer, pattern) for pattern in self.mac_layers)

    def assumptions(self, frames: bool = False) -> list[str]:
        """In words, for a reader of the numbers, with formulas between backticks; `frames` of events or images."""
        forced = f" (and {', '.join(self.mac_layers)})" if self.mac_layers else ""
        repeated = "at every time step" if self.repeat_first else "once, because all time steps show the same image"
        static, scaled = f"of a static image, counted {repeated}", "where frames are scaled (n events are n spikes)"
        return [
            f"{self.accumulate_pj:g} pJ per accumulate and {self.multiply_accumulate_pj:g} pJ per multiply-accumulate "
            "(32 bit at 45 nm).",
            "A spike is one accumulate per weight that it meets, exact at the borders; an integer spike n is n spikes.",
            f"Layers whose input is not spikes{forced} multiply-accumulate with every weight, such as the first "
            f"convolution {scaled if frames else static}, or a classifier behind an average.",
            "SSA is counted as `q (k^T v)`. The dendrites of LRF-Dyn take `3k` multiply-accumulates per token, channel "
            "and direction (`2k` for the recurrence, `k` for the read-out; `2k` in all where modes are real), its "
            "stencils 9 each: potentials are not spikes.",
            "A re-parameterised convolution counts as the one 3x3 convolution that it equals.",
            "Not counted: norms and scales (folded into weights and thresholds), neuron updates, pooling, softmax, "
            "moving data.",
        ]


def conv_uses(conv: nn.Conv2d, height: int, width: int) -> Tensor:
    """`[H, W]`: how many outputs of one channel the input at each place reaches."""
    by_numbers = not isinstance(conv.padding, str) and conv.padding_mode == "zeros"
    require(by_numbers, f"model: expected convolutions with zero padding by numbers, got padding={conv.padding!r}")
    image, weight = (torch.ones(1, 1, *size, dtype=torch.float64) for size in ((height, width), conv.kernel_size))
    outputs = torch.func.grad(lambda x: F.conv2d(x, weight, None, conv.stride, conv.padding, conv.dilation).sum())
    return outputs(image)[0, 0]


class SynapticOperations:
    """Counts the operations of every layer in one pass."""

    def __init__(self, energy: EnergyModel | None = None) -> None:
        self.energy = energy or EnergyModel()
        self.kinds: dict[str, str] = {}  # of the layers by name, and sums over all images so far:
        self.accumulates: defaultdict[str, Tensor | float] = defaultdict(float)
        self.dense: defaultdict[str, float] = defaultdict(float)
        self.real: defaultdict[str, Tensor | bool] = defaultdict(bool)  # if an input was anything else than spikes
        self.notes: dict[str, None] = {}  # what could not be counted, each line once
        self.first: str | None = None
        self.images = 0

    def watch(self, model: nn.Module) -> list[RemovableHandle]:
        integers = [m for m in model.modules() if isinstance(m, IntegerSpike)]
        self.levels = math.lcm(*(m.levels for m in integers if m.normalize))
        # The classifier behind a neuron that sends the integers themselves takes those.
        self.head_levels = 1 if any(not m.normalize for m in integers) else self.levels
        self.time_steps = getattr(model, "time_steps", 1)
        handles = [model.register_forward_pre_hook(self._begin), *watch_attentions(model, self._attention)]
        counted: set[nn.Module] = set()
        for name, module in model.named_modules():
            if isinstance(module, (nn.Conv2d, nn.Linear, RepConv)) and module not in counted:
                counted.update(module.modules())
                handles.append(module.register_forward_pre_hook(partial(self._layer, name)))
            elif isinstance(module, TokenAttention):
                handles.append(module.q.register_forward_hook(partial(self._token_attention, name)))
        return handles

    def _begin(self, _module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self.static, self.frames, self.batch = args[0].dim() == 4, args[0].dim() == 5, len(args[0])
        self.images += images_in(args[0])

    def _layer(self, name: str, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        x, levels = args[0].detach(), self.levels
        if isinstance(module, RepConv):  # counts as what it equals
            module = nn.Conv2d(module.conv1.in_channels, module.conv2.out_channels, 3, padding=1, device="meta")
        if isinstance(module, nn.Conv2d):
            depth_wise = "depth-wise " if module.groups == module.in_channels > 1 else ""
            kind = f"{'x'.join(map(str, module.kernel_size))} {depth_wise}convolution"
            uses = conv_uses(module, x.shape[-2], x.shape[-1]).to(x.device) * (module.out_channels // module.groups)
        else:
            kind, levels = "linear", self.head_levels
            uses = torch.tensor(float(cast(nn.Linear, module).out_features), device=x.device)
        self.first = self.first or name
        is_first = self.static and self.first == name
        if self.frames and self.first == name:
            levels = 1  # events are counted, and not divided as integer spikes are
        spikes = x.double() * levels
        whole = spikes.round()
        repeated = is_first and self.energy.repeat_first and x.shape[0] == self.batch
        dense = float(x.numel() / uses.numel() * uses.sum()) * (self.time_steps if repeated else 1)
        real = ((spikes - whole).abs() > TOLERANCE).any() | is_first | self.energy.multiplies(name)
        self._add(name, kind, (whole.abs() * uses).sum(), dense, real)  # `uses`: weights that an input meets

    def _add(self, name: str, kind: str, accumulates: Tensor | float, dense: float, real: Tensor | bool) -> None:
        self.kinds[name] = kind
        self.accumulates[name] += accumulates
        self.dense[name] += dense
        self.real[name] |= real

    def _attention(self, name: str, module: Attention, x: Tensor, spikes: Spikes) -> None:
        counted = {key: (value.double() * self.levels).round() for key, value in spikes.items()}
        counts = module.operation_counts(counted, (x.shape[3], x.shape[4]))
        if counts is None:
            self.notes[module.missing("how many operations it takes (operation_counts): its energy is left out")] = None
        for part, (accumulates, macs) in (counts or {}).items():
            forced = self.energy.multiplies(f"{name}.{part}")
            dense = macs or float(accumulates) * forced
            self._add(f"{name}.{part}", "attention", accumulates, dense, bool(macs) or forced)

    def _token_attention(self, name: str, _module: nn.Module, _args: Any, q: Tensor) -> None:
        total = (q.double() * self.levels).sum()  # added up over the channels of a head
        self._add(f"{name}.q sum", "attention", total, float(q.numel()), False)

    def record(self) -> dict[str, Any]:
        """Per image: operations and energy of every layer, in the order in which they run, and their sums."""
        order: list[str] = []
        for name, kind in self.kinds.items():
            # What an attention computes inside is counted behind its last layer, which takes the outcome.
            last = f"{name.rpartition('.')[0]}.proj"
            places = (i for i, one in enumerate(order) if kind == "attention" and one.startswith(last))
            order.insert(next(places, len(order)), name)
        layers: list[dict[str, Any]] = []
        for name in order:
            real = bool(self.real[name])
            accumulates = 0.0 if real else float(self.accumulates[name]) / self.images
            macs = self.dense[name] / self.images if real else 0.0
            picojoule = accumulates * self.energy.accumulate_pj + macs * self.energy.multiply_accumulate_pj
            values = {"accumulates": accumulates, "multiply_accumulates": macs, "energy_pj": picojoule}
            layers.append({"name": name, "kind": self.kinds[name], **values})
        keys = ("accumulates", "multiply_accumulates", "energy_pj")
        totals = {key: math.fsum(layer[key] for layer in layers) for key in keys}
        assumptions = self.energy.assumptions(self.frames)
        return {**totals, "layers": layers, "assumptions": assumptions, "notes": [*self.notes]}


@checked
def energy(model: nn.Module, images: ImageTensors, costs: EnergyModel | None = None) -> dict[str, Any]:
    """Synaptic operations and energy per image of `model` on `images` `[n, C, H, W]` or batches of them: `accumulates`,
    `multiply_accumulates` and `energy_pj` in all and in `layers`, the `assumptions` behind them, and `notes` about what
    could not be counted."""
    return observe(model, images, SynapticOperations(costs))[0]
