"""The attentions by name, those of other packages included."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from lrfdyn.attention.base import Attention, AttentionHost, lif_host
from lrfdyn.checks import checked
from lrfdyn.errors import LrfdynError, unknown_name
from lrfdyn.registry import Registry

ATTENTIONS: Registry[type[Attention]] = Registry("attention")
Kind = TypeVar("Kind", bound=type[Attention])


@checked
def register_attention(name: str, *, label: str | None = None) -> Callable[[Kind], Kind]:
    """A class decorator that makes an `Attention` known as `name` wherever an attention is named.

    `label` is what tables and figures call it (default: `name`). The keyword arguments of the class behind `dim`,
    `heads`, `grid` and `host` are the options of the kind.

        @lrfdyn.register_attention("mean", label="Mean")
        class MeanAttention(lrfdyn.attention.Attention):
            projections = ("v",)

            def mix(self, *spikes):
                (v,) = spikes
                return v.mean((3, 4), keepdim=True).expand_as(v)
    """

    def register(kind: Kind) -> Kind:
        ATTENTIONS.add(name, kind)
        kind.kind, kind.label = name, label or name
        return kind

    return register


@checked
def attention_label(kind: str) -> str:
    """What tables and figures call a kind; its name where it is not installed here."""
    return ATTENTIONS[kind].label if kind in ATTENTIONS else kind


@checked
def attention_options(kind: str) -> dict[str, Any]:
    """The options of a kind beyond what the host gives, with their defaults."""
    parameters = inspect.signature(ATTENTIONS[kind]).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


@checked
def option_takers(name: str) -> list[str]:
    """The kinds that take an option."""
    return [kind for kind in ATTENTIONS if name in attention_options(kind)]


@checked
def unknown_option(kind: str, name: str) -> LrfdynError:
    """An error for an option that a kind does not take; it names the kinds that do."""
    takers = option_takers(name)
    if takers:
        return LrfdynError(f"{name}: not an option of attention {kind!r}, but of {', '.join(takers)}")
    return unknown_name(f"option of attention {kind!r}", name, attention_options(kind))


@checked
def create_attention(
    kind: str, dim: int, heads: int, grid: tuple[int, int], host: AttentionHost | None = None, **options: Any
) -> Attention:
    """An attention layer for any network: `[T, B, dim, H, W]` in and out, time first, neurons at rest in every call.

    `grid` is the rows and columns of tokens that it is made for; others may still be shown. `host` says what its
    projections and neurons are; without one they are Spikformer's (1x1 convolution, batch norm, LIF). `options` are
    those of the kind (`attention_options(kind)`), such as `dilations`, `dendrites` and `token` of lrf_dyn.

        layer = lrfdyn.create_attention("lrf_dyn", dim=64, heads=8, grid=(14, 14), dilations=(1, 3))
        y = layer(torch.randn(4, 2, 64, 14, 14))
    """
    for name in sorted(options.keys() - attention_options(kind).keys()):
        raise unknown_option(kind, name)
    return ATTENTIONS[kind](dim, heads, grid, lif_host() if host is None else host, **options)
