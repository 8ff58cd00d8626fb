"""Gradients without copies: those that may be overwritten, and those that lie side by side already.

Inside a backward pass a gradient belongs to the one operation that it was handed to, unless something else holds it
too: a hook, a caller that asked for the gradient of an intermediate result, the sum it was a part of. C++ counts who
holds a tensor and who holds its memory, and Python counts too. What the counts are when nobody else does depends on
their versions, so it is measured once, on a gradient that is known to be free.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from lrfdyn.ops.dispatch import as_operator, transformed

Counts = tuple[int, int, int]


def _holders(tensor: Any) -> Counts:
    """Of the tensor in C++, of its memory in C++, of the tensor in Python."""
    memory = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return tensor._use_count(), memory, sys.getrefcount(tensor)


class _Probe(torch.autograd.Function):
    seen: Counts

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        def look(tensor: Tensor) -> Counts:
            return _holders(tensor)  # from one call deeper, as `may_overwrite` sees it

        _Probe.seen = look(grads[0])
        return grads[0].clone()


@cache
def learn_reference_counts() -> Counts | None:
    """The counts of a gradient that only its operation holds, or None; to be called before the first backward pass."""
    if not (hasattr(Tensor, "_use_count") and hasattr(torch._C, "_storage_Use_Count")):
        return None
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.zeros(2, requires_grad=True, device="cpu")
        _Probe.apply(_Probe.apply(x)).sum().backward()
    return _Probe.seen


def may_overwrite(gradient: Tensor) -> bool:
    """Whether only the calling backward function, which must pass `grads[i]` itself, holds this gradient's memory."""
    if gradient._base is not None or gradient.untyped_storage().nbytes() != gradient.numel() * gradient.element_size():
        return False
    free = learn_reference_counts()
    return free is not None and all(count <= most for count, most in zip(_holders(gradient), free, strict=True))


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: Sequence[int], dim: int) -> tuple[Tensor, ...]:
        ctx.given = (sizes, dim)
        return x.split(sizes, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        sizes, dim = ctx.given
        first, shape = grads[0], list(grads[0].shape)
        shape[dim] = sum(sizes)
        side_by_side = first.stride(dim) == 1 and all(
            (part.stride(), part.dtype, part.storage_offset()) == (first.stride(), first.dtype, offset)
            and part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
            for part, offset in zip(grads, accumulate(sizes[:-1], initial=first.storage_offset()), strict=True)
        )
        if side_by_side and all(s >= shape[dim] for i, s in enumerate(first.stride()) if i != dim % first.dim()):
            return first.as_strided(shape, first.stride(), first.storage_offset()), None, None
        return torch.cat(grads, dim), None, None


def split_channels(x: Tensor, sizes: Sequence[int], dim: int) -> tuple[Tensor, ...]:
    """`x.split(sizes, dim)`; gradients that are side by side in one tensor already are not copied."""
    if as_operator() or transformed():  # where the memory is the compiler's, or gradients have more dimensions
        return x.split(list(sizes), dim)
    return _Split.apply(x, tuple(sizes), dim)
