"""X = F^-1{F(kappa) F(u)}, padded to 2N: the training form of the paper."""

from __future__ import annotations

import torch
from torch import Tensor

from lrfdyn.ops.dendrite.modes import as_complex, mode_kernel, mode_powers


def dendrite_fft(
    u: Tensor, decay: Tensor, frequency: Tensor, weight: Tensor, initial_state: Tensor | None, final_state: bool
) -> tuple[Tensor, Tensor | None]:
    n = u.shape[1]
    kernel = mode_kernel(decay, frequency, weight, n)
    spectrum = torch.fft.rfft(u, 2 * n, dim=1) * torch.fft.rfft(kernel, 2 * n, dim=0)
    soma = torch.fft.irfft(spectrum, 2 * n, dim=1)[:, :n]
    if initial_state is None and not final_state:
        return soma, None
    powers = mode_powers(decay, frequency, torch.arange(n + 1, device=u.device))
    state = torch.einsum("bnc,ncm->bcm", u.to(powers.dtype), powers[:n].flip(0))
    if initial_state is not None:
        before = as_complex(initial_state)
        soma = soma + 2 * torch.einsum("bcm,ncm->bnc", as_complex(weight) * before, powers[1:]).real
        state = state + powers[n] * before
    return soma, torch.view_as_real(state) if final_state else None
