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


def unpack_flat(packed: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """Spikes `[T * B, ...]` of one byte per neuron, `[B, ...]`."""
    packed = packed.contiguous()
    out = torch.empty(steps * packed.shape[0], *packed.shape[1:], dtype=dtype, device=packed.device)
    n = packed.numel()
    _unpack[(triton.cdiv(n, BLOCK),)](packed, out, n, T=steps, BLOCK=BLOCK)
    return out


def unpack(packed: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """The same of `[B, C, H, W]` in channels-last memory."""
    return unpack_flat(packed.permute(0, 2, 3, 1), steps, dtype).permute(0, 3, 1, 2)
