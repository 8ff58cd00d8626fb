"""Fills the tables of exported files in the deployment pages from results/performance/export_*.json."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "results" / "performance"
PAGES = ("deployment.md", "deployment_export.md")


def records(name: str) -> list[dict[str, Any]]:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


def table(header: str, rows: list[str]) -> str:
    columns = header.count("|") - 1
    return "\n".join([header, "|---|" + "---:|" * (columns - 1), *rows])


def export_cpu() -> str:
    header = (
        "| model, attention, image | file | operations | MiB | ms | PyTorch, ms | largest logit difference "
        "| images within tolerance (float64) | equal argmax (float64) |"
    )
    rows = []
    for r in sorted(records("export_cpu"), key=lambda r: (r["image_size"], r["model"], r["attention"], r["format"])):
        count = "" if r["operations"] is None else f"{r['operations']:,}"
        within, argmax = f"{r['within_tolerance']} of {r['images']}", f"{r['argmax_agreement']:.0%}"
        if r["float64_within_tolerance"] is not None:
            within += f" ({r['float64_within_tolerance']})"
        if r.get("float64_argmax_agreement") is not None:
            argmax += f" ({r['float64_argmax_agreement']:.0%})"
        rows.append(
            f"| {r['model']}, {r['attention']}, {r['image_size']} | {r['format']} | {count} | {r['file_mib']:.1f} "
            f"| {r['latency_ms']:.0f} | {r['torch_latency_ms']:.0f} "
            f"| {r['max_logit_difference']:.1g} of {r['largest_logit']:.2g} | {within} | {argmax} |"
        )
    return table(header, rows)


def export_matrix() -> str:
    header = "| host | attentions as ONNX | as ExecuTorch | images | within tolerance | equal argmax | without a flip |"
    rows = []
    found = records("export_matrix")
    for host in dict.fromkeys(r["model"] for r in found):
        own = [r for r in found if r["model"] == host]
        counts = [len({(r["attention"], r["token"]) for r in own if r["format"] == f}) for f in ("onnx", "executorch")]
        images, within = (sum(r[key] for r in own) for key in ("images", "within_tolerance"))
        agree = sum(r["argmax_agreement"] * r["images"] for r in own)
        clean = [r["max_logit_difference"] for r in own if r["within_tolerance"] == r["images"]]
        rows.append(
            f"| {host.removeprefix('small ')} | {counts[0]} | {counts[1]} | {images} | {within} "
            f"| {agree:.0f} | {max(clean, default=0):.0e} |"
        )
    return table(header, rows)


TABLES = {"export_cpu": export_cpu, "export_matrix": export_matrix}


def render(page: str) -> str:
    """The page with its tables, which stand between comments, made anew."""
    for name, make in TABLES.items():
        pattern = rf"(<!-- {name}[^\n]*-->\n).*?(<!-- /{name} -->)"
        page = re.sub(pattern, lambda found, make=make: f"{found[1]}\n{make()}\n\n{found[2]}", page, flags=re.DOTALL)
    return page


if __name__ == "__main__":
    for name in PAGES:
        path = DOCS / name
        if path.exists():
            path.write_text(render(path.read_text(encoding="utf-8")), encoding="utf-8")
