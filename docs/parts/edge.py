"""Parts of edge.md, its figure and a table of deployment.md, from results/performance/edge_*.json."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from docs.parts import ROOT, kib, listing, percent, read, table
from lrfdyn.io.zoo import INDEX, read_index

Record = dict[str, Any]
NATIVE = "lrfdyn C"
FIGURE = "images/edge_firing.png"
LAYERS = 8  # of those that take longest


def load(name: str) -> list[Record]:
    return read(f"performance/{name}.json")


def missing(name: str) -> str:
    return f"Not measured yet (`results/performance/{name}.json`)."


def title(record: Record) -> str:
    """A model with its attention and the size of its images."""
    return f"{record['model']}, {record['attention']}, {record['image_size']}"


def by_title(records: Sequence[Record]) -> dict[str, list[Record]]:
    """The records of each model, in their order."""
    return {name: [r for r in records if title(r) == name] for name in dict.fromkeys(map(title, records))}


def cpu(rows: Sequence[Record]) -> str:
    """All runtimes of all models."""
    if not rows:
        return missing("edge_cpu")
    said = {True: "yes", False: "no", None: ""}
    columns = {
        "model, attention, image": "{title}", "runtime": "{runtime}", "threads": "{threads}", "ms": "{ms:.1f}",
        "RAM besides weights, KiB": "{ram_kib:,.0f}", "file, MiB": "{file_mib:.1f}", "top-1, %": "{top1:.1f}",
        "bit-exact": "{exact}",
    }  # fmt: skip
    made = listing([{**r, "title": title(r), "exact": said[r["bit_exact"]]} for r in rows], columns, numbers=True)
    rates = {title(r): r for r in rows}
    notes = [
        f"{name}: {percent(r['firing_rate'])} of all spikes are 1, "
        + (f"top-1 of {r['images']} test images." if r["trained"] else "random weights and pictures, so no top-1.")
        for name, r in rates.items()
    ]
    return "\n".join([f"{rows[0]['machine']['cpu']}:", "", made, "", *(f"- {note}" for note in notes)])


def factors(rows: Sequence[Record]) -> str:
    """How many times faster the C is than each of the others, on one core."""
    if not rows:
        return missing("edge_cpu")
    single = {(title(r), r["runtime"]): r["ms"] for r in rows if r["threads"] == 1}
    models = [model for model, runtime in single if runtime == NATIVE]
    runtimes = [name for name in dict.fromkeys(runtime for _, runtime in single) if name != NATIVE]
    body = [[f"{NATIVE}, ms", *(f"{single[model, NATIVE]:.1f}" for model in models)]]
    for name in runtimes:
        found = [(single.get((model, name)), single[model, NATIVE]) for model in models]
        body.append([f"times faster than {name}", *("" if ms is None else f"{ms / own:.1f}" for ms, own in found)])
    return table(["one core", *models], body, numbers=True)


def firing(records: Sequence[Record]) -> str:
    """Time against the firing rate, as a figure where it was drawn, and as a table."""
    if not records:
        return missing("edge_cpu_firing")
    head = ["thresholds times", "of all spikes are 1", "C, ms", "the same integers in ONNX Runtime, ms"]
    figure = f"![Milliseconds of an image against the firing rate]({FIGURE})"
    parts = [figure] if (ROOT / "docs" / FIGURE).is_file() else []
    for name, own in by_title(records).items():
        body = [
            [
                f"{r['threshold_factor']:g}",
                percent(r["firing_rate"]),
                f"{r['ms']:.1f}",
                f"{r['onnxruntime_integer_ms']:.1f}" if "onnxruntime_integer_ms" in r else "",
            ]
            for r in own
        ]
        parts += [f"{name}, one core:", table(head, body, numbers=True)]
    return "\n\n".join(parts)


def layers(records: Sequence[Record]) -> str:
    """The kernels of each model that take longest, and the rest."""
    if not records:
        return missing("edge_cpu_layers")
    parts = []
    for name, unsorted in by_title(records).items():
        own = sorted(unsorted, key=lambda r: -r["ms"])
        rest = own[LAYERS:]
        body = [[f"`{r['operation']}`", f"{r['ms']:.2f}", percent(r["share"])] for r in own[:LAYERS]]
        last = [f"{len(rest)} others", f"{sum(r['ms'] for r in rest):.2f}", percent(sum(r["share"] for r in rest))]
        parts.append(table([name, "ms", "share"], [*body, last] if rest else body, numbers=True))
    return "\n\n".join(parts)


def boards(records: Sequence[Record]) -> str:
    """The digits model on emulated boards."""
    if not records:
        return missing("edge_boards")
    body = [
        [
            r["board"],
            f"{r['images']} of {r['images']}" if r["bit_exact"] else "no",
            kib(r["flash_bytes"]),
            kib(r["ram_bytes"]),
            kib(r["stack_bytes"]),
            "–" if r["instructions"] is None else f"{r['instructions'] / 1e6:.1f} million",
        ]
        for r in records
    ]
    return table(["board", "images with the same logits", "flash", "RAM", "stack", "instructions"], body, numbers=True)


def draw() -> None:
    """The figure of time against the firing rate."""
    from lrfdyn.analysis.report.look import STYLE, pyplot

    records = load("edge_cpu_firing")
    if not records:
        return
    plt = pyplot("plot")
    lines = {"ms": "C", "onnxruntime_integer_ms": "the same integers in ONNX Runtime"}
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(6.2, 3.2))
        for name, own in by_title(records).items():
            for key, label in lines.items():
                shown = [r for r in own if key in r]
                rates, times = [100 * r["firing_rate"] for r in shown], [r[key] for r in shown]
                axis.plot(rates, times, marker="o", label=f"{name}: {label}")
        axis.set(xlabel="spikes that are 1, %", ylabel="ms per image, one core", ylim=(0, None))
        axis.legend(fontsize=7, loc="lower left", bbox_to_anchor=(0, 1.02))
        figure.savefig(ROOT / "docs" / FIGURE, dpi=150)
        plt.close(figure)


def integers(rows: Sequence[Record]) -> str:
    """Whether the three give the same, and what integers cost on all test images."""
    if not rows:
        return missing("integers")
    body = []
    for row in rows:
        entry = read_index(INDEX)[row["model"]]
        assert entry.integer is not None
        values = entry.float32, entry.bf16, entry.integer
        same = f"{row['same']:,} of {row['images']:,}"
        body.append([row["model"], same, f"{row['defined']:,}", *(f"{value:.2f}" for value in values)])
    header = ["model", "images with the same logits", "by the definition too", "float32, %", "as stored, %"]
    return table([*header, "integers, %"], body)


PARTS = {
    "edge_cpu": lambda: cpu(load("edge_cpu")),
    "edge_factors": lambda: factors(load("edge_cpu")),
    "edge_firing": lambda: firing(load("edge_cpu_firing")),
    "edge_layers": lambda: layers(load("edge_cpu_layers")),
    "edge_boards": lambda: boards(load("edge_boards")),
    "edge_integers": lambda: integers(load("integers")),
}
