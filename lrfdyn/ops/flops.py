"""What the operators compute, for `torch.utils.flop_counter`: importing this module registers it.

Two for each multiply-accumulate of what mixes or projects tokens. Norms and neurons count nothing, as everywhere in
that counter. It is not imported with the package, since the counter imports Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from lrfdyn.ops.operators import NAMESPACE

Shape = Sequence[int]
_operators = getattr(torch.ops, NAMESPACE)


@register_flop_formula(_operators.spike_conv)
def spike_conv_flops(x: Shape, packed: Shape | None, weight: Shape, *_: Any, out_shape: Shape, **__: Any) -> int:
    """Every output takes the weights of its channel once."""
    return 2 * prod(out_shape) * prod(weight[1:])


@register_flop_formula(_operators.spike_conv_backward)
def spike_conv_backward_flops(saved: Shape, weight: Shape, grad: Shape, *others: Any, **_: Any) -> int:
    """As much for each gradient that is wanted."""
    return 2 * prod(grad) * prod(weight[1:]) * sum(others[-2:])


@register_flop_formula(_operators.spike_attention)
def spike_attention_flops(q: Shape, k: Shape, v: Shape, *_: Any, **__: Any) -> int:
    """k^T v and q (k^T v)."""
    return 2 * 2 * prod(q) * v[-1]


@register_flop_formula(_operators.spike_attention_backward)
def spike_attention_backward_flops(q: Shape, k: Shape, v: Shape, grad: Shape, *_: Any, **__: Any) -> int:
    """k^T v again, its gradient, and those of q, k and v."""
    return 5 * 2 * prod(grad) * q[-1]


@register_flop_formula(_operators.lrf)
def lrf_flops(x: Shape, weight: Shape, *_: Any, **__: Any) -> int:
    """Nine taps for each dilation."""
    return 2 * 9 * weight[0] * prod(x)


@register_flop_formula(_operators.lrf_backward)
def lrf_backward_flops(x: Shape, weight: Shape, grad: Shape, *_: Any, **__: Any) -> int:
    """The same for each of two gradients."""
    return 2 * lrf_flops(grad, weight)


def _pairs(weight: Shape) -> int:
    """Pairs of modes of a channel, in all directions."""
    return prod(weight[:-3]) * weight[-2]


@register_flop_formula(_operators.dendrite)
def dendrite_flops(u: Shape, decay: Shape, frequency: Shape | None, weight: Shape, *_: Any, **__: Any) -> int:
    """A pair turns and decays with four products, or two of real modes, and is read out with two."""
    return 2 * (4 if frequency is None else 6) * _pairs(weight) * prod(u)


@register_flop_formula(_operators.dendrite_backward)
def dendrite_backward_flops(
    u: Shape, decay: Shape, frequency: Shape | None, weight: Shape, grad: Shape, *_: Any, **__: Any
) -> int:
    """Two recurrences, a read-out of one of them, and the products of the tokens with both."""
    return 2 * (10 if frequency is None else 14) * _pairs(weight) * prod(grad)
