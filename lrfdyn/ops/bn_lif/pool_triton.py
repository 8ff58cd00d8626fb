"""The max pool behind batch norm and neuron, on packed spikes, or between them, on what the norm gives.

A byte holds the spikes of all time steps of a neuron, and the codes of the windows are like it: which of the nine
neurons of a window is the first maximum takes four bits per step, kept as four planes, plane b holding bit b of every
step. One comparison of planes then answers for all steps at once which window has its maximum in a neuron.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _windows_of_program(OM, C, H, W, OH, OW, BM: tl.constexpr, BC: tl.constexpr):
    """Program (i, j)'s tile of the OM windows and C channels: its columns `[BC]` and which of them exist, its first
    window, which of the windows `[BM]` exist, their places on the grid of windows, the first neuron of their images,
    and for `[BM, BC]` elements their offsets from the first window and which of them exist."""
    cols = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = cols < C
    start = tl.program_id(0).to(tl.int64) * BM
    at = tl.arange(0, BM)
    row = start + at
    there = row < OM
    oj = (row % OW).to(tl.int32)
    oi = ((row // OW) % OH).to(tl.int32)
    corner = (row // (OW * OH)) * H * W
    return cols, inside, start, there, oi, oj, corner, at[:, None] * C + cols[None, :], there[:, None] & inside[None, :]


@triton.jit
def maxima_kernel(
    x, stats, out, codes, OM, C, H, W, OH, OW, plane, T: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    """3x3 max pool, stride 2, of what a norm makes of x: x itself at the first maximum of each window, and if wanted
    which neuron that is. A norm that scales by a negative number turns the order around."""
    PLANE: tl.constexpr = 4 if T <= 4 else 8
    cols, inside, start, there, oi, oj, corner, local, mask = _windows_of_program(OM, C, H, W, OH, OW, BM, BC)
    scale = tl.load(stats + 2 * C + cols, mask=inside, other=0.0)[None, :]
    sign = tl.where(scale > 0, 1.0, tl.where(scale < 0, -1.0, 0.0))
    code = tl.zeros((BM, BC), tl.int32)
    out += start * C
    out_plane = tl.cast(OM, tl.int64) * C
    for t in tl.range(T, num_stages=1):  # unrolled, it takes twice as many registers
        best = tl.full((BM, BC), float("-inf"), tl.float32)
        chosen = tl.zeros((BM, BC), tl.float32)
        place = tl.zeros((BM, BC), tl.int32)
        for k in tl.static_range(9):
            i = 2 * oi + (k // 3 - 1)
            j = 2 * oj + (k % 3 - 1)
            valid = (there & (i >= 0) & (i < H) & (j >= 0) & (j < W))[:, None] & inside[None, :]
            value = tl.load(x + (corner + i * W + j)[:, None] * C + cols[None, :], mask=valid, other=0.0).to(tl.float32)
            signed = value * sign
            larger = valid & ((signed > best) | (signed != signed))  # the library's pool hands on what is no number too
            best = tl.where(larger, signed, best)
            chosen = tl.where(larger, value, chosen)
            place = tl.where(larger, k, place)
        tl.store(out + local, chosen.to(out.dtype.element_ty), mask=mask)
        if codes is not None:
            for bit in tl.static_range(4):
                code |= ((place >> bit) & 1) << (bit * PLANE + t)
        x += plane
        out += out_plane
    if codes is not None:
        tl.store(codes + start * C + local, code.to(codes.dtype.element_ty), mask=mask)


@triton.jit
def pool_kernel(packed, out, pooled, codes, OM, C, H, W, OH, OW, T: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr):
    """3x3 max pool, stride 2: pooled spikes, and if wanted as bits too and the first maximum of each window."""
    PLANE: tl.constexpr = 4 if T <= 4 else 8
    cols, inside, start, there, oi, oj, corner, local, mask = _windows_of_program(OM, C, H, W, OH, OW, BM, BC)
    taken = tl.zeros((BM, BC), tl.int32)
    code = tl.zeros((BM, BC), tl.int32)
    for k in tl.static_range(9):
        i = 2 * oi + (k // 3 - 1)
        j = 2 * oj + (k % 3 - 1)
        valid = there & (i >= 0) & (i < H) & (j >= 0) & (j < W)
        pointer = packed + (corner + i * W + j)[:, None] * C + cols[None, :]
        bits = tl.load(pointer, mask=valid[:, None] & inside[None, :], other=0).to(tl.int32)
        if codes is not None:
            first = bits & ~taken
            for plane in tl.static_range(4):
                if (k >> plane) & 1:
                    code |= first << (plane * PLANE)
        taken |= bits
    if codes is not None:
        # Where no neuron fired, all are equal and the first one inside the grid counts as the maximum: 0, 1, 3 or 4.
        none = ~taken & ((1 << T) - 1)
        code |= tl.where(((oi == 0) != (oj == 0))[:, None], none, 0)
        code |= tl.where(((oi == 0) & (oj != 0))[:, None], none << PLANE, 0)
        code |= tl.where(((oi == 0) & (oj == 0))[:, None], none << (2 * PLANE), 0)
        tl.store(codes + start * C + local, code.to(codes.dtype.element_ty), mask=mask)
        tl.store(pooled + start * C + local, taken.to(tl.uint8), mask=mask)
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
def unpool_kernel(
    grad, codes, out, x, stats, means, C, H, W, OH, OW, plane, out_plane, T: tl.constexpr, BM: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """The gradient of what was pooled: a neuron takes those of the windows whose maximum it was. With `stats`,
    what was pooled came out of a norm, and the gradient of x is theirs less the two means (those of a norm in training
    alone are given), scaled: as in `apply_backward_kernel`.

    A program takes windows of one image, and writes the two by two neurons that lie in each window and in none before:
    the centre, right of it (which the next window in the row sees too), below it, and the corner between four windows.
    """
    PLANE: tl.constexpr = 4 if T <= 4 else 8
    cols = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = cols < C
    image = tl.program_id(2).to(tl.int64)
    grad += image * OH * OW * C
    codes += image * OH * OW * C
    out += image * H * W * C
    if stats is not None:
        scale = tl.load(stats + 2 * C + cols, mask=inside, other=0.0)[None, :]
    if means is not None:
        x += image * H * W * C
        mean = tl.load(stats + cols, mask=inside, other=0.0)[None, :]
        first = tl.load(means + cols, mask=inside, other=0.0)[None, :]
        second = tl.load(means + C + cols, mask=inside, other=0.0)[None, :]
    o = tl.program_id(0) * BM + tl.arange(0, BM)
    oi = o // OW
    oj = o % OW
    windows = ()
    for w in tl.static_range(4):  # this one, the next in the row, the one below, the one below that
        i = oi + w // 2
        j = oj + w % 2
        mask = ((o < OH * OW) & (i < OH) & (j < OW))[:, None] & inside[None, :]
        offset = (i * OW + j)[:, None] * C + cols[None, :]
        windows = windows + ((offset, mask, tl.load(codes + offset, mask=mask, other=-1).to(tl.int32)),)
    offset = (2 * oi * W + 2 * oj)[:, None] * C + cols[None, :]
    for t in tl.static_range(T):
        grads = ()
        for w in tl.static_range(4):
            grads = grads + (tl.load(grad + windows[w][0], mask=windows[w][1], other=0.0).to(tl.float32),)
        for n in tl.static_range(4):  # neurons in the order of the windows
            value = grads[0]
            mask = (o < OH * OW)[:, None] & inside[None, :]
            if n % 2 == 1:
                mask = mask & (2 * oj + 1 < W)[:, None]
            if n // 2 == 1:
                mask = mask & (2 * oi + 1 < H)[:, None]
            for w in tl.static_range(4):
                if w // 2 <= n // 2 and w % 2 <= n % 2:
                    chosen = _chosen(windows[w][2], 4 + 3 * (n // 2 - 2 * (w // 2)) + n % 2 - 2 * (w % 2), PLANE)
                    part = tl.where((chosen & (1 << t)) != 0, grads[w], 0.0)
                    value = part if w == 0 else value + part
            at = offset + (n // 2 * W + n % 2) * C
            if means is not None:
                centred = tl.load(x + at, mask=mask, other=0.0).to(tl.float32) - mean
                value -= first + centred * second
            if stats is not None:
                value *= scale
            tl.store(out + at, value.to(out.dtype.element_ty), mask=mask)
        grad += plane
        out += out_plane
        if means is not None:
            x += out_plane
