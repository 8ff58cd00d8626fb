"""What kernels share: blocks, tuples of equal tiles in registers (time steps, tokens, sums), spikes out of bits."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def existing_columns(cols, C: tl.constexpr, BC: tl.constexpr):
    """Which of the columns `cols` `[BC]` exist; known to be all when the kernel is compiled if the blocks fit."""
    return tl.full((BC,), True, tl.int1) if C % BC == 0 else cols < C


@triton.jit
def block_of_program(n, BLOCK: tl.constexpr):
    """Program i's block of n elements: its first element, the offsets `[BLOCK]` from there, and which of them exist."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = tl.arange(0, BLOCK)
    return start, at, at < n - start


@triton.jit
def load_steps(x, at, mask, plane, T: tl.constexpr, REPEATED: tl.constexpr):
    """T tiles of x in float32, `plane` apart; one tile T times if all steps are the same."""
    tiles = ()
    for t in tl.static_range(T):
        if REPEATED and t > 0:
            tiles = tiles + (tiles[0],)
        else:
            tiles = tiles + (tl.load(x + at, mask=mask, other=0.0).to(tl.float32),)
            x += plane
    return tiles


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
