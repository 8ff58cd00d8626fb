"""Parts of data.md: the rates of the loader, from results/performance/loader_cpu.json."""

from __future__ import annotations

from typing import Any

from docs.parts import read, table
from docs.parts.imagenet_costs import measured

CORES = 16  # beside one GPU
FASTEST = "sdt_v3_s"
PACKED = ("shards", "256")  # the form of the ImageNet plan


def rates() -> list[dict[str, Any]]:
    return [record for record in read("performance/loader_cpu.json") if record["benchmark"] == "loader_forms"]


def core_rate() -> float | None:
    """Packed pictures that one core reads, decodes and crops in a second, without worker processes."""
    found = [r["images_per_s"] for r in rates() if (r["form"], r["short_side"], r["workers"]) == (*PACKED, 0)]
    return found[0] if found else None


def forms() -> str:
    """A row for every form, the images per second with every number of processes, and what a core does."""
    if not rates():
        return "Not measured yet."
    processes = sorted({record["workers"] for record in rates()})
    rows: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for record in rates():
        rows.setdefault((record["form"], record["short_side"]), {})[record["workers"]] = record
    body = []
    for (form, side), found in rows.items():
        first = found[min(found)]
        speeds = [f"{found[n]['images_per_s']:,.0f}" if n in found else "" for n in processes]
        own = f"{found[0]['images_per_own_cpu_s']:,.0f}" if 0 in found else ""
        body.append([form, side, f"{first['bytes'] / 1e3:.1f}", *speeds, own])
    counts = [f"{n} worker{'s' * (n != 1)}" for n in processes]
    header = ["form", "short side", "kB a picture", *counts, "a second of CPU time"]
    one = rates()[0]
    about = f"{one['machine']['cpu']}, {max(r['cores'] for r in rates())} cores, output {one['image_size']} pixels"
    return f"{table(header, body, numbers=True)}\n\nImages a second; {about}. Made by\n\n    {one['command']}"


def needed() -> str:
    """Whether 16 cores feed the fastest transformer of the plan; extrapolated from one core."""
    speed = max(record["images_per_s"] for (model, _), record in measured().items() if model == FASTEST)
    rate, each = core_rate(), speed / CORES
    text = f"`{FASTEST}` trains {speed:,.0f} images/s on an H200, {each:,.0f} for each of {CORES} cores."
    if rate is None:
        return f"{text} What a core reads was not measured yet."
    verdict = "enough" if rate >= each else "not enough"
    return (
        f"{text} One core here reads, decodes and crops\n{rate:,.0f} packed pictures a second:"
        f" **extrapolated**, {CORES} such cores {CORES * rate:,.0f} images/s, {verdict}. No such machine was\n"
        f"measured; cores that share memory, and two threads of one core, do less each."
    )


PARTS = {"loader_forms": forms, "loader_needed": needed}
