"""The attentions behind one registry: a host takes the kind as an argument."""

from lrfdyn.attention.base import Attention, AttentionHost, Operations, StateTerm, lif_host
from lrfdyn.attention.lrf_dyn import LRFDyn
from lrfdyn.attention.registry import (
    ATTENTIONS,
    attention_label,
    attention_options,
    create_attention,
    register_attention,
)
from lrfdyn.attention.ssa import LRFSSA, SDSA, SSA, VSA, CausalSSA

__all__ = [
    "ATTENTIONS",
    "LRFSSA",
    "SDSA",
    "SSA",
    "VSA",
    "Attention",
    "AttentionHost",
    "CausalSSA",
    "LRFDyn",
    "Operations",
    "StateTerm",
    "attention_label",
    "attention_options",
    "create_attention",
    "lif_host",
    "register_attention",
]
