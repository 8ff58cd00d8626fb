"""The claims about locality, entropy and receptive fields, next to what was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from docs.pages import table
from lrfdyn.analysis.measure.locality import uniform_over_past

Entries = dict[str, dict[str, Any]]


def by_kind(results: dict[str, Any]) -> Entries:
    """One entry of every kind of attention: that with the default options, which has the shortest label."""
    found: Entries = {}
    for key, entry in sorted(results["attentions"].items(), key=lambda item: len(item[1]["label"])):
        found.setdefault(entry.get("kind") or key, entry)
    usual = [kind for kind in ("vsa", "ssa", "causal_ssa", "lrf_ssa", "lrf_dyn") if kind in found]
    return {kind: found[kind] for kind in dict.fromkeys([*usual, *found])}


def percent(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{100 * value:.{digits}f} %"


def verdict(known: bool, holds: Callable[[], bool], rule: str, lacking: str = "no analysis of a model") -> str:
    if not known:
        return f"Not decided here: {lacking} that the rule needs ({rule})."
    return f"**{'We see it' if holds() else 'We do not see it'}** (rule: {rule})."


def locality(results: dict[str, Any]) -> Iterator[str]:
    kinds = by_kind(results)
    local = {kind: entry["locality"] for kind, entry in kinds.items() if entry.get("locality", {}).get("share")}
    if not local:
        return
    first = next(iter(local.values()))
    rows = [
        [
            kinds[kind]["label"],
            percent(one["short_range_share"]),
            f"{one['mean_distance']:.2f}",
            f"{one['entropy_mean']:.2f}",
            percent(one["queries_without_weight"]),
        ]
        for kind, one in local.items()
    ]
    rows.append(
        [
            "uniform",
            percent(first["short_range_share_uniform"]),
            f"{first['mean_distance_uniform']:.2f}",
            f"{first['entropy_uniform']:.2f}",
            "",
        ]
    )
    past = uniform_over_past(tuple(first["grid"]), first["short_distance"])
    rows.append(
        [
            "uniform over the query and the tokens before it",
            percent(past["short_range_share"]),
            f"{past['mean_distance']:.2f}",
            f"{past['entropy_mean']:.2f}",
            "",
        ]
    )
    near = f"share at distance <= {first['short_distance']}"
    yield table(["attention", near, "mean distance", "entropy (nats)", "queries without weight"], rows)
    has = local.keys().__contains__
    vsa, ssa, lrf, dyn = (local.get(kind, first) for kind in ("vsa", "ssa", "lrf_ssa", "lrf_dyn"))
    share = "short_range_share"
    yield (
        "- *Softmax attention is local: 76.8 % of a ViT's attention is at short distance.* "
        + verdict(has("vsa") and has("ssa"), lambda: vsa[share] > ssa[share], "VSA has more attention nearby than SSA")
        + (f" VSA has {percent(vsa[share])} nearby." if has("vsa") else "")
    )
    yield "- *SSA is almost uniform.* " + verdict(
        has("ssa"),
        lambda: (
            ssa["entropy_mean"] >= 0.95 * ssa["entropy_uniform"]
            and ssa["mean_distance"] >= 0.95 * ssa["mean_distance_uniform"]
        ),
        "entropy and mean distance of SSA are at least 95 % of the uniform ones",
    )
    yield "- *VSA has lower entropy than SSA.* " + verdict(
        has("vsa") and has("ssa"), lambda: vsa["entropy_mean"] < ssa["entropy_mean"], "mean entropy"
    )
    yield "- *LRF-SSA is more local than SSA and has lower entropy.* " + verdict(
        has("lrf_ssa") and has("ssa"),
        lambda: lrf[share] > ssa[share] and lrf["entropy_mean"] < ssa["entropy_mean"],
        "more attention nearby and lower mean entropy",
    )
    yield from order(local, dyn, ssa)


def order(local: Entries, dyn: dict[str, Any], ssa: dict[str, Any]) -> Iterator[str]:
    """Kinds that run over the tokens in order are near by that alone, except for the last queries."""
    claim, known = "- *LRF-Dyn is more local than SSA.* ", {"lrf_dyn", "ssa"} <= local.keys()
    late = "last_row_short_range_share"
    measured = known and dyn.get(late) is not None and ssa.get(late) is not None
    yield (
        claim
        + verdict(
            measured,
            lambda: dyn["short_range_share"] > ssa["short_range_share"] and dyn[late] > ssa[late],
            "more attention nearby, also of the queries in the last row",
            **({"lacking": "no share of the last row"} if known else {}),
        )
        + " Dendrites run over the tokens in order, and looking back only is near for the first queries whatever the "
        "weights."
        + (
            f" In the last row, where it leaves out next to nothing, LRF-Dyn has {percent(dyn[late])} nearby, SSA "
            f"{percent(ssa[late])} and uniform attention {percent(dyn[late + '_uniform'])}."
            if measured
            else ""
        )
    )


def fields(results: dict[str, Any]) -> Iterator[str]:
    kinds = {kind: entry for kind, entry in by_kind(results).items() if entry.get("receptive_field")}
    pixels = kinds[next(iter(kinds))]["receptive_field"]
    side = pixels["pixels_per_cell"] * len(pixels["map"])
    square = next(s["side"] for s in pixels["share_inside"] if 2 * s["side"] >= side)

    def inside(kind: str) -> float:
        shares = kinds[kind]["receptive_field"]["share_inside"]
        return next(s["share"] for s in shares if s["side"] == square)

    rows = [
        [kinds[kind]["label"], percent(inside(kind)), str(kinds[kind]["receptive_field"]["half_side"])]
        for kind in kinds
    ]
    heads = ["attention", f"gradient inside {square} x {square} of {side} x {side} pixels", "side that holds half"]
    yield table(heads, rows)
    for kind, name in (("lrf_ssa", "LRF-SSA"), ("lrf_dyn", "LRF-Dyn")):
        yield f"- *The receptive field of {name} is more local than that of SSA.* " + verdict(
            kind in kinds and "ssa" in kinds,
            lambda kind=kind: inside(kind) > inside("ssa"),  # type: ignore[misc]
            f"more of the gradient inside {square} x {square} pixels",
        )
    yield from why_fields_differ(kinds, side, square, {kind: inside(kind) for kind in kinds})


def why_fields_differ(kinds: Entries, side: int, square: int, whole: dict[str, float]) -> Iterator[str]:
    """What attention and its stencils do to the field, where it was measured."""
    lrf = kinds.get("lrf_ssa")
    if lrf and lrf.get("options", {}).get("dilations"):
        nearest = min(lrf["options"]["dilations"]) * side // lrf["locality"]["grid"][0]
        if nearest > square // 2:
            yield (
                f"- The taps of the stencils, but for the middle, are {nearest} and more pixels away, outside of "
                "this square."
            )
    cut = {kind: entry["receptive_field"].get("without_attention") or {} for kind, entry in kinds.items()}
    cut = {kind: one for kind, one in cut.items() if one.get("gradient") is not None}
    if len(cut) < 2:
        return
    insides = [next(s["share"] for s in one["share_inside"] if s["side"] == square) for one in cut.values()]
    left = ", ".join(f"{kinds[kind]['label']} {percent(one['gradient'])}" for kind, one in cut.items())
    text = (
        "- Weights are normalised per query and do not show how much passes through attention at all; the field does. "
        f"With the gradient of q, k and v cut, {percent(min(insides))} to {percent(max(insides))} of what is left is "
        f"inside {square} x {square} pixels, in every model. Left of the whole gradient are: {left}."
    )
    if sorted(cut, key=lambda kind: whole[kind]) == sorted(cut, key=lambda kind: cut[kind]["gradient"]):
        text += " So the fields differ as the models do in how much passes through attention: the more, the wider."
    yield text
