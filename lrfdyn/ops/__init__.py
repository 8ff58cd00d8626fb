"""Pure functions on tensors: every operation has a plain definition and faster forms tested against it."""

from lrfdyn.ops.dendrite import dendrite, dendrite_step
from lrfdyn.ops.lif import Dynamics, integer_spike, lif
from lrfdyn.ops.lrf import lrf
from lrfdyn.ops.spike_attention import causal_spike_attention, spike_attention

__all__ = [
    "Dynamics",
    "causal_spike_attention",
    "dendrite",
    "dendrite_step",
    "integer_spike",
    "lif",
    "lrf",
    "spike_attention",
]
