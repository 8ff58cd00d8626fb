"""The definition: the N x N score matrix, written out."""

from __future__ import annotations

from torch import Tensor

# The bits of q, k and v.
Packed = tuple[Tensor, Tensor, Tensor]


def spike_attention_reference(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool = False) -> Tensor:
    """`scale` (q k^T) v over the tokens of `[..., N, d]`; `causal` keeps the scores of tokens j <= n."""
    score = q @ k.mT
    if causal:
        score = score.tril()
    return scale * (score @ v)
