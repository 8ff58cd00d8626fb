"""The attentions behind one registry: a host takes the kind as an argument."""

from __future__ import annotations

import inspect
from typing import Any

from lrfdyn.attention.base import Attention, AttentionHost, StateTerm
from lrfdyn.attention.causal import CausalSSA
from lrfdyn.attention.lrf_dyn import LRFDyn
from lrfdyn.attention.lrf_ssa import LRFSSA
from lrfdyn.attention.sdsa import SDSA
from lrfdyn.attention.ssa import SSA, VSA
from lrfdyn.errors import LrfdynError, unknown_name

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
    "StateTerm",
    "attention_options",
    "create_attention",
    "option_takers",
    "unknown_option",
]

ATTENTIONS: dict[str, type[Attention]] = {
    "ssa": SSA,
    "causal_ssa": CausalSSA,
    "vsa": VSA,
    "lrf_ssa": LRFSSA,
    "lrf_dyn": LRFDyn,
    "sdsa": SDSA,
}
LABELS = {
    "ssa": "SSA",
    "causal_ssa": "causal SSA",
    "vsa": "VSA",
    "lrf_ssa": "LRF-SSA",
    "lrf_dyn": "LRF-Dyn",
    "sdsa": "SDSA",
}


def attention_options(kind: str) -> dict[str, Any]:
    """The options of a kind beyond what the host gives, with their defaults."""
    if kind not in ATTENTIONS:
        raise unknown_name("attention", kind, ATTENTIONS)
    parameters = inspect.signature(ATTENTIONS[kind]).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


def option_takers(name: str) -> list[str]:
    """The kinds that take an option."""
    return [kind for kind in ATTENTIONS if name in attention_options(kind)]


def unknown_option(kind: str, name: str) -> LrfdynError:
    """An error for an option that a kind does not take; names the kinds that do."""
    takers = option_takers(name)
    if takers:
        return LrfdynError(f"{name}: not an option of attention {kind!r}, but of {', '.join(takers)}")
    return unknown_name(f"option of attention {kind!r}", name, attention_options(kind))


def create_attention(
    kind: str, dim: int, heads: int, grid: tuple[int, int], host: AttentionHost | None = None, **options: Any
) -> Attention:
    """An attention layer for any network: `[T, B, dim, H, W]` in and out, time first, neurons at rest in every call.

    `grid` is the rows and columns of tokens that it is made for; others may still be shown. `host` says what its
    projections and neurons are; without one they are Spikformer's (1x1 convolution, batch norm, LIF). `options` are
    those of the kind (`attention_options(kind)`), such as `dilations`, `dendrites` and `token` of lrf_dyn.
    """
    if host is None:
        from lrfdyn.models.spikformer import attention_host  # a host imports this module

        host = attention_host(qkv_bias=False)
    known = attention_options(kind)
    for name in options:
        if name not in known:
            raise unknown_option(kind, name)
    return ATTENTIONS[kind](dim, heads, grid, host, **options)
