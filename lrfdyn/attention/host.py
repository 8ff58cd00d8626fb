"""What an attention takes from the network around it, and the default: what Spikformer gives it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import nn

from lrfdyn.nn.layers import SpikingConv
from lrfdyn.nn.neurons import LIF


@dataclass(frozen=True)
class AttentionHost:
    """The layers that a network gives to the attentions in it.

    `project(c_in, c_out)` makes q, k or v: spikes of a normalised 1x1 convolution. `project_out(c_in, c_out)` makes
    the layer behind the attention. `fire()` makes the neuron on an unnormalised attention output, `neuron()` the
    host's ordinary one. All four are importable functions or partials of them, so that models can be pickled. A spike
    of q, k or v takes `spike_bits`; v is `value_ratio` times as wide as q and k.
    """

    project: Callable[[int, int], nn.Module]
    project_out: Callable[[int, int], nn.Module]
    neuron: Callable[[], nn.Module]
    fire: Callable[[], nn.Module]
    scale: float
    value_ratio: int = 1
    spike_bits: int = 1


def lif_conv(c_in: int, c_out: int, bias: bool = False) -> SpikingConv:
    """A 1x1 convolution, a batch norm and a LIF neuron."""
    return SpikingConv(c_in, c_out, LIF(), bias=bias)


def lif_host(qkv_bias: bool = False) -> AttentionHost:
    """The host of Spikformer, and of an attention that is built without one: layers of `lif_conv`."""
    return AttentionHost(
        project=partial(lif_conv, bias=qkv_bias),
        project_out=partial(lif_conv, bias=True),
        neuron=LIF,
        fire=partial(LIF, threshold=0.5),
        scale=0.125,  # whatever the width of a head, as in the official code
    )
