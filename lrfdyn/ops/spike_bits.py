"""Spikes that know their own bits: one byte per neuron, bit t for time step t.

The kernels leave them with the spikes they write, and later kernels keep them for the backward pass instead of the
spikes. A change of the spikes in place makes the bits stale, and then they are not used.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version  # inference tensors do not count their changes


def attach_bits(spikes: Any, bits: Tensor | None) -> None:
    if bits is not None:
        spikes.packed = (bits, _version(spikes))


def bits_of(spikes: Tensor) -> Tensor | None:
    """The bits of `spikes`, if they came with any and are what they were."""
    bits, version = getattr(spikes, "packed", (None, None))
    return bits if bits is not None and version == _version(spikes) else None
