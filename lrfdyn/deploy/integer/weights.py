"""Real weights as integers and the units of their channels."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lrfdyn.deploy.integer.operations import MOST, MOST16, impulse, state_bounds
from lrfdyn.errors import require
from lrfdyn.ops.dendrite.modes import LARGEST_DECAY, Modes

CLIPS = 40  # how many clipping points are tried, from 1 down to 0.6 of the largest weight
STENCIL_BITS = 11
Q15 = 2**15


def quantize_rows(weight: Tensor, most: int, least: Tensor) -> tuple[Tensor, Tensor]:
    """Integers up to `most` and a unit for each row of `weight` `[O, ...]`, with the least squared error over a few
    clipping points. No unit is below `least` `[O]`; that of a row of zeros is 1."""
    rows = weight.flatten(1)
    largest = rows.abs().amax(1, keepdim=True)
    best_error = torch.full_like(largest, math.inf)
    best_unit = torch.ones_like(largest)
    for clip in torch.linspace(1, 0.6, CLIPS).tolist():
        unit = torch.maximum(clip * largest / most, least.unsqueeze(1))
        unit = torch.where(unit > 0, unit, 1.0)
        error = (rows - unit * (rows / unit).round().clamp(-most, most)).square().sum(1, keepdim=True)
        better = error < best_error
        best_error, best_unit = torch.where(better, error, best_error), torch.where(better, unit, best_unit)
    whole = (rows / best_unit).round().clamp(-most, most)
    return whole.reshape(weight.shape), best_unit.squeeze(1)


def quantize_stencils(weight: Tensor, most_divisor: Tensor) -> tuple[Tensor, Tensor]:
    """Integers for stencils `[D, C, 3, 3]`, and the number `[C]`, 1, 2, 4, ..., by which 1 of their input is divided to
    be 1 of their output: as large as the bits of a weight and `most_divisor` allow."""
    largest = weight.abs().amax((0, 2, 3)).clamp(min=1e-30)
    divisor = 2 ** torch.minimum(2**STENCIL_BITS / largest, most_divisor).log2().floor().clamp(0, 14)
    whole = (weight * divisor.reshape(-1, 1, 1)).round()
    require(bool((whole.abs() <= MOST16).all()), "model: stencils of local receptive fields are beyond 16 bits")
    return whole, divisor


def quantize_dendrites(
    modes: Sequence[Modes], units: Tensor, highest: Tensor, tokens: int, most: int, least: Tensor
) -> tuple[list[tuple[Tensor, Tensor, Tensor, Tensor]], Tensor]:
    """Coefficients, shifts, weights and output shifts of `operations.Dendrites` for every direction, and the unit of
    the somas `[C]`, whose sum over the directions is at most about `most`. The input is from 0 to `highest` `[C]` in
    `units` `[C]`. No unit is below `least` `[C]`."""
    prepared, reach = [], torch.zeros_like(units)
    for decay, frequency, weight in modes:
        real = frequency is None
        modulus = torch.exp(-decay.clamp(max=LARGEST_DECAY))
        pairs = modulus if frequency is None else torch.view_as_real(torch.polar(modulus, frequency))
        coefficient = (pairs * Q15).round().clamp(1 - Q15, Q15 - 1).long()
        # In the states of a mode an input of 1 is 2^shift: as much as the worst input allows in 16 bits.
        response, errors = state_bounds(coefficient, torch.zeros_like(coefficient[..., 0]), highest, tokens, real)
        room = ((MOST16 - 2 - errors) / (response - errors).clamp(min=1)).amin(-1).clamp(min=1)
        shift = room.log2().floor().clamp(0, 14).long()
        states, errors = state_bounds(coefficient, shift, highest, tokens, real)
        # The soma is twice the real part of the complex product.
        readout = 2 * weight if real else 2 * weight * weight.new_tensor([1.0, -1.0])
        readout = readout * 0.5 ** shift.unsqueeze(-1)
        kernel = (impulse(coefficient, tokens, real) * (readout * 2 ** shift.unsqueeze(-1))).sum((2, 3))
        reach += kernel.abs().sum(0) * highest + (readout.abs() * errors).sum((1, 2))
        prepared.append((coefficient, shift, readout, states))
    unit = torch.maximum(reach / (0.97 * most), least / units)  # of a soma, in inputs
    unit = torch.where(unit > 0, unit, 1.0)
    quantized = []
    for coefficient, shift, readout, states in prepared:
        gain = readout / unit.reshape(-1, 1, 1)
        room = MOST16 / gain.abs().amax((1, 2)).clamp(min=1e-30)
        room = torch.minimum(room, 0.98 * MOST / (gain.abs() * states).sum((1, 2)).clamp(min=1e-30))
        out_shift = room.log2().floor().clamp(0, 29)
        whole = (gain * 2 ** out_shift.reshape(-1, 1, 1)).round()
        tensors = coefficient.to(torch.int16), shift.int(), whole.to(torch.int16), out_shift.int()
        quantized.append(tensors)
    return quantized, unit * units
