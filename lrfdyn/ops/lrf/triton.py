"""All dilations in one pass over a channels-last grid.

Forward: every tap is a shifted load of the input, which stays in the first-level cache. Backward: the same shifted
loads of the output's gradient serve both the gradient of the input and those of the weights,

    dX[q] = sum_o r_o G[q - o]        dr_o = sum_q G[q - o] X[q].

Weight gradients leave one partial sum per program, added in a fixed order afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _tap_sum(
    x, weight, row, there, cols, inside, C, acc, other, partial,
    DILATIONS: tl.constexpr, COUNT: tl.constexpr, H: tl.constexpr, W: tl.constexpr, SIGN: tl.constexpr,
    SUMS: tl.constexpr,
):  # fmt: skip
    """acc + the sum over taps of weight * x shifted by SIGN * tap; with SUMS, also the sums of shifted x * other."""
    j = (row % W).to(tl.int32)
    i = ((row // W) % H).to(tl.int32)
    x += row[:, None] * C + cols[None, :]
    for n in tl.static_range(COUNT):
        for k in tl.static_range(9):
            # The centre is one tap for all dilations; taps that no token can reach do nothing.
            if (k != 4 or n == 0) and (k // 3 == 1 or DILATIONS[n] < H) and (k % 3 == 1 or DILATIONS[n] < W):
                down = SIGN * (k // 3 - 1) * DILATIONS[n]
                right = SIGN * (k % 3 - 1) * DILATIONS[n]
                valid = there
                if k // 3 != 1:
                    valid = valid & (i + down >= 0) & (i + down < H)
                if k % 3 != 1:
                    valid = valid & (j + right >= 0) & (j + right < W)
                mask = valid[:, None] & inside[None, :]
                value = tl.load(x + (down * W + right) * C, mask=mask, other=0.0).to(tl.float32)
                tap = tl.load(weight + (9 * n + k) * C + cols, mask=inside, other=0.0)[None, :]
                if k == 4:
                    for m in tl.static_range(1, COUNT):
                        tap += tl.load(weight + (9 * m + 4) * C + cols, mask=inside, other=0.0)[None, :]
                acc += tap * value
                if SUMS:
                    tl.store(partial + (9 * n + k) * C + cols, tl.sum(value * other, 0), mask=inside)
            elif SUMS and k != 4:
                tl.store(partial + (9 * n + k) * C + cols, tl.zeros_like(tl.sum(acc, 0)), mask=inside)
    return acc


@triton.jit
def _lrf_forward(
    x, weight, residual, out, rows, C, DILATIONS: tl.constexpr, COUNT: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    RESIDUAL: tl.constexpr, IDENTITY: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    cols = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = cols < C
    row = tl.program_id(0).to(tl.int64) * BP + tl.arange(0, BP)
    there = row < rows
    local = row[:, None] * C + cols[None, :]
    mask = there[:, None] & inside[None, :]
    acc = tl.zeros((BP, BC), tl.float32)
    if RESIDUAL:
        acc = tl.load(residual + local, mask=mask, other=0.0).to(tl.float32)
    if IDENTITY:
        acc += tl.load(x + local, mask=mask, other=0.0).to(tl.float32)
    acc = _tap_sum(x, weight, row, there, cols, inside, C, acc, acc, weight, DILATIONS, COUNT, H, W, 1, False)
    tl.store(out + local, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _lrf_backward(
    x, weight, grad, grad_x, partial, rows, C, DILATIONS: tl.constexpr, COUNT: tl.constexpr, H: tl.constexpr,
    W: tl.constexpr, IDENTITY: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    cols = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = cols < C
    row = tl.program_id(0).to(tl.int64) * BP + tl.arange(0, BP)
    there = row < rows
    local = row[:, None] * C + cols[None, :]
    mask = there[:, None] & inside[None, :]
    value = tl.load(x + local, mask=mask, other=0.0).to(tl.float32)
    acc = tl.zeros((BP, BC), tl.float32)
    if IDENTITY:
        acc = tl.load(grad + local, mask=mask, other=0.0).to(tl.float32)
    partial += tl.program_id(0).to(tl.int64) * (9 * COUNT) * C
    acc = _tap_sum(grad, weight, row, there, cols, inside, C, acc, value, partial, DILATIONS, COUNT, H, W, -1, True)
    tl.store(grad_x + local, acc.to(grad_x.dtype.element_ty), mask=mask)


def _blocks(channels: int, rows: int, backward: bool) -> tuple[int, int, int]:
    """Tokens and channels per program, and its warps."""
    bc = next((b for b in (64, 32) if channels % b == 0), min(64, triton.next_power_of_2(channels)))
    if backward:
        # One warp: the sums over tokens then stay inside it and need no barrier.
        return 64, min(bc, 32), 1
    return 64, bc, 4


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


class _Lrf(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, dilations: tuple[int, ...], residual: Tensor | None, identity: bool
    ) -> Tensor:
        x = _channels_last(x)
        batch, channels, height, width = x.shape
        rows = batch * height * width
        taps = weight.flatten(2).mT.float().contiguous()
        residual = None if residual is None else _channels_last(residual)
        dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
        out = torch.empty_like(x, dtype=dtype, memory_format=torch.channels_last)
        bp, bc, warps = _blocks(channels, rows, backward=False)
        _lrf_forward[(triton.cdiv(rows, bp), triton.cdiv(channels, bc))](
            x, taps, residual, out, rows, channels, DILATIONS=dilations, COUNT=len(dilations), H=height, W=width,
            RESIDUAL=residual is not None, IDENTITY=identity, BP=bp, BC=bc, num_warps=warps,
        )  # fmt: skip
        ctx.save_for_backward(x, taps)
        ctx.given = (dilations, identity, weight.dtype)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, Tensor | None, None]:
        x, taps = ctx.saved_tensors
        dilations, identity, dtype = ctx.given
        grad = _channels_last(grads[0])
        batch, channels, height, width = x.shape
        rows = batch * height * width
        bp, bc, warps = _blocks(channels, rows, backward=True)
        programs = triton.cdiv(rows, bp)
        partial = taps.new_empty(programs, len(dilations), 9, channels)
        grad_x = torch.empty_like(x)
        _lrf_backward[(programs, triton.cdiv(channels, bc))](
            x, taps, grad, grad_x, partial, rows, channels, DILATIONS=dilations, COUNT=len(dilations), H=height,
            W=width, IDENTITY=identity, BP=bp, BC=bc, num_warps=warps,
        )  # fmt: skip
        partial[:, 1:, 4] = 0  # written once for all dilations
        grad_taps = partial.sum(0)
        grad_taps[1:, 4] = grad_taps[0, 4]
        grad_weight = grad_taps.mT.unflatten(-1, (3, 3)).to(dtype)
        return grad_x, grad_weight, None, grads[0] if ctx.needs_input_grad[3] else None, None


def lrf_triton(
    x: Tensor, weight: Tensor, dilations: Sequence[int], residual: Tensor | None = None, identity: bool = False
) -> Tensor:
    """See `lrf`; with `identity`, `x` itself is added as well."""
    return _Lrf.apply(x, weight, tuple(dilations), residual, identity)
