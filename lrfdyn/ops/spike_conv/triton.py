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
        tl.store(out + at, ((bits >> t) & 1).to(out.dtype.element_ty), mask=mask)
        out += n


def unpack(packed: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """Spikes `[T * B, C, H, W]` in channels-last memory of one byte per neuron, `[B, C, H, W]`."""
    batch, channels, height, width = packed.shape
    packed = packed.contiguous(memory_format=torch.channels_last)
    out = torch.empty(steps * batch, height, width, channels, dtype=dtype, device=packed.device)
    n = packed.numel()
    _unpack[(triton.cdiv(n, BLOCK),)](packed, out, n, T=steps, BLOCK=BLOCK)
    return out.permute(0, 3, 1, 2)
