"""Spikes that know their bits over time steps: one byte per neuron, bit t for time step t.

The kernels leave these bytes with the spikes they write, and later kernels keep them for the backward pass instead of
the spikes. A change of the spikes in place makes the bytes stale, and then they are not used. Bits over channels, as
memory at inference is saved with, are in `channel_bits`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version  # inference tensors do not count their changes


def attach_step_bits(spikes: Any, bits: Tensor | None) -> None:
    """Leaves the bytes `bits` `[B, ...]`, if there are any, with the spikes `[T, B, ...]` that they stand for."""
    if bits is not None:
        spikes.packed = (bits, _version(spikes))


def step_bits_of(spikes: Tensor) -> Tensor | None:
    """The bytes `[B, ...]` of `spikes` `[T, B, ...]`, if they came with any and are what they were."""
    bits, version = getattr(spikes, "packed", (None, None))
    return bits if bits is not None and version == _version(spikes) else None
