"""From the modules of a network to integer operations.

Layers are looked up by their exact class: one that is not known here, or that somebody changed in a class of their own,
is refused rather than guessed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lrfdyn.attention.base import Attention
from lrfdyn.attention.lrf_dyn import LRFDyn
from lrfdyn.attention.ssa import LRFSSA, SDSA, SSA, VSA, CausalSSA, LocalReceptiveFields
from lrfdyn.deploy.integer import operations as ops
from lrfdyn.deploy.integer.lowering import HEADROOM, LOWERINGS, Lower, Lowering, Signal, lower, lowers, refusal, refuse
from lrfdyn.deploy.integer.operations import MOST16, Value
from lrfdyn.deploy.integer.weights import quantize_dendrites, quantize_stencils
from lrfdyn.errors import require
from lrfdyn.models import qkformer, resnet, sdt_v1, sdt_v2, sdt_v3, spikformer
from lrfdyn.models.metaformer import ConvBlock, MetaFormer
from lrfdyn.models.transformer import PlainTransformer, Stem
from lrfdyn.nn.layers import ConvBN, MembraneBlock, MembraneConv, MembraneMLP, SpikingConv
from lrfdyn.nn.neurons import FoldedNorm, scale_and_shift

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
    refuse(isinstance(module.bn, FoldedNorm), f"{name}.bn", module.bn, "it is no batch norm with running statistics")
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
        refuse(type(norm) is nn.BatchNorm2d, name, norm, "it is no batch norm with running statistics")
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
    weight, shift, dilations = _stencils(module.lrf, name, b.value(v))
    weight, shift = module.lrf_scale * weight, module.lrf_scale * shift
    most = 2.0 ** b.spare_bits(module.fire) / (b.value(mixed).high.clamp(min=1) * 2)
    most = torch.minimum(most, 2.0**HEADROOM * mixed.unit / shift.abs().clamp(min=1e-30))
    whole, divisor = quantize_stencils(weight * (v.unit / mixed.unit).reshape(-1, 1, 1), most)
    unit = mixed.unit / divisor
    offset = (shift / unit).round()
    made = ops.Stencils(f"{name}.lrf", (v.index,), whole.to(torch.int16), offset.int(), dilations)
    local = b.emit(made, unit)
    added = ops.ScaleAdd(f"{name}.sum", (mixed.index, local.index), divisor.int())
    module.lrf.weight.copy_(whole * (unit / v.unit).reshape(-1, 1, 1))
    module.lrf.norm = FoldedNorm(nn.BatchNorm2d(len(unit), dtype=unit.dtype), offset * unit)
    module.lrf_scale = 1.0
    return b.emit(added, unit)


def _stencils(lrf: LocalReceptiveFields, name: str, grid: Value) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """Weights `[D, C, 3, 3]`, without those that only meet pixels outside this grid, what the norm adds, `[C]`, and the
    dilations, of which none reaches farther than it must."""
    norm: Any = lrf.norm
    known = norm is None or isinstance(norm, FoldedNorm)
    refuse(known, f"{name}.lrf", lrf, "its norm is no batch norm with running statistics")
    weight = lrf.weight.clone()
    for stencil, dilation in zip(weight, lrf.dilations, strict=True):
        if dilation >= grid.height:
            stencil[:, ::2] = 0
        if dilation >= grid.width:
            stencil[..., ::2] = 0
    farthest = max(grid.height, grid.width)
    shift = weight.new_zeros(weight.shape[1]) if norm is None else norm.shift
    return weight, shift, tuple(min(dilation, farthest) for dilation in lrf.dilations)


def _sdsa(b: Lowering, module: Any, name: str, projected: list[Signal]) -> Signal:
    refuse(not module.host.window_maxima, name, module, "its maxima over windows are no operation here")
    q, k, v = projected
    mixed = b.sum_tokens(f"{name}.mix", b.gate(f"{name}.kv", k, v))
    return b.gate(f"{name}.gate", q, b.fire(f"{name}.fire", mixed, module.fire))


def _lrf_dyn(b: Lowering, module: Any, name: str, projected: list[Signal]) -> Signal:
    refuse(isinstance(module.norm, FoldedNorm), name, module.norm, "it is no batch norm with running statistics")
    u = projected[0] if module.token == "value" else b.gate(f"{name}.kv", projected[1], projected[2])
    value, spare, shift = b.value(u), b.spare_bits(module.fire), module.norm.shift
    modes = module.dendrites.modes_by_direction(value.width)
    # With many time steps the neuron's fraction leaves fewer bits to the somas; the stencils get 11 at least.
    most = min(MOST16, 2 ** max(spare - 11, 4))
    least = shift.abs() * 2.0 ** (2 - spare)  # where hardly anything but the shift of the norm is left of a channel
    quantized, unit = quantize_dendrites(modes, u.unit, value.high, value.tokens, most, least)
    somas = [
        b.emit(ops.Dendrites(f"{name}.dendrites", (u.index,), *tensors, modes[0][1] is None, reverse == 1), unit)
        for reverse, tensors in enumerate(quantized)
    ]
    soma = somas[0] if len(somas) == 1 else b.add(f"{name}.dendrites.sum", *somas)
    weight, _, dilations = _stencils(module.lrf, name, value)
    if not dilations:
        weight, dilations = weight.new_zeros(1, len(unit), 3, 3), (1,)
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
    raise refusal(name, module, "its softmax has no exact integer form")


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
