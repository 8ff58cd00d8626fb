"""The max pool behind batch norm and neuron, on packed spikes.

A byte holds all time steps of a neuron, and so does every number here: which of the nine neurons of a window is the
first maximum takes four bits per step, kept as four planes, plane b holding bit b of every step. One comparison of
planes then answers for all steps at once which window a neuron gave its spike to.

Backward, the gradient of the unpooled spikes never exists in memory: both kernels gather it from the windows around.
A program takes windows (oi, oj) of one image and in turn the two by two neurons that lie in each: the centre, right of
it (which the next window in the row sees too), below it, and the corner between four windows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lrfdyn.ops.bn_lif.passes_triton import load_norm, load_steps, normalised_gradients, store_gradients


@triton.jit
def pool_kernel(
    packed, out, packed_out, codes, OM, C, H, W, OH, OW, T: tl.constexpr, PLANE: tl.constexpr, BM: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """3x3 max pool, stride 2: pooled spikes, as bits too, and the first maximum of each window."""
    cols = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = cols < C
    start = tl.program_id(0).to(tl.int64) * BM
    at = tl.arange(0, BM)
    row = start + at
    there = row < OM
    oj = (row % OW).to(tl.int32)
    oi = ((row // OW) % OH).to(tl.int32)
    corner = (row // (OW * OH)) * H * W  # first neuron of the image
    taken = tl.zeros((BM, BC), tl.int32)
    code = tl.zeros((BM, BC), tl.int32)
    for k in tl.static_range(9):
        i = 2 * oi + (k // 3 - 1)
        j = 2 * oj + (k % 3 - 1)
        valid = there & (i >= 0) & (i < H) & (j >= 0) & (j < W)
        pointer = packed + (corner + i * W + j)[:, None] * C + cols[None, :]
        bits = tl.load(pointer, mask=valid[:, None] & inside[None, :], other=0).to(tl.int32)
        first = bits & ~taken
        for plane in tl.static_range(4):
            if (k >> plane) & 1:
                code |= first << (plane * PLANE)
        taken |= bits
    # Where no neuron fired, all are equal and the first one inside the grid counts as the maximum: 0, 1, 3 or 4.
    none = ~taken & ((1 << T) - 1)
    code |= tl.where(((oi == 0) != (oj == 0))[:, None], none, 0)
    code |= tl.where(((oi == 0) & (oj != 0))[:, None], none << PLANE, 0)
    code |= tl.where(((oi == 0) & (oj == 0))[:, None], none << (2 * PLANE), 0)
    local = at[:, None] * C + cols[None, :]
    mask = there[:, None] & inside[None, :]
    tl.store(codes + start * C + local, code.to(codes.dtype.element_ty), mask=mask)
    tl.store(packed_out + start * C + local, taken.to(tl.uint8), mask=mask)
    out += start * C
    plane = OM * C
    for t in tl.static_range(T):
        tl.store(out + local, ((taken >> t) & 1).to(tl.float32).to(out.dtype.element_ty), mask=mask)
        out += plane


@triton.jit
def _chosen(code, PLACE: tl.constexpr, PLANE: tl.constexpr):
    """Bit t: whether the maximum at step t is at PLACE of the window."""
    ones: tl.constexpr = (1 << PLANE) - 1
    flip: tl.constexpr = (
        (0 if PLACE & 1 else ones)
        | (0 if PLACE & 2 else ones << PLANE)
        | (0 if PLACE & 4 else ones << (2 * PLANE))
        | (0 if PLACE & 8 else ones << (3 * PLANE))
    )
    same = code ^ flip
    same = same & (same >> PLANE)
    return same & (same >> (2 * PLANE))


@triton.jit
def _add_window(
    grads, grad, codes, oi, oj, there, cols, inside, plane, C, OH, OW, PLACE: tl.constexpr, PLANE: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    """grads, with those of window (oi, oj) added where its maximum is at PLACE."""
    mask = (there & (oi < OH) & (oj < OW))[:, None] & inside[None, :]
    offset = (oi * OW + oj)[:, None] * C + cols[None, :]
    chosen = _chosen(tl.load(codes + offset, mask=mask, other=-1).to(tl.int32), PLACE, PLANE)
    out = ()
    for t in tl.static_range(T):
        value = tl.load(grad + offset, mask=mask, other=0.0).to(tl.float32)
        out = out + (grads[t] + tl.where(((chosen >> t) & 1) == 1, value, 0.0),)
        grad += plane
    return out


@triton.jit
def _unpooled(
    grad, codes, image, oi, oj, there, cols, inside, plane, C, OH, OW, PLACE: tl.constexpr, PLANE: tl.constexpr,
    T: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """T tiles of the gradient of the spikes at place 0..3 of the two by two neurons of each window."""
    grad += image * OH * OW * C
    codes += image * OH * OW * C
    grads = ()
    for _t in tl.static_range(T):
        grads = grads + (tl.zeros((BM, BC), tl.float32),)
    here: tl.constexpr = 4 + PLACE % 2 + 3 * (PLACE // 2)
    grads = _add_window(grads, grad, codes, oi, oj, there, cols, inside, plane, C, OH, OW, here, PLANE, T)
    if PLACE % 2 == 1:
        left: tl.constexpr = 3 if PLACE == 1 else 6
        grads = _add_window(grads, grad, codes, oi, oj + 1, there, cols, inside, plane, C, OH, OW, left, PLANE, T)
    if PLACE >= 2:
        top: tl.constexpr = 1 if PLACE == 2 else 2
        grads = _add_window(grads, grad, codes, oi + 1, oj, there, cols, inside, plane, C, OH, OW, top, PLANE, T)
    if PLACE == 3:
        grads = _add_window(grads, grad, codes, oi + 1, oj + 1, there, cols, inside, plane, C, OH, OW, 0, PLANE, T)
    return grads


@triton.jit
def pooled_sums_kernel(
    x, stats, shift, grad, codes, partial, B, C, H, W, OH, OW, D: tl.constexpr, T: tl.constexpr, PLANE: tl.constexpr,
    REPEATED: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Sums of the gradient and of the gradient times x - mean, over every G-th block of windows."""
    cols = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = cols < C
    norm = load_norm(stats, shift, cols, inside, C)
    first = tl.zeros((BM, BC), tl.float32)
    second = tl.zeros((BM, BC), tl.float32)
    blocks = tl.cdiv(OH * OW, BM)
    for block in range(tl.program_id(0), B * blocks, tl.num_programs(0)):
        image = tl.cast(block // blocks, tl.int64)
        o = (block % blocks) * BM + tl.arange(0, BM)
        there = o < OH * OW
        oi = o // OW
        oj = o % OW
        for place in tl.static_range(4):
            i = 2 * oi + place // 2
            j = 2 * oj + place % 2
            mask = (there & (i < H) & (j < W))[:, None] & inside[None, :]
            local = (i * W + j)[:, None] * C + cols[None, :]
            tiles = load_steps(x + image * H * W * C, local, mask, tl.cast(B, tl.int64) * H * W * C, T, REPEATED)
            grads = _unpooled(
                grad, codes, image, oi, oj, there, cols, inside, tl.cast(B, tl.int64) * OH * OW * C, C, OH, OW, place,
                PLANE, T, BM, BC,
            )  # fmt: skip
            centred, grads = normalised_gradients(tiles, grads, norm, D, T, False, BM, BC)
            for t in tl.static_range(T):
                first += grads[t]
                second += grads[t] * centred[t]
    out = partial + tl.program_id(0) * C + cols
    tl.store(out, tl.sum(first, 0), mask=inside)
    tl.store(out + tl.num_programs(0) * C, tl.sum(second, 0), mask=inside)


@triton.jit
def pooled_backward_kernel(
    x, stats, shift, grad, codes, means, grad_x, B, C, H, W, OH, OW, D: tl.constexpr, T: tl.constexpr,
    PLANE: tl.constexpr, REPEATED: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    cols = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = cols < C
    norm = load_norm(stats, shift, cols, inside, C)
    blocks = tl.cdiv(OH * OW, BM)
    image = tl.cast(tl.program_id(0) // blocks, tl.int64)
    o = (tl.program_id(0) % blocks) * BM + tl.arange(0, BM)
    there = o < OH * OW
    oi = o // OW
    oj = o % OW
    plane = tl.cast(B, tl.int64) * H * W * C
    x += image * H * W * C
    grad_x += image * H * W * C
    for place in tl.static_range(4):
        i = 2 * oi + place // 2
        j = 2 * oj + place % 2
        mask = (there & (i < H) & (j < W))[:, None] & inside[None, :]
        local = (i * W + j)[:, None] * C + cols[None, :]
        tiles = load_steps(x, local, mask, plane, T, REPEATED)
        grads = _unpooled(
            grad, codes, image, oi, oj, there, cols, inside, tl.cast(B, tl.int64) * OH * OW * C, C, OH, OW, place,
            PLANE, T, BM, BC,
        )  # fmt: skip
        centred, grads = normalised_gradients(tiles, grads, norm, D, T, False, BM, BC)
        store_gradients(grad_x, local, mask, centred, grads, stats, means, cols, inside, plane, C, T, REPEATED)
