"""Channels taken apart, with a gradient that is put together without a copy where it already lies side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def _whole(parts: Sequence[Tensor], sizes: Sequence[int], dim: int) -> Tensor | None:
    """The tensor that `parts` are adjacent slices of along `dim`, if they are all of it."""
    first = parts[0]
    shape = list(first.shape)
    shape[dim] = sum(sizes)
    offset = first.storage_offset()
    for part, size in zip(parts, sizes, strict=True):
        same = part.stride() == first.stride() and part.dtype == first.dtype
        if not same or part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
        if part.storage_offset() != offset:
            return None
        offset += size * part.stride(dim)
    if first.stride(dim) != 1 or any(s < shape[dim] for i, s in enumerate(first.stride()) if i != dim % first.dim()):
        return None
    return first.as_strided(shape, first.stride(), first.storage_offset())


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: tuple[int, ...], dim: int) -> tuple[Tensor, ...]:
        ctx.given = (sizes, dim)
        return x.split(sizes, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        sizes, dim = ctx.given
        whole = _whole(grads, sizes, dim)
        return torch.cat(grads, dim) if whole is None else whole, None, None


def split_channels(x: Tensor, sizes: Sequence[int], dim: int) -> tuple[Tensor, ...]:
    """`x.split(sizes, dim)`; operations that leave the gradients of all parts in one tensor save the copy of joining
    them."""
    return _Split.apply(x, tuple(sizes), dim)
