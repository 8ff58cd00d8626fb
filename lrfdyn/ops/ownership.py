"""Whether a gradient may be overwritten.

Inside a backward pass a gradient belongs to the one operation that it was handed to, unless something else holds it
too: a hook, a caller that asked for the gradient of an intermediate result, the sum it was a part of. Both C++ and
Python count who holds a tensor. What the counts are when nobody else does depends on their versions, so it is measured
once, on a gradient that is known to be free.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor


def _holders(tensor: Any) -> tuple[int, int]:
    # A torch without the first count leaves every gradient as it is.
    return tensor._use_count() if hasattr(tensor, "_use_count") else sys.maxsize, sys.getrefcount(tensor)


def _through(tensor: Tensor) -> tuple[int, int]:
    """From one call deeper, as `exclusive` sees it."""
    return _holders(tensor)


class _Probe(torch.autograd.Function):
    seen: tuple[int, int]

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        _Probe.seen = _through(grads[0])
        return grads[0].clone()


@cache
def _free() -> tuple[int, int]:
    """The counts of a gradient that only its operation holds."""
    with torch.enable_grad():
        x = torch.zeros(2, requires_grad=True)
        _Probe.apply(_Probe.apply(x)).sum().backward()
    return _Probe.seen


_free()  # not for the first time inside a backward pass


def exclusive(gradient: Tensor) -> bool:
    """Whether nobody but the calling backward function, which must pass `grads[i]` itself, holds the memory of this
    gradient."""
    if gradient._base is not None or gradient.untyped_storage().nbytes() != gradient.numel() * gradient.element_size():
        return False
    counts = _holders(gradient)
    return counts[0] < sys.maxsize and all(count <= free for count, free in zip(counts, _free(), strict=True))
