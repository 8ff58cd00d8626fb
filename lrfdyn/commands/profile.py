"""Show where the inference memory of a model goes, derived and measured.

For each attention: what its layers must hold, term by term, and the peak of plain (eager) and low-memory inference by
layer and in total: of the allocator, and on a CPU also the growth of the resident set. Weights and images are not
counted. With --sizes: the peak of one attention layer alone, parallel and streaming, on images of several sizes.
Images, and the weights of a model that is given by name, are random: memory does not depend on them.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from typing import Any

from rich.table import Table

from lrfdyn.analysis.measure.inference import largest_state, profile_attention, profile_model
from lrfdyn.analysis.report.plots import check_plot, plot_memory, plot_sizes
from lrfdyn.attention import ATTENTIONS, attention_label, attention_options
from lrfdyn.attention.registry import option_takers, unknown_option
from lrfdyn.commands import shared
from lrfdyn.commands.shared import MIB, make_table, number, plain_console, print_json
from lrfdyn.convert.swap import swap_attention
from lrfdyn.devices import choose_device
from lrfdyn.errors import require, require_integer
from lrfdyn.models.base import LIMITS
from lrfdyn.sources import find_source

KINDS = ("ssa", "lrf_ssa", "lrf_dyn")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "model",
        help="folder of a run or of a saved model, .safetensors file, zoo's name, hub repository, NAME[:ATTENTION]",
    )
    attentions = f"of {', '.join(ATTENTIONS)}; default: {', '.join(KINDS)} for a name, else the model's own"
    add("--attention", nargs="+", metavar="KIND", help=attentions)
    add("--batch", nargs="+", type=int, help="images at once; default: 1, and 64 on a GPU")
    add("--time-steps", type=int, help="instead of the model's own (with a name)")
    add("--image-size", type=int, help="instead of the model's own (with a name)")
    layer = "the peak of one attention layer alone, parallel and streaming, on images of these sizes (pixels a side)"
    add("--sizes", nargs="+", type=int, metavar="PIXELS", help=layer)
    add("--device", help="cpu or cuda; default: cuda where there is one")
    add("--repeats", type=int, default=3, help="calls that are timed; the fastest counts")
    add("--plot", type=Path, metavar="FILE", help="also draw a figure (needs matplotlib)")
    add("--json", action="store_true", help="print JSON")
    shared.add_attention_options(parser)


def run(args: argparse.Namespace) -> None:
    fewest = min(args.batch or [1])
    require(fewest >= 1, f"batch: expected integers >= 1, got {fewest}")
    require_integer("repeats", args.repeats, 1)
    for size in args.sizes or ():
        require_integer("sizes", size, 1, LIMITS["image_size"][1])
    for kind in args.attention or ():
        attention_options(kind)
    device = choose_device(args.device)
    require(device.type in ("cpu", "cuda"), f"device: expected cpu or cuda, got {device}")
    # Many images take minutes on a CPU and say little: in low memory they pass the network one by one there.
    args.batch = args.batch or ([1, 64] if device.type == "cuda" else [1])
    if args.plot is not None:
        check_plot(args.plot)  # what is wrong is told before the measuring
    source = find_source(args.model, time_steps=args.time_steps, image_size=args.image_size)
    loaded, profiles = source.load().float(), []
    own: str = loaded.config.get("attention", "")
    require(bool(own), f"model: expected one with attention, got {source.origin}")
    alone = source.trained or ":" in source.origin or not loaded.spiking
    kinds = [ATTENTIONS.name_of(kind) for kind in args.attention or ([own] if alone else KINDS)]
    options = shared.given_attention_options(args)
    named = f"{', '.join(options)}: only for the name of a model, whose weights are random; got {source.origin}"
    require(not options or not source.trained, named)
    for name in options:
        if not {*kinds} & {*option_takers(name)}:
            raise unknown_option(kinds[0], name)
    for kind in kinds:
        model, given = copy.deepcopy(loaded), {key: options[key] for key in attention_options(kind) if key in options}
        if kind != own or given:
            swap_attention(model, kind, **given)
        if args.sizes:
            found = profile_attention(model, source.origin, args.sizes, args.batch, device)
        else:
            found = [profile_model(model, source.origin, args.batch, device, repeats=args.repeats)]
        profiles += [{**record, "attention_options": given} for record in found] if options else found
    if args.sizes:
        show_sizes(profiles, args)
        return
    if args.plot is not None:
        runs = [(attention_label(p["attention"]), run) for p in profiles for run in p["runs"]]
        peaks = [
            {**r, "group": f"batch {r['batch']}", "label": label, "mib": r["peak_bytes"] / MIB} for label, r in runs
        ]
        plot_memory({attention_label(p["attention"]): largest_state(p["layers"]) for p in profiles}, peaks, args.plot)
    if args.json:
        print_json(profiles)
        return
    console = plain_console(80)
    console.print(state_table(profiles), *map(layers_table, profiles), totals_table(profiles))
    for note in dict.fromkeys(note for profile in profiles for note in profile["notes"]):
        console.print(note, soft_wrap=True)


def show_sizes(records: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """Draws and prints the peaks of one attention layer on images of several sizes."""
    if args.plot is not None:
        plot_sizes(records, args.plot)
    if args.json:
        print_json(records)
        return
    where = f"Peak of one attention layer beyond its input, measured on {records[0]['device']}, MiB"
    table = make_table("attention", "form", ">batch", *(f">{size} px" for size in args.sizes), title=where)
    rows: dict[tuple[str, str, int], list[str]] = {}
    for r in records:
        rows.setdefault((r["attention"], r["form"], r["batch"]), []).append(mib(r["peak_bytes"]))
    for (kind, form, batch), sizes in rows.items():
        table.add_row(attention_label(kind), form, str(batch), *sizes)
    plain_console(80).print(table)


def kib(size: int) -> str:
    return f"{size / 2**10:,.1f}"


def mib(size: int | None) -> str:
    return number(size, ",.2f", MIB)


def state_table(profiles: list[dict[str, Any]]) -> Table:
    """Terms of all attention layers, for one image and time step."""
    title = "What attention must hold, derived, for one image and time step"
    table = make_table("attention", "term", "formula", ">KiB a\nlayer", ">layers", ">KiB\nin all", title=title)
    for profile in profiles:
        label, layers = attention_label(profile["attention"]), profile["layers"].values()
        largest = largest_state(profile["layers"])
        if not largest:
            table.add_row(label, *5 * ["-"])
            continue
        for i, term in enumerate(largest):
            total = sum(t["bytes"] for terms in layers for t in terms if t["name"] == term["name"])
            sizes = (kib(term["bytes"]), str(len(layers)), kib(total))
            table.add_row("" if i else label, term["name"], term["formula"], *sizes)
        whole = sum(term["bytes"] for term in largest)
        table.add_row("", "together", "", kib(whole), str(len(layers)), kib(profile["state_bytes"]))
        if profile["held_state_bytes"] is not None:
            table.add_row("", "allocated by streaming", "", kib(profile["held_state_bytes"]), "", "")
    return table


def layers_table(profile: dict[str, Any]) -> Table:
    title = f"Peak of the layers with {attention_label(profile['attention'])} beyond what each finds, measured, MiB"
    runs = profile["runs"]
    table = make_table("layer", *(f">{run['implementation']}\nbatch {run['batch']}" for run in runs), title=title)
    for layer in dict.fromkeys(layer for run in runs for layer in run["layers"]):
        table.add_row(layer, *(mib(run["layers"].get(layer)) for run in runs))
    return table


def totals_table(profiles: list[dict[str, Any]]) -> Table:
    title = f"Peak of inference, measured on {profiles[0]['device']}"
    numbers = (">batch", ">peak MiB", ">of eager", ">resident MiB", ">ms")
    table = make_table("attention", "implementation", *numbers, title=title)
    for profile in profiles:
        for run in profile["runs"]:
            eager = next(r for r in profile["runs"] if r["batch"] == run["batch"])
            share, resident = run["peak_bytes"] / eager["peak_bytes"], mib(run["resident_bytes"])
            sizes = (str(run["batch"]), mib(run["peak_bytes"]), f"{share:.1%}", resident, f"{run['latency_ms']:,.1f}")
            table.add_row(attention_label(profile["attention"]), run["implementation"], *sizes)
    return table
