"""Show where the inference memory of a model goes, derived and measured.

For each attention: what its layers must hold, term by term, and the peak of plain (eager) and low-memory inference by
layer and in total: of the allocator, and on a CPU also the growth of the resident set. Weights and images are not
counted. Images, and the weights of a model that is given by name, are random: memory does not depend on them.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from lrfdyn.analysis.measure.inference import largest_state, profile_model
from lrfdyn.analysis.report.drawings import check_plot, plot_memory
from lrfdyn.attention import ATTENTIONS, attention_label, attention_options
from lrfdyn.commands.models import NONE, TABLE, wide_console
from lrfdyn.convert.swap import swap_attention
from lrfdyn.devices import choose_device
from lrfdyn.errors import require
from lrfdyn.models import SpikingModel
from lrfdyn.sources import Source, find_source

KINDS = ("ssa", "lrf_ssa", "lrf_dyn")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", help="folder of a run or of a saved model, .safetensors file, hub repository, or NAME[:ATTENTION]")
    add(
        "--attention", nargs="+", metavar="KIND",
        help=f"of {', '.join(ATTENTIONS)}; default: {', '.join(KINDS)} for a name, else the model's own",
    )  # fmt: skip
    add("--batch", nargs="+", type=int, default=[1, 64], help="images at once")
    add("--time-steps", type=int, help="instead of the model's own (with a name)")
    add("--image-size", type=int, help="instead of the model's own (with a name)")
    add("--device", help="cpu or cuda; default: cuda where there is one")
    add("--repeats", type=int, default=3, help="calls that are timed; the fastest counts")
    add("--plot", type=Path, metavar="FILE", help="also draw a figure (needs matplotlib)")
    add("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> None:
    require(min(arguments.batch) >= 1, f"batch: expected integers >= 1, got {min(arguments.batch)}")
    require(arguments.repeats >= 1, f"repeats: expected an integer >= 1, got {arguments.repeats}")
    for kind in arguments.attention or ():
        attention_options(kind)
    device = choose_device(arguments.device)
    require(device.type in ("cpu", "cuda"), f"device: expected cpu or cuda, got {device}")
    if arguments.plot is not None:
        check_plot(arguments.plot)  # what is wrong is told before the measuring
    given = {"time_steps": arguments.time_steps, "image_size": arguments.image_size}
    source = find_source(arguments.model, **{key: value for key, value in given.items() if value is not None})
    profiles = [
        profile_model(model, source.origin, arguments.batch, device, repeats=arguments.repeats)
        for model in models(source, arguments.attention)
    ]
    if arguments.plot is not None:
        draw(profiles, arguments.plot)
    if arguments.json:
        print(json.dumps(profiles, indent=1))
        return
    console = wide_console()
    console.print(state_table(profiles), *map(layers_table, profiles), totals_table(profiles))
    for note in dict.fromkeys(note for profile in profiles for note in profile["notes"]):
        console.print(note, highlight=False, soft_wrap=True)


def models(source: Source, kinds: Sequence[str] | None) -> Iterator[SpikingModel]:
    """The model with each of the attentions, one after the other."""
    model = source.load().float()
    own: str = model.config.get("attention", "")
    require(bool(own), f"model: expected one with attention, got {source.origin}")
    for kind in kinds or ([own] if source.trained or ":" in source.origin else KINDS):
        other = copy.deepcopy(model)
        if kind != own:
            swap_attention(other, kind)
        yield other


def kib(size: int | None) -> str:
    return NONE if size is None else f"{size / 2**10:,.1f}"


def mib(size: int | None) -> str:
    return NONE if size is None else f"{size / 2**20:,.{1 if size >= 10 * 2**20 else 2}f}"


def empty_table(title: str, texts: Sequence[str], numbers: Sequence[str]) -> Table:
    """A table with columns of texts and then of numbers."""
    table = Table(title=title, title_justify="left", **TABLE)
    for header in texts:
        table.add_column(header, no_wrap=True)
    for header in numbers:
        table.add_column(header, justify="right")
    return table


def state_table(profiles: list[dict[str, Any]]) -> Table:
    """Terms of all attention layers, for one image and time step."""
    title = "What attention must hold, derived, for one image and time step"
    table = empty_table(title, ("attention", "term", "formula"), ("KiB a layer", "layers", "KiB in all"))
    for profile in profiles:
        label, layers = attention_label(profile["attention"]), profile["layers"].values()
        largest = largest_state(profile["layers"])
        if not largest:
            table.add_row(label, NONE, NONE, NONE, NONE, NONE)
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
    table = empty_table(title, ("layer",), [f"{run_['implementation']}\nbatch {run_['batch']}" for run_ in runs])
    for layer in dict.fromkeys(layer for run_ in runs for layer in run_["layers"]):
        table.add_row(layer, *(mib(run_["layers"].get(layer)) for run_ in runs))
    return table


def totals_table(profiles: list[dict[str, Any]]) -> Table:
    title = f"Peak of inference, measured on {profiles[0]['device']}"
    numbers = ("batch", "peak MiB", "of eager", "resident MiB", "ms")
    table = empty_table(title, ("attention", "implementation"), numbers)
    for profile in profiles:
        for run_ in profile["runs"]:
            eager = next(r for r in profile["runs"] if r["batch"] == run_["batch"])
            peak, share = run_["peak_bytes"], run_["peak_bytes"] / eager["peak_bytes"]
            resident, latency = mib(run_["resident_bytes"]), f"{run_['latency_ms']:,.1f}"
            texts = (attention_label(profile["attention"]), run_["implementation"])
            table.add_row(*texts, str(run_["batch"]), mib(peak), f"{share:.1%}", resident, latency)
    return table


def draw(profiles: list[dict[str, Any]], path: Path) -> None:
    peaks = [
        {
            "group": f"batch {run_['batch']}",
            "label": attention_label(profile["attention"]),
            "implementation": run_["implementation"],
            "mib": run_["peak_bytes"] / 2**20,
        }
        for profile in profiles
        for run_ in profile["runs"]
    ]
    plot_memory({attention_label(p["attention"]): largest_state(p["layers"]) for p in profiles}, peaks, path)
