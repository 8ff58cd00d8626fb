"""Tokens and heads of a tensor `[T, B, C, H, W]`, in raster order: N = H W tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from lrfdyn.ops.bits import step_bits_of


def to_heads(x: Tensor, heads: int) -> Tensor:
    """`[T, B, C, H, W]` as `[T * B, heads, N, C / heads]`, without a copy where the memory allows."""
    return x.flatten(0, 1).flatten(2).unflatten(1, (heads, -1)).mT


def from_heads(y: Tensor, like: Tensor) -> Tensor:
    """`[T * B, heads, N, e]` as `[T, B, heads * e, H, W]` in channels-last memory."""
    return from_tokens(y.transpose(1, 2).flatten(2), like)


def to_tokens(x: Tensor) -> Tensor:
    """`[T, B, C, H, W]` as `[T * B, N, C]` in raster order."""
    return x.flatten(0, 1).flatten(2).mT


def from_tokens(y: Tensor, like: Tensor) -> Tensor:
    """`[T * B, N, C]` as `[T, B, C, H, W]` with the time, batch and grid of `like`."""
    time, batch, _, height, width = like.shape
    return y.reshape(time, batch, height, width, -1).permute(0, 1, 4, 2, 3)


def in_layout(layout: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor | None]:
    """`x` `[T, B, C, H, W]` in a layout, and the bits that it came with (from the kernels of a GPU) in the same, as one
    time step."""
    bits = step_bits_of(x)
    return layout(x), None if bits is None else layout(bits.unsqueeze(0))


def query_blocks(tokens: int, numbers: int, block: int) -> Iterator[range]:
    """The queries in ranges of about `block` numbers, at `numbers` for each query."""
    size = max(1, block // numbers)
    for start in range(0, tokens, size):
        yield range(start, min(tokens, start + size))
