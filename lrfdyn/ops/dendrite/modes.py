"""From dendrites to modes: diagonalising A turns k coupled dendrites into k/2 damped oscillators.

A mode is a decay `alpha` > 0, a frequency `omega` (radians per token) and a complex input-output weight `w`,
stored as three real tensors `[C, M]`, `[C, M]` and `[C, M, 2]`. The kernel is

    kappa[m] = 2 Re sum_j w_j exp(lambda_j m),   lambda = -alpha + i omega,   X = kappa * u.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lrfdyn.ops.dendrite.reference import discretize, tridiagonal_matrix

# exp(-LARGEST_DECAY) is zero in every float format; beyond it only inf * 0 could happen.
LARGEST_DECAY = 1e4


def as_complex(pairs: Tensor) -> Tensor:
    """`[..., 2]` (real, imaginary) as complex numbers, whatever the strides."""
    return torch.complex(pairs[..., 0], pairs[..., 1])


def mode_powers(decay: Tensor, frequency: Tensor, exponents: Tensor) -> Tensor:
    """exp(lambda m) for the integer `exponents` m: complex `[len(m), C, M]`, of modulus at most 1."""
    m = exponents.to(decay.dtype).reshape(-1, 1, 1)
    return torch.polar(torch.exp(-decay.clamp(max=LARGEST_DECAY) * m), frequency * m)


def mode_kernel(decay: Tensor, frequency: Tensor, weight: Tensor, length: int) -> Tensor:
    """kappa[0..length-1], real `[length, C]`."""
    powers = mode_powers(decay, frequency, torch.arange(length, device=decay.device))
    return 2 * (powers * as_complex(weight)).sum(-1).real


def modes_from_tridiagonal(
    tau: Tensor, coupling: Tensor, gamma: Tensor, readout: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The modes of any tridiagonal A. All k eigenvalues are kept, with half their weight each, so that real
    and complex ones need no separate case."""
    a = tridiagonal_matrix(tau, coupling)
    _, b_bar = discretize(a, gamma)
    eigenvalues, vectors = torch.linalg.eig(a)
    output = (readout.to(vectors.dtype).unsqueeze(-2) @ vectors).squeeze(-2)
    entry = torch.linalg.solve(vectors, b_bar.to(vectors.dtype).unsqueeze(-1)).squeeze(-1)
    return -eigenvalues.real, eigenvalues.imag, torch.view_as_real(output * entry / 2)


def initial_dendrites(channels: int, dendrites: int, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`tau`, `coupling`, `gamma`, `readout` of dendrites coupled in pairs on a grid with rows of `width` tokens.

    Time constants are log-spaced from one token to four rows. The coupling of a pair is its frequency: multiples
    of one turn per row, spread over modes and channels, so that pairs can resonate with the rows above.
    """
    pairs = dendrites // 2
    tau_pair = torch.logspace(0, math.log10(4 * width), pairs, dtype=torch.float64)
    turns = (torch.arange(channels).unsqueeze(1) + torch.arange(pairs)) % (width // 2 + 1)
    coupling = torch.zeros(channels, dendrites - 1, dtype=torch.float64)
    coupling[:, ::2] = 2 * math.pi / width * turns.double()
    gamma = torch.zeros(channels, pairs, 2, dtype=torch.float64)
    gamma[..., 0] = 1
    # Every mode starts with the same share of the energy of the kernel.
    energy = torch.sqrt((1 - torch.exp(-2 / tau_pair)) / pairs)
    readout = torch.randn(channels, pairs, 2, dtype=torch.float64) * energy.unsqueeze(-1)
    return tau_pair.repeat_interleave(2).expand(channels, -1), coupling, gamma.flatten(1), readout.flatten(1)


def paired_modes(tau: Tensor, coupling: Tensor, gamma: Tensor, readout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The k/2 modes of dendrites that are coupled in pairs (every second coupling zero, equal tau in a pair).

    A pair is z = s_1 - i s_2 with dz/dn = (-1/tau + i beta) z + (g_1 - i g_2) u, read out as Re (c_1 + i c_2) z.
    """
    decay, frequency = 1 / tau[:, ::2], coupling[:, ::2]
    eigenvalue = torch.complex(-decay, frequency)
    entry = torch.complex(gamma[:, ::2], -gamma[:, 1::2]) * (torch.exp(eigenvalue) - 1) / eigenvalue
    output = torch.complex(readout[:, ::2], readout[:, 1::2])
    return decay, frequency, torch.view_as_real(output * entry / 2)
