"""The max pool behind batch norm and neuron, on packed spikes.

A byte holds all time steps of a neuron, and so does every number here: which of the nine neurons of a window is the
first maximum takes four bits per step, kept as four planes, plane b holding bit b of every step. One comparison of
planes then answers for all steps at once which window a neuron gave its spike to.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pool_kernel(
    packed, out, packed_out, codes, OM, C, H, W, OH, OW, T: tl.constexpr, PLANE: tl.constexpr, KEEP: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """3x3 max pool, stride 2: pooled spikes, and with KEEP as bits too and the first maximum of each window."""
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
        if KEEP:
            first = bits & ~taken
            for plane in tl.static_range(4):
                if (k >> plane) & 1:
                    code |= first << (plane * PLANE)
        taken |= bits
    local = at[:, None] * C + cols[None, :]
    mask = there[:, None] & inside[None, :]
    if KEEP:
        # Where no neuron fired, all are equal and the first one inside the grid counts as the maximum: 0, 1, 3 or 4.
        none = ~taken & ((1 << T) - 1)
        code |= tl.where(((oi == 0) != (oj == 0))[:, None], none, 0)
        code |= tl.where(((oi == 0) & (oj != 0))[:, None], none << PLANE, 0)
        code |= tl.where(((oi == 0) & (oj == 0))[:, None], none << (2 * PLANE), 0)
        tl.store(codes + start * C + local, code.to(codes.dtype.element_ty), mask=mask)
        tl.store(packed_out + start * C + local, taken.to(tl.uint8), mask=mask)
    out += start * C
    plane = tl.cast(OM, tl.int64) * C
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
    signed: tl.constexpr = (flip ^ (1 << 31)) - (1 << 31)  # with eight bits to a plane the last reaches the sign
    same = code ^ signed
    same = same & (same >> PLANE)
    return same & (same >> (2 * PLANE))


@triton.jit
def _load_codes(codes, oi, oj, there, cols, inside, C, OH, OW):
    """Offsets, validity and codes of the windows (oi, oj)."""
    mask = (there & (oi < OH) & (oj < OW))[:, None] & inside[None, :]
    offset = (oi * OW + oj)[:, None] * C + cols[None, :]
    return offset, mask, tl.load(codes + offset, mask=mask, other=-1).to(tl.int32)


@triton.jit
def _where_chosen(chosen, value, t: tl.constexpr):
    return tl.where((chosen & (1 << t)) != 0, value, 0.0)


@triton.jit
def unpool_kernel(
    grad, codes, out, C, H, W, OH, OW, plane, out_plane, T: tl.constexpr, PLANE: tl.constexpr, BM: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """The gradient of the unpooled spikes: a neuron takes those of the windows whose maximum it was.

    A program takes windows of one image, and writes the two by two neurons that lie in each window and in none before:
    the centre, right of it (which the next window in the row sees too), below it, and the corner between four windows.
    """
    cols = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = cols < C
    image = tl.program_id(2).to(tl.int64)
    grad += image * OH * OW * C
    codes += image * OH * OW * C
    out += image * H * W * C
    o = tl.program_id(0) * BM + tl.arange(0, BM)
    there = o < OH * OW
    oi = o // OW
    oj = o % OW
    at_a, in_a, a = _load_codes(codes, oi, oj, there, cols, inside, C, OH, OW)
    at_b, in_b, b = _load_codes(codes, oi, oj + 1, there, cols, inside, C, OH, OW)
    at_c, in_c, c = _load_codes(codes, oi + 1, oj, there, cols, inside, C, OH, OW)
    at_d, in_d, d = _load_codes(codes, oi + 1, oj + 1, there, cols, inside, C, OH, OW)
    a4, a5, a7, a8 = _chosen(a, 4, PLANE), _chosen(a, 5, PLANE), _chosen(a, 7, PLANE), _chosen(a, 8, PLANE)
    b3, b6 = _chosen(b, 3, PLANE), _chosen(b, 6, PLANE)
    c1, c2 = _chosen(c, 1, PLANE), _chosen(c, 2, PLANE)
    d0 = _chosen(d, 0, PLANE)
    offset = (2 * oi * W + 2 * oj)[:, None] * C + cols[None, :]
    mask = there[:, None] & inside[None, :]
    mask_right = mask & (2 * oj + 1 < W)[:, None]
    mask_below = mask & (2 * oi + 1 < H)[:, None]
    ty = out.dtype.element_ty
    for t in tl.static_range(T):
        ga = tl.load(grad + at_a, mask=in_a, other=0.0).to(tl.float32)
        gb = tl.load(grad + at_b, mask=in_b, other=0.0).to(tl.float32)
        gc = tl.load(grad + at_c, mask=in_c, other=0.0).to(tl.float32)
        gd = tl.load(grad + at_d, mask=in_d, other=0.0).to(tl.float32)
        tl.store(out + offset, _where_chosen(a4, ga, t).to(ty), mask=mask)
        value = _where_chosen(a5, ga, t) + _where_chosen(b3, gb, t)
        tl.store(out + offset + C, value.to(ty), mask=mask_right)
        value = _where_chosen(a7, ga, t) + _where_chosen(c1, gc, t)
        tl.store(out + offset + W * C, value.to(ty), mask=mask_below)
        value = _where_chosen(a8, ga, t) + _where_chosen(b6, gb, t) + _where_chosen(c2, gc, t)
        value += _where_chosen(d0, gd, t)
        tl.store(out + offset + (W + 1) * C, value.to(ty), mask=mask_right & mask_below)
        grad += plane
        out += out_plane
