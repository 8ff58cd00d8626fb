"""The definition of the integer operations, on int64 tensors `[T, B, C, H, W]`.

Convolutions of integers are computed in floating point: their sums, all parts of them included, are below the largest
integer to which the format is exact, so that nothing is rounded and no order of adding matters.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import singledispatch

import torch
import torch.nn.functional as F
from torch import Tensor

from lrfdyn.attention.layout import from_heads, from_tokens, to_heads, to_tokens
from lrfdyn.deploy.integer.operations import (
    POOL,
    Add,
    Conv,
    Dendrites,
    Fire,
    Gate,
    Head,
    Levels,
    MaxPool,
    Operation,
    Rescale,
    ScaleAdd,
    Ssa,
    Stencils,
    SumChannels,
    SumTokens,
)
from lrfdyn.nn.layers import fold_time
from lrfdyn.ops.lrf import lrf_reference


@singledispatch
def run(operation: Operation, *inputs: Tensor, time_steps: int) -> Tensor:
    """What an operation gives for its inputs, int64 `[T, B, C, H, W]` (`[1, B, ...]` where all steps are the same)."""
    raise NotImplementedError(type(operation).__name__)


def _per_channel(values: Tensor) -> Tensor:
    return values.long().reshape(-1, 1, 1)


def _exactly(function: Callable[[Tensor], Tensor], x: Tensor, factor: int = 1) -> Tensor:
    """A function of integers `[T * B, C, H, W]` that multiplies by at most `factor` in all, in floating point."""
    largest = factor * int(x.abs().amax())
    assert largest < 2**53
    dtype = torch.float32 if largest < 2**24 else torch.float64
    with torch.backends.nnpack.flags(enabled=False):  # it multiplies transformed numbers, which are no integers
        return fold_time(lambda y: function(y.to(dtype)).long(), x)


@run.register
def _(operation: Conv, x: Tensor, *, time_steps: int) -> Tensor:
    border, pad = operation.border, operation.padding
    if border is not None:  # as zeros around a picture from which that colour is taken
        x, pad = F.pad(x - _per_channel(border), (pad,) * 4) + _per_channel(border), 0
    weight, how = operation.weight, (operation.stride, pad, 1, operation.groups)
    most = int(weight.long().abs().sum((1, 2, 3)).amax())
    return _exactly(lambda y: F.conv2d(y, weight.to(y.dtype), None, *how), x, most) + _per_channel(operation.bias)


@run.register
def _(operation: Stencils, x: Tensor, *, time_steps: int) -> Tensor:
    weight, dilations = operation.weight.long(), operation.dilations
    return fold_time(lambda y: lrf_reference(y, weight, dilations), x) + _per_channel(operation.bias)


@run.register
def _(operation: Fire, x: Tensor, *, time_steps: int) -> Tensor:
    threshold, bits = _per_channel(operation.threshold), operation.fraction_bits(time_steps)
    membrane, spikes = torch.zeros_like(x[0]), []
    for current in x.expand(time_steps, *x.shape[1:]):
        membrane = (membrane >> operation.kept_shift) + (current << bits)
        fired = membrane > threshold if operation.strict else membrane >= threshold
        spikes.append(fired.long())
        membrane = membrane.masked_fill(fired, 0)
    return torch.stack(spikes)


@run.register
def _(operation: Levels, x: Tensor, *, time_steps: int) -> Tensor:
    levels = torch.zeros_like(x)
    for threshold in operation.thresholds.unbind(1):
        levels += x >= _per_channel(threshold)
    return levels


@run.register
def _(operation: MaxPool, x: Tensor, *, time_steps: int) -> Tensor:
    return _exactly(lambda y: F.max_pool2d(y, *POOL), x)


@run.register
def _(operation: Add, x: Tensor, y: Tensor, *, time_steps: int) -> Tensor:
    return x + y


@run.register
def _(operation: ScaleAdd, x: Tensor, y: Tensor, *, time_steps: int) -> Tensor:
    return _per_channel(operation.multiplier) * x + y


@run.register
def _(operation: Rescale, x: Tensor, *, time_steps: int) -> Tensor:
    shift, limit = _per_channel(operation.shift), operation.limit
    return ((x * _per_channel(operation.multiplier) + ((1 << shift) >> 1)) >> shift).clamp(-limit, limit)


@run.register
def _(operation: Ssa, q: Tensor, k: Tensor, v: Tensor, *, time_steps: int) -> Tensor:
    # In float64, whose products are fast; scores and sums are below 2^31.
    queries, keys, values = (to_heads(x.double(), operation.heads) for x in (q, k, v))
    scores = queries @ keys.mT
    mixed = (scores.tril() if operation.causal else scores) @ values
    return from_heads(mixed.long(), like=v)


@run.register
def _(operation: Gate, x: Tensor, y: Tensor, *, time_steps: int) -> Tensor:
    channels = max(x.shape[2], y.shape[2])
    product = x.repeat_interleave(channels // x.shape[2], 2) * y.repeat_interleave(channels // y.shape[2], 2)
    return product if operation.bias is None else product + _per_channel(operation.bias)


@run.register
def _(operation: SumTokens, x: Tensor, *, time_steps: int) -> Tensor:
    return x.sum((3, 4), keepdim=True)


@run.register
def _(operation: SumChannels, x: Tensor, *, time_steps: int) -> Tensor:
    return x.unflatten(2, (operation.groups, -1)).sum(3)


@run.register
def _(operation: Dendrites, x: Tensor, *, time_steps: int) -> Tensor:
    def product(state: Tensor, coefficient: Tensor) -> Tensor:
        return (state * coefficient + 2**14) >> 15

    a, b = operation.coefficient.long().unbind(-1)
    weight, shift, out_shift = operation.weight.long(), operation.shift.long(), operation.out_shift.long()
    tokens = to_tokens(x)
    tokens = tokens.flip(1) if operation.reverse else tokens
    re = im = tokens.new_zeros(len(tokens), *shift.shape)
    somas = []
    for token in tokens.unbind(1):
        entering = token.unsqueeze(-1) << shift
        if operation.real:
            re, im = product(re, a) + entering, product(im, b) + entering
        else:
            re, im = product(re, a) - product(im, b) + entering, product(re, b) + product(im, a)
        read = (weight[..., 0] * re + weight[..., 1] * im).sum(-1)
        somas.append((read + ((1 << out_shift) >> 1)) >> out_shift)
    soma = torch.stack(somas, 1)
    return from_tokens(soma.flip(1) if operation.reverse else soma, like=x)


@run.register
def _(operation: Head, x: Tensor, *, time_steps: int) -> Tensor:
    features = x.sum((0, 3, 4))
    logits = features @ operation.weight.long().T + operation.bias.long()
    return logits.reshape(1, len(logits), -1, 1, 1)
