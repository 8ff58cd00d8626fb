"""The attentions behind one registry: a host takes the kind as an argument."""

from lrfdyn.attention.base import Attention, Operations, StateTerm
from lrfdyn.attention.causal_ssa import CausalSSA
from lrfdyn.attention.host import AttentionHost, lif_host
from lrfdyn.attention.lrf_dyn import LRFDyn
from lrfdyn.attention.lrf_ssa import LRFSSA
from lrfdyn.attention.registry import (
    ATTENTIONS,
    attention_label,
    attention_options,
    create_attention,
    option_takers,
    register_attention,
    unknown_option,
)
from lrfdyn.attention.row_stream import RowStream
from lrfdyn.attention.sdsa import SDSA
from lrfdyn.attention.ssa import SSA
from lrfdyn.attention.vsa import VSA

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
    "RowStream",
    "StateTerm",
    "attention_label",
    "attention_options",
    "create_attention",
    "lif_host",
    "option_takers",
    "register_attention",
    "unknown_option",
]
