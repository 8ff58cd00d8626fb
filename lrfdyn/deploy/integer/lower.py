"""From the modules of a network to integer operations.

A `Signal` is a value of the program and what 1 of it stands for in each channel. Layers are looked up by their exact
class: one that is not known here, or that somebody changed in a class of their own, is refused rather than guessed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from lrfdyn.attention.base import Attention
from lrfdyn.attention.lrf_dyn import LRFDyn
from lrfdyn.attention.ssa import LRFSSA, SDSA, SSA, VSA, CausalSSA, LocalReceptiveFields
from lrfdyn.data.preprocess import Preprocessing
from lrfdyn.deploy.integer import operations as ops
from lrfdyn.deploy.integer.operations import MOST, MOST16, Operation, Value, level_threshold, threshold_for
from lrfdyn.deploy.integer.weights import quantize_dendrites, quantize_rows, quantize_stencils
from lrfdyn.errors import LrfdynError, require
from lrfdyn.models import qkformer, resnet, sdt_v1, sdt_v2, sdt_v3, spikformer
from lrfdyn.models.metaformer import ConvBlock, MetaFormer
from lrfdyn.models.transformer import PlainTransformer, Stem
from lrfdyn.nn.layers import ConvBN, MembraneBlock, MembraneConv, MembraneMLP, SpikingConv
from lrfdyn.nn.neurons import FoldedNorm, fused_dynamics, scale_and_shift
from lrfdyn.ops.lif import Dynamics

INT8 = 127
NARROW = 2.0**-8  # the unit of potentials in 16 bits
HEADROOM = 18  # bits that a bias may have, in the unit of its channel


@dataclass(frozen=True)
class Signal:
    """Value `index` of the program, and the unit of each channel `[C]`, in float64."""

    index: int
    unit: Tensor


class Lowering:
    """A program in the making. `potential_bits` are those behind the point of potentials on shortcuts. The weights of
    the modules are replaced by what the integers stand for."""

    def __init__(self, shape: Sequence[int], time_steps: int, colours: Preprocessing, potential_bits: int) -> None:
        zero = torch.zeros(shape[0], dtype=torch.int64)
        self.time_steps, self.colours, self.potential_unit = time_steps, colours, 2.0**-potential_bits
        self.operations: list[Operation] = []
        self.values = [Value(zero, zero + 255, shape[1], shape[2], timed=False)]
        self.scale = 1.0

    def emit(self, operation: Operation, unit: Tensor) -> Signal:
        self.operations.append(operation)
        self.values.append(operation.infer([self.values[i] for i in operation.inputs], self.time_steps))
        return Signal(len(self.operations), unit)

    def value(self, x: Signal) -> Value:
        return self.values[x.index]

    def pixels(self) -> Signal:
        return Signal(0, 1 / (255 * torch.tensor(self.colours.std, dtype=torch.float64)))

    def conv(self, name: str, x: Signal, conv: Any) -> Signal:
        """A convolution with its norm folded in."""
        plain = type(conv) is nn.Conv2d and conv.padding_mode == "zeros" and not isinstance(conv.padding, str)
        shape = (conv.stride, conv.padding) if plain else ((0, 1), (0, 1))
        square = all(a == b for a, b in shape) and conv.dilation == (1, 1)
        _refuse(plain and square, name, conv, "it is no plain convolution with the same stride and padding both ways")
        if self.value(x).kind == "int":
            x = self.narrow(name, x)
        width = conv.weight.shape[1]
        units = x.unit.unflatten(0, (conv.groups, width)).repeat_interleave(len(conv.weight) // conv.groups, 0)
        weight = conv.weight * units[..., None, None]
        bias = conv.weight.new_zeros(len(weight)) if conv.bias is None else conv.bias.clone()
        border, dark = None, torch.zeros(())
        if x.index == 0:
            mean, std = (torch.tensor(v, dtype=torch.float64) for v in (self.colours.mean, self.colours.std))
            border = (255 * mean).round().to(torch.uint8)
            _refuse(conv.groups == 1, name, conv, "the first convolution has groups")
            bias -= (conv.weight.sum((2, 3)) * (mean / std)).sum(1)
        whole, unit = quantize_rows(weight, INT8, least=bias.abs() * 2.0**-HEADROOM)
        offset = (bias / unit).round()
        conv.weight.copy_(whole * unit.reshape(-1, 1, 1, 1) / units[..., None, None])
        if x.index == 0:
            dark = (conv.weight.sum((2, 3)) * (mean / std)).sum(1)
        conv.bias = nn.Parameter(offset * unit + dark, requires_grad=False)
        made = ops.Conv(
            name, (x.index,), whole.to(torch.int8), offset.int(), conv.stride[0], conv.padding[0], conv.groups, border
        )
        return self.emit(made, unit)

    def fire(self, name: str, x: Signal, neuron: nn.Module) -> Signal:
        """The spikes of a neuron."""
        dynamics = fused_dynamics(neuron)
        if dynamics is None:
            raise _refusal(name, neuron, "its class has no integer form")
        if not isinstance(dynamics, Dynamics):
            units = x.unit.tolist()
            rows = [[level_threshold(d, unit) for d in range(1, dynamics.levels + 1)] for unit in units]
            levels = ops.Levels(name, (x.index,), torch.tensor(rows, dtype=torch.int32))
            return self.emit(levels, torch.full_like(x.unit, dynamics.scale))
        kept = 1.0 if self.time_steps == 1 else dynamics.leak * dynamics.decay
        shift = -math.log2(kept) if kept > 0 else 0.5
        known = shift >= 0 and shift == int(shift) and dynamics.v_reset == 0 and dynamics.gain > 0
        what = "an integer neuron keeps 1, 1/2, 1/4, ... of its membrane and resets to 0"
        _refuse(known, name, neuron, f"{what}; this one keeps {kept:g} and resets to {dynamics.v_reset:g}")
        bits = int(shift) * (self.time_steps - 1)
        level = Fraction(dynamics.threshold) / Fraction(dynamics.gain) * 2**bits
        threshold = [threshold_for(level, unit, dynamics.strict) for unit in x.unit.tolist()]
        made = ops.Fire(name, (x.index,), torch.tensor(threshold, dtype=torch.int32), int(shift), dynamics.strict)
        return self.emit(made, torch.ones_like(x.unit))

    def spare_bits(self, neuron: nn.Module) -> int:
        """How many of 31 bits a neuron's input may take: the others are its fraction and what it keeps."""
        dynamics = fused_dynamics(neuron)
        if not isinstance(dynamics, Dynamics) or self.time_steps == 1:
            return 30
        kept = max(dynamics.leak * dynamics.decay, 2.0**-30)
        grows = math.log2(sum(kept**n for n in range(self.time_steps)))
        return 30 - math.ceil(-math.log2(kept) * (self.time_steps - 1) + grows)

    def rescale(self, name: str, x: Signal, unit: float, limit: int = MOST) -> Signal:
        """`x` in one unit for all channels."""
        ratio = x.unit / unit
        shift = (23 - ratio.log2().floor()).clamp(0, 62)
        multiplier = (ratio * 2**shift).round()
        made = ops.Rescale(name, (x.index,), multiplier.int(), shift.int(), limit)
        return self.emit(made, torch.full_like(x.unit, unit))

    def narrow(self, name: str, x: Signal) -> Signal:
        """Potentials in 16 bits, for a convolution without a neuron before it."""
        value = self.value(x)
        if int(torch.maximum(-value.low, value.high).max()) <= MOST16:
            return x
        return self.rescale(f"{name}.input", x, NARROW, MOST16)

    def add(self, name: str, x: Signal, y: Signal) -> Signal:
        """The sum of spikes, or of potentials in their common unit."""
        if not torch.equal(x.unit, y.unit):
            x, y = (self.to_potential(name, each) for each in (x, y))
        return self.emit(ops.Add(name, (x.index, y.index)), x.unit)

    def to_potential(self, name: str, x: Signal) -> Signal:
        same = bool((x.unit == self.potential_unit).all())
        return x if same else self.rescale(name, x, self.potential_unit)

    def pool(self, name: str, x: Signal) -> Signal:
        return self.emit(ops.MaxPool(name, (x.index,)), x.unit)

    def gate(self, name: str, x: Signal, y: Signal, bias: Tensor | None = None) -> Signal:
        channels = max(len(x.unit), len(y.unit))
        unit, other = (each.unit.repeat_interleave(channels // len(each.unit)) for each in (x, y))
        offset = None if bias is None else (bias / (unit * other)).round().int()
        return self.emit(ops.Gate(name, (x.index, y.index), offset), unit * other)

    def sum_tokens(self, name: str, x: Signal) -> Signal:
        return self.emit(ops.SumTokens(name, (x.index,)), x.unit)

    def head(self, name: str, x: Signal, heads: Sequence[Any]) -> None:
        """The classifier on the mean over tokens and time, or the mean of several."""
        for layer in heads:
            _refuse(type(layer) is nn.Linear, name, layer, "the classifier is no linear layer")
        weight = torch.stack([layer.weight for layer in heads]).mean(0)
        bias = torch.stack([layer.bias for layer in heads]).mean(0)
        value, unit = self.value(x), float(x.unit[0])
        assert torch.equal(x.unit, torch.full_like(x.unit, unit))
        count = value.tokens * (self.time_steps if value.timed else 1)
        largest = (weight.abs() * value.high).sum(1) * count + bias.abs() * count / unit
        step = max(float(weight.abs().max()) / MOST16, float(largest.max()) / (0.99 * MOST), 1e-30)
        self.scale = step * unit / count
        whole, offset = (weight / step).round(), (bias / self.scale).round()
        for layer in heads:
            layer.weight.copy_(whole * step)
            layer.bias.copy_(offset * self.scale)
        self.emit(ops.Head(name, (x.index,), whole.to(torch.int16), offset.int()), x.unit)


Lower = Callable[..., Signal]
LOWERINGS: dict[type[nn.Module], Lower] = {}


def lowers(*kinds: type[nn.Module]) -> Callable[[Lower], Lower]:
    """Registers how modules of exactly these classes are lowered: `(lowering, module, name, x)` to a signal."""

    def register(function: Lower) -> Lower:
        LOWERINGS.update(dict.fromkeys(kinds, function))
        return function

    return register


def lower(b: Lowering, module: nn.Module, name: str, x: Signal) -> Signal:
    """What a module makes of `x`."""
    if type(module) not in LOWERINGS:
        raise _refusal(name, module, "its class has no integer form")
    return LOWERINGS[type(module)](b, module, name, x)


def _refusal(name: str, module: nn.Module, reason: str) -> LrfdynError:
    return LrfdynError(f"model: {name} ({type(module).__name__}) cannot be computed in integers: {reason}")


def _refuse(fits: bool, name: str, module: nn.Module, reason: str) -> None:
    if not fits:
        raise _refusal(name, module, reason)


# Layers


@lowers(nn.Identity)
def _identity(b: Lowering, module: nn.Module, name: str, x: Signal) -> Signal:
    return x


@lowers(nn.Sequential)
def _sequence(b: Lowering, module: Any, name: str, x: Signal) -> Signal:
    for key, layer in module.named_children():
        x = lower(b, layer, f"{name}.{key}", x)
    return x


@lowers(ConvBN, resnet.SEWStem)
def _conv(b: Lowering, module: Any, name: str, x: Signal) -> Signal:
    _refuse(isinstance(module.bn, FoldedNorm), f"{name}.bn", module.bn, "it is no batch norm with running statistics")
    return b.conv(f"{name}.conv", x, module.conv)


@lowers(SpikingConv)
def _spiking_conv(b: Lowering, module: Any, name: str, x: Signal, pool: bool = False) -> Signal:
    spikes = b.fire(f"{name}.neuron", _conv(b, module, name, x), module.neuron)
    return b.pool(f"{name}.pool", spikes) if pool else spikes


@lowers(qkformer.PooledConv)
def _pooled_conv(b: Lowering, module: Any, name: str, x: Signal) -> Signal:
    currents = _conv(b, module, name, x)
    return b.fire(f"{name}.neuron", b.pool(f"{name}.pool", currents) if module.pool else currents, module.neuron)


@lowers(MembraneConv)
def _membrane_conv(b: Lowering, module: Any, name: str, x: Signal) -> Signal:
    return _conv(b, module, name, b.fire(f"{name}.neuron", x, module.neuron))


@lowers(spikformer.MLP, MembraneMLP)
def _mlp(b: Lowering, module: Any, name: str, x: Signal) -> Signal:
    return lower(b, module.fc2, f"{name}.fc2", lower(b, module.fc1, f"{name}.fc1", x))


@lowers(sdt_v1.MLP)
def _sdt_v1_mlp(b: Lowering, module: Any, name: str, x: Signal) -> Signal:
    if not module.inner_shortcut:
        return _mlp(b, module, name, x)
    y = lower(b, module.fc1, f"{name}.fc1", x)
    inner = lower(b, module.fc2, f"{name}.fc2", b.add(f"{name}.inner", x, y))
    return b.add(f"{name}.sum", y, inner)


@lowers(spikformer.Block)
def _block(b: Lowering, module: Any, name: str, x: Signal) -> Signal:
    for part in ("attn", "mlp"):
        x = b.add(f"{name}.{part}.sum", x, lower(b, getattr(module, part), f"{name}.{part}", x))
    return x


@lowers(MembraneBlock)
def _membrane_block(b: Lowering, module: Any, name: str, x: Signal) -> Signal:
    if module.separable is not None:
        x = b.add(f"{name}.separable.sum", x, lower(b, module.separable, f"{name}.separable", x))
    spikes = b.fire(f"{name}.neuron", x, module.neuron)
    x = b.add(f"{name}.attn.sum", x, lower(b, module.attn, f"{name}.attn", spikes))
    return b.add(f"{name}.mlp.sum", x, lower(b, module.mlp, f"{name}.mlp", x))


@lowers(ConvBlock)
def _conv_block(b: Lowering, module: Any, name: str, x: Signal) -> Signal:
    x = b.add(f"{name}.separable.sum", x, lower(b, module.separable, f"{name}.separable", x))
    y = lower(b, module.conv2, f"{name}.conv2", lower(b, module.conv1, f"{name}.conv1", x))
    return b.add(f"{name}.sum", x, y)


@lowers(sdt_v2.SeparableConv)
def _sdt_v2_separable(b: Lowering, module: Any, name: str, x: Signal) -> Signal:
    spikes = b.fire(f"{name}.neuron", lower(b, module.expand, f"{name}.expand", x), module.neuron)
    return lower(b, module.contract, f"{name}.contract", b.conv(f"{name}.depthwise", spikes, module.depthwise))


@lowers(sdt_v3.SeparableConv)
def _sdt_v3_separable(b: Lowering, module: Any, name: str, x: Signal) -> Signal:
    for part in ("expand", "depthwise", "contract"):
        x = lower(b, getattr(module, part), f"{name}.{part}", x)
    return x


@lowers(sdt_v2.RepConvBN)
def _rep_conv(b: Lowering, module: Any, name: str, x: Signal) -> Signal:
    """The chain of linear layers as the one 3x3 convolution that it equals."""
    conv, chain = module.conv, [module.conv.bn1, module.conv.bn2, module.bn]
    for norm in chain:
        _refuse(type(norm) is nn.BatchNorm2d, name, norm, "it is no batch norm with running statistics")
    (first, shift1), (second, shift2), (third, shift3) = map(scale_and_shift, chain)
    inner = conv.conv1.weight.flatten(1) * first.unsqueeze(1)  # [middle, in]
    outer = conv.conv2.weight.flatten(1) * (second * third).unsqueeze(1)  # [out, middle]
    kernel = conv.depthwise.weight.squeeze(1)  # [middle, 3, 3]
    merged = nn.Conv2d(inner.shape[1], len(outer), 3, padding=1, dtype=inner.dtype).requires_grad_(False)
    merged.weight.copy_(torch.einsum("om,mhw,mi->oihw", outer, kernel, inner))
    merged.bias.copy_(outer @ (kernel.sum((1, 2)) * shift1) + shift2 * third + shift3)  # type: ignore[union-attr]
    y = b.conv(f"{name}.conv", x, merged)
    module.conv, module.bn = merged, nn.Identity()
    return y if type(module.neuron) is nn.Identity else b.fire(f"{name}.neuron", y, module.neuron)


@lowers(qkformer.Embedding)
def _embedding(b: Lowering, module: Any, name: str, x: Signal) -> Signal:
    y = lower(b, module.convs, f"{name}.convs", x)
    return b.add(f"{name}.sum", y, lower(b, module.shortcut, f"{name}.shortcut", x))


@lowers(resnet.BasicBlock)
def _basic_block(b: Lowering, module: Any, name: str, x: Signal) -> Signal:
    y = lower(b, module.conv2, f"{name}.conv2", lower(b, module.conv1, f"{name}.conv1", x))
    return b.add(f"{name}.sum", y, lower(b, module.shortcut, f"{name}.shortcut", x))


@lowers(Stem)
def _stem(b: Lowering, module: Any, name: str, x: Signal) -> Signal:
    for i, (stage, pool) in enumerate(zip(module.stages, module.pooling, strict=True)):
        x = lower(b, stage, f"{name}.stages.{i}", x)
        x = b.pool(f"{name}.stages.{i}.pool", x) if pool else x
    return b.add(f"{name}.rpe.sum", x, lower(b, module.rpe, f"{name}.rpe", x))


# Attentions


def _attention(mix: Callable[[Lowering, Any, str, list[Signal]], Signal]) -> Lower:
    """An attention whose spikes are those of its neuron on what `mix` makes of the projections' spikes."""

    def lower_attention(b: Lowering, module: Attention, name: str, x: Signal) -> Signal:
        projected = [lower(b, getattr(module, part), f"{name}.{part}", x) for part in module.projections]
        spikes = mix(b, module, name, projected)
        return lower(b, module.proj, f"{name}.proj", spikes)

    return lower_attention


def _ssa(b: Lowering, module: Any, name: str, projected: list[Signal]) -> Signal:
    q, k, v = projected
    made = ops.Ssa(f"{name}.mix", (q.index, k.index, v.index), module.heads, module.causal)
    unit = module.scale * q.unit[0] * k.unit[0] * v.unit
    mixed = b.emit(made, unit)
    if isinstance(module, LRFSSA) and module.lrf.dilations:
        mixed = _add_stencils(b, module, name, v, mixed)
    return b.fire(f"{name}.fire", mixed, module.fire)


def _add_stencils(b: Lowering, module: LRFSSA, name: str, v: Signal, mixed: Signal) -> Signal:
    """The unit of a channel is that of the other term divided by a whole number, so that the sum is exact."""
    weight, shift = _stencils(module.lrf, name)
    weight, shift = module.lrf_scale * weight, module.lrf_scale * shift
    most = 2.0 ** b.spare_bits(module.fire) / (b.value(mixed).high.clamp(min=1) * 2)
    most = torch.minimum(most, 2.0**HEADROOM * mixed.unit / shift.abs().clamp(min=1e-30))
    whole, divisor = quantize_stencils(weight * (v.unit / mixed.unit).reshape(-1, 1, 1), most)
    unit = mixed.unit / divisor
    offset = (shift / unit).round()
    made = ops.Stencils(f"{name}.lrf", (v.index,), whole.to(torch.int16), offset.int(), module.lrf.dilations)
    local = b.emit(made, unit)
    added = ops.ScaleAdd(f"{name}.sum", (mixed.index, local.index), divisor.int())
    module.lrf.weight.copy_(whole * (unit / v.unit).reshape(-1, 1, 1))
    module.lrf.norm = FoldedNorm(nn.BatchNorm2d(len(unit), dtype=unit.dtype), offset * unit)
    module.lrf_scale = 1.0
    return b.emit(added, unit)


def _stencils(lrf: LocalReceptiveFields, name: str) -> tuple[Tensor, Tensor]:
    """Weights `[D, C, 3, 3]` and what the norm adds, `[C]`."""
    norm: Any = lrf.norm
    known = norm is None or isinstance(norm, FoldedNorm)
    _refuse(known, f"{name}.lrf", lrf, "its norm is no batch norm with running statistics")
    return lrf.weight, lrf.weight.new_zeros(lrf.weight.shape[1]) if norm is None else norm.shift


def _sdsa(b: Lowering, module: Any, name: str, projected: list[Signal]) -> Signal:
    _refuse(not module.host.window_maxima, name, module, "its maxima over windows are no operation here")
    q, k, v = projected
    mixed = b.sum_tokens(f"{name}.mix", b.gate(f"{name}.kv", k, v))
    return b.gate(f"{name}.gate", q, b.fire(f"{name}.fire", mixed, module.fire))


def _lrf_dyn(b: Lowering, module: Any, name: str, projected: list[Signal]) -> Signal:
    _refuse(isinstance(module.norm, FoldedNorm), name, module.norm, "it is no batch norm with running statistics")
    u = projected[0] if module.token == "value" else b.gate(f"{name}.kv", projected[1], projected[2])
    value, spare, shift = b.value(u), b.spare_bits(module.fire), module.norm.shift
    modes = module.dendrites.modes_by_direction(value.width)
    # With many time steps the neuron's fraction leaves fewer bits to the somas; the stencils get 11 at least.
    most = min(MOST16, 2 ** max(spare - 11, 4))
    quantized, unit = quantize_dendrites(modes, u.unit, value.high, value.tokens, most)
    somas = [
        b.emit(ops.Dendrites(f"{name}.dendrites", (u.index,), *tensors, modes[0][1] is None, reverse == 1), unit)
        for reverse, tensors in enumerate(quantized)
    ]
    soma = somas[0] if len(somas) == 1 else b.add(f"{name}.dendrites.sum", *somas)
    weight, own_shift = _stencils(module.lrf, name)
    assert not own_shift.any()
    dilations = module.lrf.dilations or (1,)
    weight = weight.clone() if len(weight) else weight.new_zeros(1, len(unit), 3, 3)
    weight[0, :, 1, 1] += 1  # X itself
    held = b.value(soma)
    reach = torch.maximum(-held.low, held.high).clamp(min=1) * weight.abs().sum((0, 2, 3))
    most_divisor = torch.minimum(2.0**spare / (reach * 2), 2.0 ** (spare - 2) * unit / shift.abs().clamp(min=1e-30))
    whole, divisor = quantize_stencils(weight, most_divisor)
    unit = unit / divisor
    gated = module.token != "value"
    offset = torch.zeros_like(unit) if gated else (shift / unit).round()
    made = ops.Stencils(f"{name}.lrf", (soma.index,), whole.to(torch.int16), offset.int(), dilations)
    mixed = b.emit(made, unit)
    mixed = b.gate(f"{name}.gate", projected[0], mixed, shift) if gated else mixed
    return b.fire(f"{name}.fire", mixed, module.fire)


for kind, mix in ((SSA, _ssa), (LRFSSA, _ssa), (CausalSSA, _ssa), (SDSA, _sdsa), (LRFDyn, _lrf_dyn)):
    LOWERINGS[kind] = _attention(mix)


@lowers(VSA)
def _vsa(b: Lowering, module: Any, name: str, x: Signal) -> Signal:
    raise _refusal(name, module, "its softmax has no exact integer form")


@lowers(qkformer.TokenAttention)
def _token_attention(b: Lowering, module: Any, name: str, x: Signal) -> Signal:
    q, k = (lower(b, getattr(module, part), f"{name}.{part}", x) for part in ("q", "k"))
    made = ops.SumChannels(f"{name}.mix", (q.index,), module.heads)
    gate = b.fire(f"{name}.fire", b.emit(made, q.unit[: module.heads]), module.fire)
    return lower(b, module.proj, f"{name}.proj", b.gate(f"{name}.gate", gate, k))


# Hosts


@lowers(spikformer.Spikformer, sdt_v1.SDTV1)
def _plain_transformer(b: Lowering, model: PlainTransformer, name: str, x: Signal) -> Signal:
    x = lower(b, model.stem, "stem", x)
    for i, block in enumerate(model.blocks):
        x = lower(b, block, f"blocks.{i}", x)
    return x if model.neuron is None else _fire_mean(b, "neuron", x, model.neuron)


@lowers(qkformer.QKFormer)
def _qkformer(b: Lowering, model: Any, name: str, x: Signal) -> Signal:
    return _stages(b, model, lower(b, model.stem, "stem", x))


@lowers(sdt_v2.SDTV2, sdt_v3.SDTV3)
def _metaformer(b: Lowering, model: MetaFormer, name: str, x: Signal) -> Signal:
    return _fire_mean(b, "neuron", _stages(b, model, x), model.neuron)


@lowers(resnet.SEWResNet)
def _sew_resnet(b: Lowering, model: Any, name: str, x: Signal) -> Signal:
    spikes = b.fire("neuron", lower(b, model.stem, "stem", x), model.neuron)
    return _stages(b, model, b.pool("pool", spikes))


@lowers(resnet.MSResNet)
def _ms_resnet(b: Lowering, model: Any, name: str, x: Signal) -> Signal:
    return b.fire("neuron", _stages(b, model, lower(b, model.stem, "stem", x)), model.neuron)


def _stages(b: Lowering, model: Any, x: Signal) -> Signal:
    for i, stage in enumerate(model.stages):
        x = lower(b, stage, f"stages.{i}", x)
    return x


def _fire_mean(b: Lowering, name: str, x: Signal, neuron: nn.Module) -> Signal:
    """The spikes of the mean over tokens: the unit of a sum is one over their number."""
    total = b.sum_tokens(f"{name}.mean", x)
    return b.fire(name, replace(total, unit=total.unit / b.value(x).tokens), neuron)


def lower_model(model: Any, b: Lowering) -> None:
    """Lowers a folded model in float64 from the pixels to the logits."""
    x = lower(b, model, type(model).__name__, b.pixels())
    second = getattr(model, "distillation_head", None)
    require(model.num_classes > 0, "model: expected a classifier (num_classes is 0)")
    b.head("head", x, [model.head] if second is None else [model.head, second])
