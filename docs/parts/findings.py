"""Parts of findings.md, and its figures: the paper's claims next to what the analyses in results/ measured.

A claim is a row: what the paper says, the rule that decides it here, what was measured, and whether we see it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from docs.parts import ROOT, kib, percent, read, table
from lrfdyn.analysis.measure.locality import uniform_over_past
from lrfdyn.attention import attention_label
from lrfdyn.paper import MEMORY_SAVED, NEAR_IN_VIT

IMAGES = ROOT / "docs" / "images"
SOURCES = {
    "digits": "digits/results.json",
    "cifar100": "analysis/cifar100/results.json",
    "strong": "analysis/cifar100_strong_70/results.json",
    "memory": "analysis/spikformer_8_512/results.json",
}
VIT = "analysis/cifar100_vit/results.json"  # of the runs of benchmarks/vit.yaml
LAYER_MEMORY = "performance/attention_memory_cpu.json"
FIGURES = (
    "attention_distance", "attention_entropy", "receptive_fields", "memory_accuracy", "convergence", "energy",
)  # fmt: skip
MAPS = ("attention_scores", "attention_maps")
# Of every analysis, how the files of its figures begin, and which of them are on the page.
DRAWN = {
    "digits": ("digits", (*FIGURES, *MAPS)),
    "cifar100": ("cifar100_spikformer_4_384", FIGURES),
    "strong": ("cifar100_strong_70", ("attention_distance", *MAPS, "attention_maps_layers", "receptive_fields")),
}
UNKNOWN = "not measured"
NEAR, LATE = "short_range_share", "last_row_short_range_share"
LOCAL = "more attention nearby"
# Claim, rule, two kinds, what is compared, and 1 where the first must have more of it, -1 where less.
COMPARED = (
    ("Softmax attention is local", LOCAL, "vsa", "ssa", NEAR, 1),
    ("VSA has lower entropy than SSA", "mean entropy", "vsa", "ssa", "entropy_mean", -1),
    ("LRF-SSA is more local than SSA", LOCAL, "lrf_ssa", "ssa", NEAR, 1),
    ("LRF-SSA has lower entropy than SSA", "mean entropy", "lrf_ssa", "ssa", "entropy_mean", -1),
    ("LRF-Dyn is more local than SSA", f"{LOCAL}; in the last row too", "lrf_dyn", "ssa", NEAR, 1),
    ("The receptive field of LRF-SSA is more local", "more gradient in the square", "lrf_ssa", "ssa", "field", 1),
    ("The receptive field of LRF-Dyn is more local", "more gradient in the square", "lrf_dyn", "ssa", "field", 1),
)
Entries = dict[str, dict[str, Any]]
Claim = list[str]


def entries(name: str) -> Entries:
    """One entry of every kind of attention: that with the default options, which has the shortest label."""
    found: Entries = {}
    for key, entry in sorted(read(SOURCES[name])["attentions"].items(), key=lambda item: len(item[1]["label"])):
        found.setdefault(entry.get("kind") or key, entry)
    usual = [kind for kind in ("vsa", "ssa", "causal_ssa", "lrf_ssa", "lrf_dyn") if kind in found]
    return {kind: found[kind] for kind in dict.fromkeys([*usual, *found])}


def claim(text: str, rule: str, values: list[float | None], holds: Callable[..., bool], show: Callable) -> Claim:
    """A row of the table of claims; what lacks a value is not decided."""
    if any(value is None for value in values):
        return [text, rule, UNKNOWN, "not decided"]
    pairs = [" and ".join(map(show, values[i : i + 2])) for i in range(0, len(values), 2)]
    return [text, rule, "; ".join(pairs), "**yes**" if holds(*values) else "**no**"]


def source(name: str) -> str:
    return source_of(SOURCES[name])


def source_of(file: str) -> str:
    """The file, and the command that made it as anybody could type it: where the data lies is not part of it."""
    results = read(file)
    command = re.sub(r"(--data-root )\S+", r"\1DATA", results["command"])
    epochs = max((len(run.get("curve") or []) for run in results["runs"]), default=0)
    length = f", {epochs} epochs" if epochs else ", random weights"
    return f"Source: [{file}](../results/{file}){length}, made by\n\n    {command}"


def locality(name: str) -> str:
    return locality_of(entries(name))


def locality_of(found: Entries) -> str:
    kinds = {kind: entry for kind, entry in found.items() if entry.get("locality", {}).get("share")}
    first = next(iter(kinds.values()))["locality"]
    keys = ("short_range_share", "mean_distance", "entropy_mean", "last_row_short_range_share")
    rows = [(entry["label"], entry["locality"]) for entry in kinds.values()]
    uniform = {key: first.get(f"{key.removesuffix('_mean')}_uniform") for key in keys}
    rows.append(("uniform", {**uniform, "entropy_mean": first["entropy_uniform"]}))
    rows.append(("uniform over the past", uniform_over_past(tuple(first["grid"]), first["short_distance"])))
    body = []
    for label, one in rows:
        near, distance, entropy, late = (one.get(key) for key in keys)
        empty = percent(one["queries_without_weight"]) if "queries_without_weight" in one else ""
        body.append([label, percent(near), f"{distance:.2f}", f"{entropy:.2f}", percent(late), empty])
    short = f"distance <= {first['short_distance']}"
    header = ["attention", f"share at {short}", "mean distance", "entropy (nats)", f"last row, share at {short}"]
    return table([*header, "queries without weight"], body)


def field_square(kinds: Entries) -> tuple[int, int]:
    """Pixels a side of the square that is judged, and of the image. The square is the least that contains, with the
    pixels of their tokens, the taps of all stencils that lie on the grid as seen from its centre."""
    pixels = next(iter(kinds.values()))["receptive_field"]
    side = pixels["pixels_per_cell"] * len(pixels["map"])
    needed = side / 2  # without stencils
    for entry in kinds.values():
        rows = entry["locality"]["grid"][0]
        taps = [d for d in entry["options"].get("dilations") or [] if d <= rows // 2]
        needed = max(needed, (2 * max(taps, default=0) + 1) * side / rows)
    return next(s["side"] for s in pixels["share_inside"] if s["side"] >= min(side, needed)), side


def inside(field: dict[str, Any], square: int) -> float:
    return next(s["share"] for s in field["share_inside"] if s["side"] == square)


def fields(name: str) -> str:
    kinds = {kind: entry for kind, entry in entries(name).items() if entry.get("receptive_field")}
    square, side = field_square(kinds)
    sizes = (s["side"] for s in next(iter(kinds.values()))["receptive_field"]["share_inside"])
    smaller = next(size for size in sizes if 2 * size >= side)
    body = []
    for entry in kinds.values():
        field = entry["receptive_field"]
        cut = field.get("without_attention") or {}
        left = (
            [percent(cut["gradient"]), percent(inside(cut, smaller))] if cut.get("gradient") is not None else ["", ""]
        )
        shares = [percent(inside(field, size)) for size in (square, smaller)]
        body.append([entry["label"], *shares, str(field["half_side"]), *left])
    judged = f"gradient inside {square} x {square} of {side} x {side} pixels"
    header = ["attention", judged, f"inside {smaller} x {smaller}", "side that holds half"]
    return table([*header, "gradient that passes around attention", f"of that inside {smaller} x {smaller}"], body)


def accuracy(name: str) -> str:
    body = []
    for entry in entries(name).values():
        seeds = len(entry["accuracy_values"])
        spread = f" ± {100 * entry['accuracy_spread']:.2f}" if seeds > 1 else ""
        energy = entry["energy"]
        own = sum(one["energy_pj"] for one in energy["layers"] if one["kind"] == "attention") / energy["energy_pj"]
        body.append([
            entry["label"], percent(entry["accuracy_mean"], 2) + spread, str(seeds), f"{entry['parameters']:,}",
            kib(entry["state_bytes"]), kib(entry["peak_inference_bytes"]), f"{energy['energy_pj'] / 1e6:,.2f} µJ",
            percent(own),
        ])  # fmt: skip
    header = ["attention", "test accuracy", "seeds", "parameters", "state, derived", "peak, measured"]
    return table([*header, "energy per image", "of that inside attention"], body)


def facts(kinds: Entries) -> Callable[[str, str], float | None]:
    """The measured numbers by kind and key; None where they were not measured."""
    fields = {kind: entry["receptive_field"] for kind, entry in kinds.items() if entry.get("receptive_field")}
    square = field_square(kinds)[0] if fields else 0

    def value(kind: str, key: str) -> float | None:
        if key == "field":
            return inside(fields[kind], square) if kind in fields else None
        return kinds.get(kind, {}).get("locality", {}).get(key)

    return value


def attention_claims(kinds: Entries) -> Iterator[Claim]:
    """Claims on locality, entropy and receptive fields."""
    value = facts(kinds)
    for text, rule, first, second, key, sign in COMPARED:
        values = [value(first, key), value(second, key)]
        show = "{:.2f}".format if key == "entropy_mean" else percent
        if first == "lrf_dyn" and key == NEAR:  # order alone is near, except for the last queries
            values += [value(first, LATE), value(second, LATE)]
        yield claim(
            text, rule, values, lambda *v, s=sign: all(s * (v[i] - v[i + 1]) > 0 for i in range(0, len(v), 2)), show
        )
    keys = ("entropy_mean", "entropy_uniform", "mean_distance", "mean_distance_uniform")
    entropy, most, distance, farthest = (value("ssa", key) for key in keys)
    shares = [None if x is None or y is None else x / y for x, y in ((entropy, most), (distance, farthest))]
    rule = "entropy and mean distance of SSA are at least 95 % of the uniform ones"
    yield claim("SSA is almost uniform", rule, shares, lambda *both: min(both) >= 0.95, percent)


def accuracy_claims(kinds: Entries) -> Iterator[Claim]:
    for kind, label in (("lrf_ssa", "LRF-SSA"), ("lrf_dyn", "LRF-Dyn")):
        pair = [kinds.get(one, {}) for one in (kind, "ssa")]
        spread = sum(one.get("accuracy_spread") or 0.0 for one in pair)
        means = [one.get("accuracy_mean") for one in pair]
        text, rule = f"{label} is more accurate than SSA", "by more than both spreads together"
        row = claim(text, rule, means, lambda x, y, spread=spread: x - y > spread, lambda value: percent(value, 2))
        one_seed = row[2] != UNKNOWN and min(len(one["accuracy_values"]) for one in pair) < 2
        yield [*row[:3], "not decided: one seed"] if one_seed else row


def claims(name: str) -> str:
    """The claims that the analysis has the numbers of."""
    kinds = entries(name)
    rows = [row for row in (*attention_claims(kinds), *accuracy_claims(kinds)) if row[2] != UNKNOWN]
    return table(["the paper's claim", "rule", "measured", "seen here"], rows)


def vit() -> str:
    """The networks without spikes, against the paper's number and against SSA in Spikformer."""
    results = read(VIT)
    if not results:
        return f"Not measured yet (`results/{VIT}`)."
    own = {
        key: {**entry, "label": entry["label"].replace("VSA", "ViT")} for key, entry in results["attentions"].items()
    }
    value, rows = facts(entries("cifar100")), []
    for entry in own.values():
        label, (near, entropy) = entry["label"], (entry["locality"].get(key) for key in (NEAR, "entropy_mean"))
        text = f"{label}: {NEAR_IN_VIT} % of attention are nearby"
        rows.append(claim(text, "at least as much", [near], lambda share: share >= NEAR_IN_VIT / 100, percent))
        text, pair = f"{label}: softmax attention is local", [near, value("ssa", NEAR)]
        rows.append(claim(text, f"{LOCAL} than in SSA, above", pair, lambda x, y: x > y, percent))
        text, pair = f"{label}: lower entropy than SSA", [entropy, value("ssa", "entropy_mean")]
        rows.append(claim(text, "mean entropy, SSA as above", pair, lambda x, y: x < y, "{:.2f}".format))
    claimed = table(["the paper's claim", "rule", "measured", "seen here"], rows)
    return "\n\n".join((source_of(VIT), claimed, locality_of(own)))


