"""Writes docs/findings.md, and its figures where matplotlib is installed, from the analyses in results/."""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from docs.findings_attention import by_kind, fields, locality, percent, verdict
from docs.pages import table

ROOT = Path(__file__).parent.parent
IMAGES = ROOT / "docs" / "images"
DIGITS, CIFAR, LARGE = "digits/results.json", "analysis/cifar100/results.json", "analysis/spikformer_8_512/results.json"
CIFAR_COMMAND = (
    "lrfdyn analyze results/cifar100/*/ --data cifar100 --data-root DATA --images 256 --out results/analysis/cifar100"
)
FIGURES = {
    "attention_distance": "Attention weight against Manhattan distance, and its share nearby",
    "attention_entropy": "Entropy of attention",
    "receptive_fields": "Effective receptive fields",
    "memory_accuracy": "Memory, accuracy and parameters",
    "convergence": "Convergence",
    "energy": "Energy of the synaptic operations",
}
PEAKS = "performance/memory_cpu.json"

INTRODUCTION = """\
# The paper's claims, next to what we measure

<!-- Made by docs/make_findings.py from results/; `python docs/make_findings.py` writes it anew. -->

Each verdict is computed from the numbers beside it by the rule that is stated. Attention weights are absolute values,
added up over the time steps and normalised per query; "nearby" is a Manhattan distance of at most a quarter of the
largest one on the grid (the paper does not say what it calls short). VSA here is softmax attention on the spikes of the
same host, which is not the ViT of the paper: a softmax over products of few spikes is nearly flat.
[analysis.md](analysis.md) says how everything is measured.
"""


