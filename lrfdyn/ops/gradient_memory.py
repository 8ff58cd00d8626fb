"""Whether a gradient may be overwritten.

Inside a backward pass a gradient belongs to the one operation that it was handed to, unless something else holds it
too: a hook, a caller that asked for the gradient of an intermediate result, the sum it was a part of. C++ counts who
holds a tensor and who holds its memory, and Python counts too. What the counts are when nobody else does depends on
their versions, so it is measured once, on a gradient that is known to be free.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor

Counts = tuple[int, int, int]


def _holders(tensor: Any) -> Counts:
    """Of the tensor in C++, of its memory in C++, of the tensor in Python."""
    memory = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return tensor._use_count(), memory, sys.getrefcount(tensor)


def _through(tensor: Tensor) -> Counts:
    """From one call deeper, as `may_overwrite` sees it."""
    return _holders(tensor)


class _Probe(torch.autograd.Function):
    seen: Counts

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        _Probe.seen = _through(grads[0])
        return grads[0].clone()


@cache
def learn_reference_counts() -> Counts | None:
    """The counts of a gradient that only its operation holds; None if this torch does not tell. This must be called
    before the first backward pass, not inside it."""
    if not (hasattr(Tensor, "_use_count") and hasattr(torch._C, "_storage_Use_Count")):
        return None
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.zeros(2, requires_grad=True, device="cpu")
        _Probe.apply(_Probe.apply(x)).sum().backward()
    return _Probe.seen


def may_overwrite(gradient: Tensor) -> bool:
    """Whether nobody but the calling backward function, which must pass `grads[i]` itself, holds the memory of this
    gradient."""
    if gradient._base is not None or gradient.untyped_storage().nbytes() != gradient.numel() * gradient.element_size():
        return False
    free = learn_reference_counts()
    return free is not None and all(count <= most for count, most in zip(_holders(gradient), free, strict=True))
