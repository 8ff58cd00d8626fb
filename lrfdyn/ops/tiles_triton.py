"""What kernels share: the tile of a program, tuples of tiles in registers, and spikes out of their bits.

A kernel holds several time steps, tokens or sums in registers as tuples of equal tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def existing_columns(cols, C: tl.constexpr, BC: tl.constexpr):
    """Which of the columns `cols` `[BC]` exist; known to be all when the kernel is compiled if the blocks fit."""
    if C % BC == 0:
        mask = tl.full((BC,), True, tl.int1)
    else:
        mask = cols < C
    return mask


@triton.jit
def block_of_program(n, BLOCK: tl.constexpr):
    """Program i's block of n elements: its first element, the offsets `[BLOCK]` from there, and which of them exist."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = tl.arange(0, BLOCK)
    return start, at, at < n - start


@triton.jit
def tile_of_program(M, C, BM: tl.constexpr, BC: tl.constexpr):
    """Program (i, j)'s tile of a matrix `[M, C]`: its first row, its columns `[BC]` and which of them exist, and for
    `[BM, BC]` elements their offsets from the first row and which of them exist."""
    cols = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = cols < C
    start = tl.program_id(0).to(tl.int64) * BM
    at = tl.arange(0, BM)
    return start, cols, inside, at[:, None] * C + cols[None, :], (at < M - start)[:, None] & inside[None, :]


@triton.jit
def zero_tiles(COUNT: tl.constexpr, BC: tl.constexpr):
    """A tuple of COUNT tiles `[BC]` of zeros in float32."""
    zeros = ()
    for _k in tl.static_range(COUNT):
        zeros = zeros + (tl.zeros((BC,), tl.float32),)
    return zeros


@triton.jit
def spike_source(x, image, size, IMAGES, PACKED: tl.constexpr):
    """Where an image of T * IMAGES images of spikes begins, `size` apart, and its time step: PACKED, all steps of an
    image share their bytes."""
    step = image // IMAGES
    if PACKED:
        image = image % IMAGES
    return x + tl.cast(image, tl.int64) * size, step


@triton.jit
def spike_values(loaded, step, PACKED: tl.constexpr):
    """Loaded spikes in float32; PACKED, those of one time step out of bytes that hold all of them."""
    if PACKED:
        loaded = (loaded.to(tl.int32) >> step) & 1
    return loaded.to(tl.float32)
