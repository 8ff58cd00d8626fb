"""The definition: k dendrites per channel, coupled in a row, run token by token.

    ds/dn = A s + gamma u,   A = -diag(1/tau) + coupling between neighbours, of opposite sign or of the same
    s_n = Abar s_{n-1} + Bbar u_n,   Abar = exp(A),   Bbar = A^-1 (Abar - I) gamma       (zero-order hold)
    X_n = C s_n

With two directions a second set of dendrites runs over the tokens from the last to the first, and X is the sum of both.
Everything else in this folder computes this function another way.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def tridiagonal_matrix(tau: Tensor, coupling: Tensor, sign: int = -1) -> Tensor:
    """A `[C, k, k]` of time constants `tau` `[C, k]` and neighbour couplings `coupling` `[C, k-1]` above the diagonal,
    `sign` times the same below."""
    upper = torch.diag_embed(coupling, offset=1)
    return torch.diag_embed(-1 / tau) + upper + sign * upper.mT


def discretize(a: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
    """Zero-order hold over a step of one token: Abar `[C, k, k]` and Bbar `[C, k]`."""
    a_bar = torch.linalg.matrix_exp(a)
    identity = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    b_bar = torch.linalg.solve(a, (a_bar - identity) @ gamma.unsqueeze(-1)).squeeze(-1)
    return a_bar, b_bar


def dendrite_reference(
    u: Tensor,
    tau: Tensor,
    coupling: Tensor,
    gamma: Tensor,
    readout: Tensor,
    initial_state: Tensor | None = None,
    *,
    sign: int = -1,
) -> tuple[Tensor, Tensor]:
    """Soma potentials `[B, N, C]` of tokens `u` `[B, N, C]`, and the last dendrite state `[B, C, k]`; `sign` is that of
    `tridiagonal_matrix`."""
    a_bar, b_bar = discretize(tridiagonal_matrix(tau, coupling, sign), gamma)
    state = u.new_zeros(u.shape[0], *tau.shape) if initial_state is None else initial_state
    soma = []
    for token in u.unbind(1):
        state = torch.einsum("cij,bcj->bci", a_bar, state) + b_bar * token.unsqueeze(-1)
        soma.append((readout * state).sum(-1))
    return torch.stack(soma, 1), state


def both_directions_reference(u: Tensor, there: Sequence[Tensor], back: Sequence[Tensor], sign: int = -1) -> Tensor:
    """The sum of the potentials of two sets of dendrites (`tau`, `coupling`, `gamma` and `readout` each), the second of
    which meets the last token first."""
    return dendrite_reference(u, *there, sign=sign)[0] + dendrite_reference(u.flip(1), *back, sign=sign)[0].flip(1)
