"""From dendrites to modes, and the forms of their convolution that run everywhere.

The k dendrites of a channel are coupled in M = k/2 pairs. Coupling of opposite sign makes a pair a damped oscillator:
a decay `alpha` > 0, a frequency `omega` (radians per token) and a complex input-output weight `w`, stored as three real
tensors `[C, M]`, `[C, M]` and `[C, M, 2]`. The kernel is

    kappa[m] = 2 Re sum_j w_j exp(lambda_j m),   lambda = -alpha + i omega,   X = kappa * u.

Coupling of the same sign makes a pair two real modes: decays and weights are `[C, M, 2]`, the frequency is None, and
the sum is over all k of them. Either way a pair has two numbers of state.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from lrfdyn.errors import require
from lrfdyn.ops.dispatch import require_shape

# exp(-LARGEST_DECAY) is zero in every float format; beyond it only inf * 0 could happen.
LARGEST_DECAY = 1e4
CHUNK = 16
Modes = tuple[Tensor, Tensor | None, Tensor]


def split_directions(modes: Modes) -> list[Modes]:
    """The modes of two directions, which have a leading axis for it, one after the other."""
    decay, frequency, weight = modes
    return [(decay[i], None if frequency is None else frequency[i], weight[i]) for i in range(2)]


def mode_numbers(pairs: Tensor, real: bool) -> Tensor:
    """`[..., M, 2]` as the numbers of modes, whatever the strides: M complex ones, or 2M of `real` modes."""
    return pairs.flatten(-2) if real else torch.complex(pairs[..., 0], pairs[..., 1])


def mode_pairs(numbers: Tensor) -> Tensor:
    """The numbers of modes, M complex or 2M real ones, as `[..., M, 2]`."""
    return torch.view_as_real(numbers) if numbers.is_complex() else numbers.unflatten(-1, (-1, 2))


def mode_powers(decay: Tensor, frequency: Tensor | None, exponents: Tensor) -> Tensor:
    """exp(lambda m) for the integer `exponents` m, of modulus at most 1: `[len(m), C, M]`, complex, or of real modes
    `[len(m), C, 2M]`."""
    m = exponents.to(decay.dtype).reshape(-1, 1, 1)
    modulus = torch.exp(-decay.flatten(1).clamp(max=LARGEST_DECAY) * m)
    return modulus if frequency is None else torch.polar(modulus, frequency * m)


def mode_kernel(decay: Tensor, frequency: Tensor | None, weight: Tensor, length: int) -> Tensor:
    """kappa[0..length-1], real `[length, C]`."""
    powers = mode_powers(decay, frequency, torch.arange(length, device=decay.device))
    return 2 * (powers * mode_numbers(weight, frequency is None)).sum(-1).real


def initial_dendrites(
    channels: int, dendrites: int, width: int, sign: int = -1
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`tau`, `coupling`, `gamma`, `readout` of dendrites coupled in pairs, by coupling of opposite sign (-1) or of the
    same (1), on a grid with rows of `width` tokens.

    Time constants of modes are log-spaced from one token to four rows. Opposite sign: a pair has that of its mode, and
    its coupling is the frequency: multiples of one turn per row, spread over modes and channels, so that pairs can
    resonate with the rows above. Same sign: a pair whose modes decay by a > b per token has the leak (a + b) / 2 and
    the coupling (a - b) / 2.
    """
    pairs = dendrites // 2
    modes = pairs if sign < 0 else dendrites
    tau = torch.logspace(0, math.log10(4 * width), modes, dtype=torch.float64)
    coupling = torch.zeros(channels, dendrites - 1, dtype=torch.float64)
    gamma = torch.zeros(channels, pairs, 2, dtype=torch.float64)
    gamma[..., 0] = 1
    # Every mode starts with the same share of the energy of the kernel.
    energy = torch.sqrt((1 - torch.exp(-2 / tau)) / modes).reshape(pairs, -1)
    readout = torch.randn(channels, pairs, 2, dtype=torch.float64) * energy
    if sign < 0:
        turns = (torch.arange(channels).unsqueeze(1) + torch.arange(pairs)) % (width // 2 + 1)
        coupling[:, ::2] = 2 * math.pi / width * turns.double()
    else:
        fast, slow = (1 / tau).reshape(pairs, 2).unbind(-1)
        tau, coupling[:, ::2] = 2 / (fast + slow), (fast - slow) / 2
        a, b = readout.unbind(-1)  # of s_1 - s_2, the faster mode, and s_1 + s_2
        readout = torch.stack((a + b, b - a), -1)
    return tau.repeat_interleave(2).expand(channels, -1), coupling, gamma.flatten(1), readout.flatten(1)


def paired_modes(tau: Tensor, coupling: Tensor, gamma: Tensor, readout: Tensor, sign: int = -1) -> Modes:
    """The modes of dendrites that are coupled in pairs (every second coupling zero, equal tau in a pair).

    Opposite sign: a pair is z = s_1 - i s_2 with dz/dn = (-1/tau + i beta) z + (g_1 - i g_2) u, read out as
    Re (c_1 + i c_2) z. Same sign: it is z = s_1 -+ s_2 with dz/dn = (-1/tau -+ beta) z + (g_1 -+ g_2) u, read out as
    (c_1 -+ c_2) z / 2.
    """
    decay, frequency = 1 / tau[:, ::2], coupling[:, ::2]
    if sign > 0:
        decay = torch.stack((decay + frequency, decay - frequency), -1)
        enters, leaves = (torch.stack((x[:, ::2] - x[:, 1::2], x[:, ::2] + x[:, 1::2]), -1) for x in (gamma, readout))
        return decay, None, leaves * enters * (1 - torch.exp(-decay)) / decay / 4
    eigenvalue = torch.complex(-decay, frequency)
    entry = torch.complex(gamma[:, ::2], -gamma[:, 1::2]) * (torch.exp(eigenvalue) - 1) / eigenvalue
    output = torch.complex(readout[:, ::2], readout[:, 1::2])
    return decay, frequency, torch.view_as_real(output * entry / 2)


def dendrite_fft(
    u: Tensor, modes: Modes, initial_state: Tensor | None, final_state: bool
) -> tuple[Tensor, Tensor | None]:
    """F^-1{F(kappa) F(u)}, padded to 2N: the training form of the paper."""
    decay, frequency, weight = modes
    real, n = frequency is None, u.shape[1]
    powers = mode_powers(decay, frequency, torch.arange(n + 1, device=u.device))
    w = mode_numbers(weight, real)
    spectrum = torch.fft.rfft(2 * (powers[:n] * w).sum(-1).real, 2 * n, dim=0)
    if u.shape[0] == 0:  # of which the library makes no FFT
        soma = torch.zeros_like(u)
    else:
        soma = torch.fft.irfft(torch.fft.rfft(u, 2 * n, dim=1) * spectrum, 2 * n, dim=1)[:, :n]
    state = None if initial_state is None else mode_numbers(initial_state, real)
    if state is not None:
        soma = soma + 2 * torch.einsum("bcm,lcm->blc", w * state, powers[1:]).real
    if not final_state:
        return soma, None
    return soma, mode_pairs(_state_after(u, powers, state))


def _state_after(u: Tensor, powers: Tensor, state: Tensor | None) -> Tensor:
    """The numbers of modes `[B, C, M]` after the tokens `u`, if they were `state` before; None: zero."""
    n = u.shape[1]
    entering = torch.einsum("bsc,scm->bcm", u.to(powers.dtype), powers[:n].flip(0))
    return entering if state is None else entering + powers[n] * state


def _flat(numbers: Tensor) -> Tensor:
    """The numbers of modes, complex or real ones, as real ones along the last axis."""
    return torch.view_as_real(numbers.resolve_conj()).flatten(-2) if numbers.is_complex() else numbers


def dendrite_scan(
    u: Tensor, modes: Modes, initial_state: Tensor | None, final_state: bool, chunk: int = CHUNK
) -> tuple[Tensor, Tensor | None]:
    """In chunks, by one small matrix for each channel: what a chunk makes of its own tokens, what it makes of the state
    before it, and what it adds to the state, which is carried from chunk to chunk."""
    decay, frequency, weight = modes
    (batch, n, channels), real = u.shape, frequency is None
    length = min(chunk, n)
    chunks = -(-n // length)
    powers = mode_powers(decay, frequency, torch.arange(length + 1, device=u.device))
    leaving = 2 * powers * mode_numbers(weight, real)
    padded = F.pad(u, (0, 0, 0, chunks * length - n)) if n % length else u
    rows = padded.movedim(2, 0).flatten(1).contiguous().view(channels, batch * chunks, length)
    lag = torch.arange(length, device=u.device)
    lag = lag - lag.unsqueeze(1)  # [in, out]
    kernel = leaving[:length].sum(-1).real.T
    soma = torch.bmm(rows, kernel[:, lag.clamp(min=0)] * (lag >= 0))
    state = None if initial_state is None else mode_numbers(initial_state, real)
    if chunks > 1 or state is not None:
        added = torch.bmm(rows, _flat(powers[:length].flip(0).transpose(0, 1)))
        steps = mode_numbers(added.view(channels, batch, chunks, weight.shape[1], 2), real).transpose(0, 1).unbind(2)
        states = [torch.zeros_like(steps[0]) if state is None else state]
        for step in steps[:-1]:
            states.append(step + powers[length] * states[-1])
        state = states[-1]
        before = _flat(torch.stack(states, 2).transpose(0, 1)).flatten(1, 2)
        soma = torch.baddbmm(soma, before, _flat(leaving[1:].conj()).permute(1, 2, 0))
    last = _state_after(u[:, (chunks - 1) * length :], powers, state) if final_state else None
    soma = soma.flatten(1).T.contiguous().view(batch, chunks * length, channels)[:, :n]
    return soma, None if last is None else mode_pairs(last)


def dendrite_step(
    u: Tensor, decay: Tensor, frequency: Tensor | None, weight: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of `dendrite`, holding k numbers per channel: the soma potential `[B, C]` and the next state
    `[B, C, M, 2]` after the token `u` `[B, C]`; `decay` and `frequency` are `[C, M]` (of real modes `[C, M, 2]` and
    None), `weight` is `[C, M, 2]` and `state` `[B, C, M, 2]`."""
    require(state.dim() == 4, f"state: expected [B, C, M, 2], got {list(state.shape)}")
    batch, *modes = state.shape[:3]
    require_shape("u", u, (batch, modes[0]))
    require_shape("decay", decay, modes if frequency is not None else (*modes, 2))
    require_shape("frequency", frequency, modes)
    require_shape("weight", weight, (*modes, 2))
    require_shape("state", state, (batch, *modes, 2))
    return _advance(u, decay, frequency, weight, state)


def _advance(
    u: Tensor, decay: Tensor, frequency: Tensor | None, weight: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    modulus = torch.exp(-decay.clamp(max=LARGEST_DECAY))
    if frequency is None:
        state = modulus * state + u[..., None, None]
        return 2 * (weight * state).sum((-2, -1)), state
    cos, sin = modulus * torch.cos(frequency), modulus * torch.sin(frequency)
    re, im = state.unbind(-1)
    re, im = cos * re - sin * im + u.unsqueeze(-1), cos * im + sin * re
    soma = 2 * (weight[..., 0] * re - weight[..., 1] * im).sum(-1)
    return soma, torch.stack((re, im), -1)


def dendrite_steps(
    u: Tensor, modes: Modes, initial_state: Tensor | None, final_state: bool
) -> tuple[Tensor, Tensor | None]:
    """`dendrite_step` over all tokens: O(k d) for each, in real arithmetic."""
    state = u.new_zeros(u.shape[0], *modes[2].shape) if initial_state is None else initial_state
    soma = []
    for token in u.unbind(1):
        out, state = _advance(token, *modes, state)
        soma.append(out)
    return torch.stack(soma, 1), state if final_state else None


Form = Callable[..., tuple[Tensor, Tensor | None]]
FORMS: dict[str, Form] = {"fft": dendrite_fft, "scan": dendrite_scan, "step": dendrite_steps}