def memory() -> str:
    body = []
    for entry in entries("memory").values():
        terms = ", ".join(f"{term['name']} {kib(term['bytes'])}" for term in entry["state_terms"])
        label = entry["label"].removesuffix(" (random weights)")
        size = f"{entry['parameters'] / 1e6:.2f} M"
        body.append([label, size, kib(entry["state_bytes"]), terms, kib(entry["peak_inference_bytes"])])
    return table(["attention", "parameters", "state of one layer and step", "of which", "peak of a pass"], body)


def memory_claims() -> str:
    kinds = entries("memory")
    least = MEMORY_SAVED / 100
    rows = []
    for what, key in (("what attention must hold", "state_bytes"), ("a whole pass", "peak_inference_bytes")):
        saved = 1 - kinds["lrf_dyn"][key] / kinds["ssa"][key]
        text = f"LRF-Dyn uses {MEMORY_SAVED} % less inference memory: {what}"
        rows.append(claim(text, "at least as much less than SSA", [saved], lambda share: share >= least, percent))
    peaks = [row for row in read("performance/memory_cpu.json") if row["batch"] == 1]
    share = {row["attention"]: row["of_reference"] for row in peaks if row["implementation"] == "low-memory"}
    layer = {(r["attention"], r["form"]): r["peak_bytes"] for r in read(LAYER_MEMORY) if r["image_size"] == 224}
    for form in ("parallel", "streaming"):
        saved = 1 - layer["lrf_dyn", form] / layer["ssa", "parallel"] if layer else None
        text = f"The same of one attention layer, measured, LRF-Dyn {form}"
        rows.append(claim(text, "at least as much less than SSA", [saved], lambda share: share >= least, percent))
    for kind, label in (("lrf_dyn", "LRF-Dyn"), ("ssa", "SSA")):
        saved = 1 - share[kind] if kind in share else None
        text, rule = f"The same of low-memory inference with {label}", "at least as much less than SpikingJelly's SSA"
        rows.append(claim(text, rule, [saved], lambda share: share >= least, percent))
    return table(["claim", "rule", "less memory", "seen here"], rows)


