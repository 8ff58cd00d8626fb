"""Spiking self-attention without softmax: linear, so the order of the two products is free."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lrfdyn.errors import require
from lrfdyn.ops.dispatch import as_operator, require_shape, use_triton
from lrfdyn.ops.machine import machine_of
from lrfdyn.ops.spike_attention.operator import attention_operator
from lrfdyn.ops.spike_attention.reference import Packed, spike_attention_reference

__all__ = ["causal_spike_attention", "spike_attention", "spike_attention_reference"]


def spike_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, packed: Packed | None = None, fork: bool = False
) -> Any:
    """Spiking self-attention `scale * q k^T v`, in the cheaper order of the two products.

    - `q`, `k`: Spikes `[..., N, d]` of N tokens, as a rule `[T * B, heads, N, d]`.
    - `v`: Spikes `[..., N, e]`.
    - `scale`: A factor on the output.
    - `packed`: The same spikes as bytes `[B, heads, N, d]`, bit t for time step t: on a GPU these are kept for the
      backward pass instead of q, k and v.
    - `fork`: Whether `v` is a second output, for whatever else reads it: on a GPU the two gradients of `v` are then
      added without a pass of their own.

    Returns `[..., N, e]`, or that and `v` with `fork`.

    Example:

        >>> q, k, v = (torch.rand(3, 2, 8, 36, 16) < 0.2).float()
        >>> spike_attention(q, k, v, scale=0.25).shape
        torch.Size([2, 8, 36, 16])
    """
    _check(q, k, v)
    if _has_kernel(q, k, v, causal=False):
        return _by_kernel(q, k, v, scale, False, packed, fork)
    n, d, e = q.shape[-2], q.shape[-1], v.shape[-1]
    # q (k^T v) takes 2 N d e products and keeps a d x e matrix; (q k^T) v takes N^2 (d + e) and keeps N x N.
    y = (q @ (k.mT @ v) if 2 * n * d * e <= n * n * (d + e) else (q @ k.mT) @ v) * scale
    return (y, v) if fork else y


def causal_spike_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    chunk: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Causal spiking self-attention, `scale * sum_{j <= n} (q_n k_j) v_j` for every token n: masked scores inside a
    chunk, the d x e state k^T v between chunks.

    - `q`, `k`: Spikes `[..., N, d]`.
    - `v`: Spikes `[..., N, e]`.
    - `scale`: A factor on the output.
    - `chunk`: Tokens whose scores are computed at a time.
    - `initial_state`: k^T v of the tokens before, `[..., d, e]`.
    - `output_final_state`: Whether k^T v of all tokens is wanted.

    Returns `[..., N, e]`, and the last state `[..., d, e]` or None.

    Example:

        >>> q, k, v = (torch.rand(3, 2, 8, 36, 16) < 0.2).float()
        >>> y, state = causal_spike_attention(q, k, v, scale=0.25, output_final_state=True)
        >>> y.shape, state.shape
        (torch.Size([2, 8, 36, 16]), torch.Size([2, 8, 16, 16]))
    """
    _check(q, k, v)
    require(chunk >= 1, f"chunk: expected an integer >= 1, got {chunk}")
    require_shape("initial_state", initial_state, (*q.shape[:-2], q.shape[-1], v.shape[-1]))
    if initial_state is None and not output_final_state and _has_kernel(q, k, v, causal=True):
        return _by_kernel(q, k, v, scale, True), None
    state = initial_state
    out = []
    for qc, kc, vc in zip(q.split(chunk, -2), k.split(chunk, -2), v.split(chunk, -2), strict=True):
        y = (qc @ kc.mT).tril() @ vc
        out.append(y if state is None else y + qc @ state)
        entering = kc.mT @ vc
        state = entering if state is None else state + entering
    return torch.cat(out, -2) * scale, state if output_final_state else None


def _has_kernel(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> bool:
    """The kernel keeps a d x e matrix in registers, in float32 exactly, so wide heads are left to the library. Backward
    two such matrices are in shared memory at once, if they are wide."""
    if q.dim() != 4 or q.dtype != v.dtype or q.dtype != k.dtype:
        return False
    most = 1024 if q.dtype == torch.float32 else 8192 if causal else 16384
    size = q.shape[-1] * v.shape[-1]
    return size <= most and use_triton(q, k, v) and (size <= 8192 or _room_for_wide_heads(q.device))


def _room_for_wide_heads(device: torch.device) -> bool:
    machine = machine_of(device)
    return machine.shared >= 128 * 1024 or machine.lanes == 64  # AMD's matrix units take operands from registers


# A compiler takes the answer and does not look how it is found. This is all that torch.compiler.assume_constant_result
# does, but that one imports the compiler.
_room_for_wide_heads._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _by_kernel(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, packed: Packed | None = None, fork: bool = False
) -> Any:
    if as_operator():  # which may not give back v; whoever compiles adds the two gradients
        y = attention_operator(q, k, v, scale, causal, *(packed or (None, None, None)))
        return (y, v) if fork else y
    from lrfdyn.ops.spike_attention.triton import SpikeAttention

    return SpikeAttention.apply(q, k, v, scale, causal, packed, fork)


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    require(q.dim() >= 2, f"q: expected [..., N, d], got {list(q.shape)}")
    require(q.shape == k.shape, f"k: expected the shape of q {list(q.shape)}, got {list(k.shape)}")
    require(v.shape[:-1] == q.shape[:-1], f"v: expected {[*q.shape[:-1], 'e']}, got {list(v.shape)}")
