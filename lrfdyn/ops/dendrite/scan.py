"""The recurrence in chunks: a small causal convolution inside a chunk, the mode state from chunk to chunk."""

from __future__ import annotations

import torch
from torch import Tensor

from lrfdyn.ops.dendrite.modes import as_complex, mode_powers

CHUNK = 32


def dendrite_scan(
    u: Tensor,
    decay: Tensor,
    frequency: Tensor,
    weight: Tensor,
    initial_state: Tensor | None,
    final_state: bool,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor | None]:
    w = as_complex(weight)
    length = min(chunk, u.shape[1])
    powers = mode_powers(decay, frequency, torch.arange(length + 1, device=u.device))
    kernel = 2 * (powers[:length] * w).sum(-1).real
    # Toeplitz matrix of a chunk, [out, in, C]: kappa[out - in] where out >= in.
    lag = torch.arange(length, device=u.device)
    lag = lag.unsqueeze(1) - lag
    toeplitz = kernel[lag.clamp(min=0)] * (lag >= 0).unsqueeze(-1)

    state = None if initial_state is None else as_complex(initial_state)
    soma = []
    chunks = u.split(length, dim=1)
    for i, tokens in enumerate(chunks):
        n = tokens.shape[1]
        out = torch.einsum("bsc,lsc->blc", tokens, toeplitz[:n, :n])
        if state is not None:
            out = out + 2 * torch.einsum("bcm,lcm->blc", w * state, powers[1 : n + 1]).real
        soma.append(out)
        if i == len(chunks) - 1 and not final_state:
            return torch.cat(soma, 1), None
        entering = torch.einsum("bsc,scm->bcm", tokens.to(powers.dtype), powers[:n].flip(0))
        state = entering if state is None else entering + powers[n] * state
    assert state is not None
    return torch.cat(soma, 1), torch.view_as_real(state)