def load(name: str) -> Any:
    path = ROOT / "results" / name
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def by_model(results: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The results of every host for itself."""
    names = dict.fromkeys(entry.get("model") or "" for entry in results["attentions"].values())
    for name in names:
        chosen = {
            key: {**entry, "label": entry["label"].removeprefix(f"{name}, ")}
            for key, entry in results["attentions"].items()
            if (entry.get("model") or "") == name
        }
        runs = [run for run in results["runs"] if run["attention"] in chosen]
        yield name, {**results, "attentions": chosen, "runs": runs}


def command(results: dict[str, Any]) -> str:
    """As anybody could type it: where the data lies is not part of it."""
    return re.sub(r"(--data-root )\S+", r"\1DATA", results["command"])


def kib(value: float | None) -> str:
    return "–" if value is None else f"{value / 1024:,.1f} KiB"


def accuracy(results: dict[str, Any]) -> Iterator[str]:
    kinds = by_kind(results)
    rows = []
    for entry in kinds.values():
        spread = entry["accuracy_spread"]
        runs = len(entry["accuracy_values"])
        rows.append(
            [
                entry["label"],
                percent(entry["accuracy_mean"], 2) + (f" ± {100 * spread:.2f}" if runs > 1 else ""),
                str(runs),
                f"{entry['parameters']:,}",
                kib(entry["state_bytes"]),
                kib(entry["peak_inference_bytes"]),
                f"{entry['energy']['energy_pj'] / 1e6:,.2f} µJ",
            ]
        )
    heads = [
        "attention",
        "test accuracy",
        "seeds",
        "parameters",
        "state, derived",
        "peak, measured",
        "energy per image",
    ]
    yield table(heads, rows)
    ssa = kinds.get("ssa")
    for kind, name in (("lrf_ssa", "LRF-SSA"), ("lrf_dyn", "LRF-Dyn")):
        other = kinds.get(kind)
        if ssa is None or other is None or ssa["accuracy_mean"] is None or other["accuracy_mean"] is None:
            continue
        gain = other["accuracy_mean"] - ssa["accuracy_mean"]
        spread = ssa["accuracy_spread"] + other["accuracy_spread"]
        seen = verdict(
            min(len(ssa["accuracy_values"]), len(other["accuracy_values"])) > 1,
            lambda gain=gain, spread=spread: gain > spread,  # type: ignore[misc]
            "by more than both spreads together",
            lacking="one seed has no spread",
        )
        yield f"- *{name} is more accurate than SSA.* {seen} The difference is {100 * gain:+.2f} points."


def within(energy: dict[str, Any]) -> float:
    """The share of attention itself, without the layers around it."""
    return sum(one["energy_pj"] for one in energy["layers"] if one["kind"] == "attention") / energy["energy_pj"]


def energies(results: dict[str, Any]) -> Iterator[str]:
    kinds = by_kind(results)
    if not {"ssa", "lrf_dyn"} <= kinds.keys():
        return
    ssa, dyn = (kinds[kind]["energy"] for kind in ("ssa", "lrf_dyn"))
    yield (
        f"- Energy of LRF-Dyn is {change(1 - dyn['energy_pj'] / ssa['energy_pj'])} than that of SSA. It has no queries "
        f"and keys to make, but its dendrites and stencils multiply potentials: {percent(within(dyn))} of its energy "
        f"is inside attention, and {percent(within(ssa))} of that of SSA. The paper has no numbers of energy."
    )


def memory(results: dict[str, Any]) -> Iterator[str]:
    kinds = by_kind(results)
    rows = []
    for entry in kinds.values():
        terms = ", ".join(f"{term['name']} {kib(term['bytes'])}" for term in entry["state_terms"])
        label = entry["label"].removesuffix(" (random weights)")
        rows.append(
            [
                label,
                f"{entry['parameters'] / 1e6:.2f} M",
                kib(entry["state_bytes"]),
                terms,
                kib(entry["peak_inference_bytes"]),
            ]
        )
    heads = ["attention", "parameters", "state of one layer and step", "of which", "peak of a pass, batch 1"]
    yield table(heads, rows)
    ssa, dyn = kinds["ssa"], kinds["lrf_dyn"]
    peak = 1 - dyn["peak_inference_bytes"] / ssa["peak_inference_bytes"]
    state = 1 - dyn["state_bytes"] / ssa["state_bytes"]
    claim = "LRF-Dyn uses 49.4 % less inference memory in Spikformer-8-512"
    yield (
        f"- *{claim}: what attention must hold.* "
        + verdict(
            True, lambda: state >= 0.494, "the derived state of a layer is at least 49.4 % lower than that of SSA"
        )
        + f" It is {change(state)}, with the rows that the stencils reach held as spikes; streaming allocates exactly "
        "that ([deployment.md](deployment.md)). Held as potentials, they would take more than the state of SSA."
    )
    yield (
        f"- *{claim}: a whole evaluation pass.* "
        + verdict(True, lambda: peak >= 0.494, "the measured peak is at least 49.4 % lower than that of SSA")
        + f" It is {change(peak)}: both keep whole feature maps, and the stem's are the largest. "
        + low_memory()
    )


def change(saved: float) -> str:
    return f"{100 * abs(saved):.1f} % {'lower' if saved >= 0 else 'higher'}"


def low_memory() -> str:
    """What low-memory inference does to the peak, for both attentions."""
    rows = [row for row in load(PEAKS) or [] if row["batch"] == 1]
    share = {row["attention"]: row["of_reference"] for row in rows if row["implementation"] == "low-memory"}
    if not {"ssa", "lrf_dyn"} <= share.keys():
        return ""
    return (
        f"Low-memory inference needs {percent(share['lrf_dyn'])} of the peak of SpikingJelly's SSA with LRF-Dyn and "
        f"{percent(share['ssa'])} with SSA: it lowers the peak, the attention does not "
        f"([results/{PEAKS}](../results/{PEAKS}))."
    )


def figures(results: dict[str, Any], name: str) -> Iterator[str]:
    from lrfdyn.analysis.report.figures import figures as drawable

    made = drawable(results)
    for figure, title in FIGURES.items():
        if figure in made:
            yield f"![{title}](images/findings_{name}_{figure}.png)"


def section(title: str, source: str, name: str, results: dict[str, Any]) -> Iterator[str]:
    epochs = max((len(run.get("curve") or []) for run in results["runs"]), default=0)
    yield f"## {title}"
    yield f"Source: [results/{source}](../results/{source}), {epochs} epochs, made by"
    yield f"    {command(results)}"
    yield "Accuracies are of all seeds; everything else is measured on the model of the first one."
    yield "### Locality and entropy"
    yield from locality(results)
    yield "### Receptive fields"
    yield from fields(results)
    yield "### Accuracy, memory, energy"
    yield from accuracy(results)
    yield from energies(results)
    yield "### Figures"
    yield from figures(results, name)


def render() -> str:
    parts = []
    digits, cifar, large = load(DIGITS), load(CIFAR), load(LARGE)
    if cifar is not None:
        for model, one in by_model(cifar):
            parts += section(f"CIFAR-100, {model}", CIFAR, f"cifar100_{model}", one)
    else:
        parts += ["## CIFAR-100", "Not analysed yet. With the runs in results/cifar100:", f"    {CIFAR_COMMAND}"]
    if digits is not None:
        parts += section("Digits", DIGITS, "digits", digits)
        parts.append(
            "Digits are 8x8 pixels and 64 tokens of one pixel each: what holds here need not hold on natural images."
        )
    if large is not None:
        parts += [
            "## Memory of Spikformer-8-512",
            f"Source: [results/{LARGE}](../results/{LARGE}), random weights, made by",
            f"    {command(large)}",
            *memory(large),
        ]
    parts += [
        "## Theorems",
        "`lrfdyn theory` computes both sides of every statement exactly. The closed forms are right. What the paper "
        "concludes from them needs conditions:",
        *(f"- {note}" for note in theory_notes()),
    ]
    text = INTRODUCTION
    previous = ""
    for part in filter(None, parts):
        in_list = previous.startswith("- ") and part.startswith("- ")
        text += ("" if in_list else "\n") + wrapped(part) + "\n"
        previous = part
    return text


def wrapped(part: str) -> str:
    """Prose within the line length; tables, titles and pictures as they are."""
    if part.startswith(("|", "#", "!", "    ")):
        return part.rstrip("\n")
    return textwrap.fill(
        part,
        120,
        subsequent_indent="  " if part.startswith("- ") else "",
        break_long_words=False,
        break_on_hyphens=False,
    )


def theory_notes() -> list[str]:
    from lrfdyn.analysis.theorems import ORDER_NOTE, RADIUS_NOTE, REASON

    return [REASON, RADIUS_NOTE, ORDER_NOTE]


def draw() -> None:
    from lrfdyn.analysis.report.write import write_figures

    digits, cifar = load(DIGITS), load(CIFAR)
    drawn = [("digits", digits)] if digits else []
    drawn += [(f"cifar100_{model}", one) for model, one in by_model(cifar)] if cifar else []
    for name, results in drawn:
        for path in write_figures(results, IMAGES / "new", ["png"]):
            if path.stem in FIGURES:
                path.replace(IMAGES / f"findings_{name}_{path.name}")
            else:
                path.unlink()
        (IMAGES / "new" / "captions.txt").unlink()
        (IMAGES / "new").rmdir()


if __name__ == "__main__":
    (ROOT / "docs" / "findings.md").write_text(render(), encoding="utf-8")
    draw()
