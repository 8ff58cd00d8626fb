"""Bits to spikes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


@triton.jit
def _unpack(packed, out, n, T: tl.constexpr, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = tl.arange(0, BLOCK)
    mask = at < n - start
    bits = tl.load(packed + start + at, mask=mask, other=0).to(tl.int32)
    out += start
    for t in tl.static_range(T):
        tl.store(out + at, ((bits >> t) & 1).to(tl.float32).to(out.dtype.element_ty), mask=mask)
        out += n


def unpack(packed: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """Spikes `[T, B, C, H, W]` of one byte per neuron, `[B, C, H, W]`, both in channels-last memory."""
    rows = packed.permute(0, 2, 3, 1).contiguous()
    out = torch.empty(steps, *rows.shape, dtype=dtype, device=packed.device)
    n = rows.numel()
    _unpack[(triton.cdiv(n, BLOCK),)](rows, out, n, T=steps, BLOCK=BLOCK)
    return out.permute(0, 1, 4, 2, 3)
