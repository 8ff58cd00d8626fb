"""One token at a time, holding k numbers per channel: the O(kd) deployment form, in real arithmetic."""

from __future__ import annotations

import torch
from torch import Tensor

from lrfdyn.ops.dendrite.modes import LARGEST_DECAY


def dendrite_step(u: Tensor, decay: Tensor, frequency: Tensor, weight: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token of `dendrite`: the soma potential `[B, C]` and the next state `[B, C, M, 2]` after the token `u`
    `[B, C]`; `decay` and `frequency` are `[C, M]`, `weight` is `[C, M, 2]` and `state` `[B, C, M, 2]`."""
    modulus = torch.exp(-decay.clamp(max=LARGEST_DECAY))
    cos, sin = modulus * torch.cos(frequency), modulus * torch.sin(frequency)
    re, im = state.unbind(-1)
    re, im = cos * re - sin * im + u.unsqueeze(-1), cos * im + sin * re
    soma = 2 * (weight[..., 0] * re - weight[..., 1] * im).sum(-1)
    return soma, torch.stack((re, im), -1)


def dendrite_steps(
    u: Tensor, decay: Tensor, frequency: Tensor, weight: Tensor, initial_state: Tensor | None, final_state: bool
) -> tuple[Tensor, Tensor | None]:
    """`dendrite_step` over all tokens of `u` `[B, N, C]`."""
    state = u.new_zeros(u.shape[0], *weight.shape) if initial_state is None else initial_state
    soma = []
    for token in u.unbind(1):
        out, state = dendrite_step(token, decay, frequency, weight, state)
        soma.append(out)
    return torch.stack(soma, 1), state if final_state else None
