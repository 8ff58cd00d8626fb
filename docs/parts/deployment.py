"""Parts of deployment.md, and its figure, from results/performance."""

from __future__ import annotations

import json
from statistics import mean
from typing import Any

from docs.parts import RESULTS, ROOT, kib, listing, read, table
from lrfdyn.analysis.measure.exits import choose_exit
from lrfdyn.analysis.measure.inference import attention_state
from lrfdyn.attention import attention_label
from lrfdyn.attention.row_stream import BUFFERS
from lrfdyn.models.summary import meta_model

MODEL = "spikformer_8_512"
FILES = {"memory_h200": "GPU", "memory_cpu": "CPU"}
HELD = {
    "spikes": ("dendrites once (k·d), bits of 11 rows", "11 times"),
    "states": ("dendrites for every row offset (5·k·d), bits of 11 rows", "5 times"),
    "potentials": ("dendrites once (k·d), potentials of 11 rows", "once"),
}


def load(name: str) -> list[dict[str, Any]]:
    return read(f"performance/{name}.json")


def state_kib(buffers: str = BUFFERS[0], **options: Any) -> str:
    """What one layer of Spikformer-8-512 holds for one image and time step."""
    return kib(sum(term["bytes"] for term in attention_state(meta_model(MODEL, **options), buffers)))


def buffers() -> str:
    body = []
    for name in BUFFERS:
        sizes = [state_kib(name, attention="lrf_dyn", directions=directions) for directions in (1, 2)]
        body.append([f'`"{name}"`', *HELD[name], *sizes])
    body.append(["SSA, for comparison", "the matrix kᵀv and the spikes of q, k, v", "", state_kib(attention="ssa"), ""])
    head = ["`buffers`", "held", "scans of a row", "one layer of Spikformer-8-512", "with `directions=2`"]
    return table(head, body)


def ms(row: dict[str, Any]) -> str:
    return f"{row['latency_ms']:,.1f} ms" if row["latency_ms"] < 1000 else f"{row['latency_ms'] / 1e3:,.1f} s"


def summary() -> str:
    """Low-memory inference against the reference, with SSA and with LRF-Dyn."""
    body = []
    for name, where in FILES.items():
        for batch in dict.fromkeys(r["batch"] for r in load(name)):
            rows = [r for r in load(name) if r["batch"] == batch]
            low = {r["attention"]: r for r in rows if r["implementation"] == "low-memory"}
            cells = [f"{r['of_reference']:.1%}, {ms(r)}" if r else "" for r in map(low.get, ("ssa", "lrf_dyn"))]
            body.append([where, str(batch), f"{rows[0]['peak_mib']:,.0f} MiB, {ms(rows[0])}", *cells])
    for r in load("memory_h200_32"):
        if (r["implementation"], r["attention"]) == ("low-memory", "lrf_dyn"):
            more = f"{r['of_reference']:.1%}, {ms(r)}"
            body.append(["GPU, `images_at_once=32`", str(r["batch"]), "", "", more])
    return table(["device", "batch", "reference", "low-memory SSA", "low-memory LRF-Dyn"], body)


def measured(name: str) -> str:
    rows = load(name)
    if not rows:
        return f"Not measured yet (`results/performance/{name}.json`)."
    first = rows[0]
    machine = first["machine"]["gpu"] if first["device"] != "cpu" else f"CPU, {first['threads']} threads"
    columns = {
        "batch": "{batch}", "attention": "{label}", "implementation": "{implementation}", "peak MiB": "{peak_mib:,.1f}",
        "of reference": "{of_reference:.1%}", "resident MiB": "{resident_mib:,.0f}", "ms": "{latency_ms:,.1f}",
        "processor ms": "{cpu_ms:,.0f}",
    }  # fmt: skip
    rows = [{**r, "label": attention_label(r["attention"])} for r in rows]
    notes = dict.fromkeys(part for r in rows if r["note"] for part in r["note"].split("; "))
    note = f"\n\nNote: {'; '.join(notes)}." if notes else ""
    return f"{machine}, torch {first['versions']['torch']}:\n\n{listing(rows, columns)}{note}"