def layer_memory() -> str:
    """The measured peak of one attention layer by the size of the image."""
    records = read(LAYER_MEMORY)
    sizes = list(dict.fromkeys(r["image_size"] for r in records))
    rows: dict[tuple[str, str], list[str]] = {}
    for r in records:
        rows.setdefault((attention_label(r["attention"]), r["form"]), []).append(f"{r['peak_bytes'] / 2**20:.2f}")
    header = ["attention", "form", *(f"{size} pixels" for size in sizes)]
    return table(header, [[*names, *peaks] for names, peaks in rows.items()])


def draw() -> None:
    from lrfdyn.analysis.report.plots import plot_sizes
    from lrfdyn.analysis.report.write import write_figures

    plot_sizes(read(LAYER_MEMORY), IMAGES / "findings_attention_memory.png")
    for name, (stem, wanted) in DRAWN.items():
        for path in write_figures(read(SOURCES[name]), IMAGES / "new", ["png"]):
            if path.stem in wanted:
                path.replace(IMAGES / f"findings_{stem}_{path.name}")
            else:
                path.unlink()
        (IMAGES / "new" / "captions.txt").unlink()
        (IMAGES / "new").rmdir()


def of_each(kind: Callable[[str], str], names: tuple[str, ...]) -> dict[str, Callable[[], str]]:
    return {f"findings_{name}_{kind.__name__}": lambda name=name: kind(name) for name in names}  # type: ignore[misc]


PARTS = {
    **of_each(source, tuple(SOURCES)),
    **{k: v for kind in (locality, fields, accuracy, claims) for k, v in of_each(kind, tuple(DRAWN)).items()},
    "findings_vit": vit,
    "findings_memory_table": memory,
    "findings_memory_layer": layer_memory,
    "findings_memory_claims": memory_claims,
}
