"""Bits over time steps back to spikes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lrfdyn.ops.tiles_triton import block_of_program, spike_values

BLOCK = 2048


@triton.jit
def _unpack_steps(packed, out, n, T: tl.constexpr, BLOCK: tl.constexpr):
    start, at, mask = block_of_program(n, BLOCK)
    bits = tl.load(packed + start + at, mask=mask, other=0)
    out += start
    for t in tl.static_range(T):
        tl.store(out + at, spike_values(bits, t, True).to(out.dtype.element_ty), mask=mask)
        out += n


def unpack_steps(packed: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """Spikes `[T, B, C, H, W]` of one byte per neuron, `[B, C, H, W]`, both in channels-last memory."""
    rows = packed.permute(0, 2, 3, 1).contiguous()
    out = torch.empty(steps, *rows.shape, dtype=dtype, device=packed.device)
    n = rows.numel()
    _unpack_steps[(triton.cdiv(n, BLOCK),)](rows, out, n, T=steps, BLOCK=BLOCK)
    return out.permute(0, 1, 4, 2, 3)
