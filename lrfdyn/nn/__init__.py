"""Neurons, norms and the layers that hosts share."""

from lrfdyn.nn.layers import ConvBN, DropPath, MembraneBlock, MembraneConv, MembraneMLP, SpikingConv, fold_time
from lrfdyn.nn.neurons import IF, LIF, MSLIF, IntegerSpike, Neuron, PaperLIF, SpikingNeuron

__all__ = [
    "IF",
    "LIF",
    "MSLIF",
    "ConvBN",
    "DropPath",
    "IntegerSpike",
    "MembraneBlock",
    "MembraneConv",
    "MembraneMLP",
    "Neuron",
    "PaperLIF",
    "SpikingConv",
    "SpikingNeuron",
    "fold_time",
]