def export_cpu() -> str:
    """Files of models in their usual size; in brackets, what PyTorch in float64 has."""
    columns = {
        "model, attention, image": "{model}, {attention}, {image_size}", "file": "{format}",
        "operations": "{operations:,}", "MiB": "{file_mib:.1f}", "ms": "{latency_ms:.0f}",
        "PyTorch, ms": "{torch_latency_ms:.0f}",
        "largest logit difference": "{max_logit_difference:.1g} of {largest_logit:.2g}",
        "images within tolerance (float64)": "{within_tolerance} of {images} ({float64_within_tolerance})",
        "equal argmax (float64)": "{argmax_agreement:.0%} ({float64_argmax_agreement:.0%})",
    }  # fmt: skip
    records = [{"float64_argmax_agreement": None, **r} for r in load("export_cpu")]
    records.sort(key=lambda r: (r["image_size"], r["model"], r["attention"], r["format"]))
    return listing(records, columns, numbers=True)


def export_matrix() -> str:
    """Small networks of every host with every attention. The last column is the largest difference among the files in
    which no image had a flip."""
    body = []
    found = load("export_matrix")
    for host in dict.fromkeys(r["model"] for r in found):
        own = [r for r in found if r["model"] == host]
        counts = [len({(r["attention"], r["token"]) for r in own if r["format"] == f}) for f in ("onnx", "executorch")]
        images, within = (sum(r[key] for r in own) for key in ("images", "within_tolerance"))
        agree = sum(r["argmax_agreement"] * r["images"] for r in own)
        clean = [r["max_logit_difference"] for r in own if r["within_tolerance"] == r["images"]]
        numbers = [*map(str, counts), str(images), str(within), f"{agree:.0f}", f"{max(clean, default=0):.0e}"]
        body.append([host.removeprefix("small "), *numbers])
    header = ["host", "attentions as ONNX", "as ExecuTorch", "images", "within tolerance", "equal argmax"]
    return table([*header, "largest difference without a flip"], body, numbers=True)


def export_runs() -> str:
    """Trained models as files: accuracy and agreement on test images."""
    columns = {
        "recipe, epochs": "{recipe}, {epochs}", "file": "{format}",
        "accuracy (PyTorch; float64)": "{file_top1:.1f}% ({top1:.1f}%; {float64_top1:.1f}%)",
        "equal argmax (float64)": "{equal_argmax} of {images} ({float64_equal_argmax})",
        "within tolerance (float64)": "{within_tolerance} ({float64_within_tolerance})",
        "largest logit difference": "{max_logit_difference:.1g} of {largest_logit:.2g}",
        "without a flip": "{max_without_flip:.0e}",
    }  # fmt: skip
    return listing(load("export_runs"), columns, numbers=True)


def exits_digits() -> str:
    """Means over the seeds of what a threshold gives that was chosen on held-out images."""
    body = []
    for name, label in (("mean", "of the mean logits"), ("tet", "of every step (TET)")):
        runs = [json.loads(p.read_text("utf-8")) for p in sorted((RESULTS / "digits" / "exit").glob(f"{name}_*.json"))]
        for points in (0.2, 1.0) if runs else ():
            chosen = [choose_exit(run["chosen_on"]["curve"], points)["threshold"] for run in runs]
            tested = [row for run, t in zip(runs, chosen, strict=True) for row in run["curve"] if row["threshold"] == t]
            one, all_steps = ([run["steps"][step]["top1"] for run in runs] for step in (0, -1))
            accuracies = [f"{mean(values):.1f} %" for values in ([row["top1"] for row in tested], all_steps, one)]
            steps = f"{mean(row['mean_steps'] for row in tested):.2f}"
            body.append([label, f"{points:g}", ", ".join(f"{t:g}" for t in chosen), steps, *accuracies])
    head = ["loss", "points", "thresholds", "mean steps", "accuracy", "with all 4 steps", "with one step"]
    return table(head, body) if body else "Not measured yet (`results/digits/exit`)."


def draw() -> None:
    from lrfdyn.analysis.report.plots import plot_memory

    states = {"SSA": attention_state(meta_model(MODEL, attention="ssa"))}
    for name in BUFFERS:
        states[f"LRF-Dyn\n{name}"] = attention_state(meta_model(MODEL, attention="lrf_dyn"), buffers=name)
    rows = [
        {"group": f"{where}, batch {r['batch']}", "label": attention_label(r["attention"]),
         "implementation": r["implementation"], "mib": r["peak_mib"]}
        for name, where in FILES.items()
        for r in load(name)
    ]  # fmt: skip
    plot_memory(states, rows, ROOT / "docs" / "images" / "memory.png")


PARTS = {
    "buffers": buffers,
    "memory_summary": summary,
    "memory_gpu": lambda: measured("memory_h200"),
    "memory_cpu": lambda: measured("memory_cpu"),
    "export_cpu": export_cpu,
    "export_matrix": export_matrix,
    "export_runs": export_runs,
    "exits_digits": exits_digits,
}
