"""Measure locality, receptive fields, firing, energy and memory of models and compare them in one report.

MODEL is a name, NAME or NAME:ATTENTION (random weights), the folder of a run of lrfdyn train, of lrfdyn sweep or of
lrfdyn reproduce, a saved model, a .safetensors file or a hub repository. Several give the comparison. Writes
report.html, results.json, tables/*.csv and figures/*.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lrfdyn.analysis.analyze import NOTES, PASSES, analyze, sources_for
from lrfdyn.analysis.measure.maps import parse_queries
from lrfdyn.analysis.measure.observe import RANDOM, Images, load_images
from lrfdyn.analysis.measure.spikes import EnergyModel
from lrfdyn.analysis.report.write import FORMATS, check_formats, noun_of, write_all
from lrfdyn.commands.shared import MIB, bars, comma_list, command_line, make_table, number, plain_console
from lrfdyn.data.base import DATA
from lrfdyn.devices import choose_device
from lrfdyn.errors import require
from lrfdyn.files import sole_user
from lrfdyn.sources import Source

ENERGY = EnergyModel()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("models", nargs="+", metavar="MODEL", help="what to analyse")
    add("--data", default=RANDOM, help=f"test images or recordings of {', '.join(DATA)}, or {RANDOM} noise")
    add("--data-root", type=Path, help="folder of the data's files")
    add("--image-size", type=int, help="pixels a side; default the data's, or for noise the model's")
    add("--frames", type=int, help="of every recording, which must be the model's time steps; default 16")
    add("--images", type=int, default=64, help="how many, at equal steps through the test set")
    add("--batch-size", type=int, default=16, help="images at a time")
    many = "attention maps of so many of the images, or of image files; results.json then holds these pictures"
    add("--maps", type=comma_list, default="", metavar="N|A,B", help=many)
    places = "tokens whose maps are shown, ROW:COLUMN on the grid; default the middle and a quarter of both sides"
    add("--queries", type=comma_list, default="", metavar="R:C,R:C", help=places)
    add("--out", type=Path, default=Path("analysis"), help="folder for report, results, tables and figures")
    add("--device", default="auto", help="cpu, cuda, or auto: a GPU where there is one")
    add("--figures", type=comma_list, default=",".join(FORMATS), metavar="A,B", help="formats, or none")
    add("--accumulate-pj", type=float, default=ENERGY.accumulate_pj, help="energy of an accumulate")
    add("--mac-pj", type=float, default=ENERGY.multiply_accumulate_pj, help="energy of a multiply-accumulate")
    patterns = "shell patterns of layers that multiply-accumulate even if their input is spikes"
    add("--mac-layers", type=comma_list, default="", metavar="A,B", help=patterns)
    add("--repeat-first", action="store_true", help="count the first layer of a static image at every time step")


def run(args: argparse.Namespace) -> None:
    formats, device = check_formats(args.figures), choose_device(args.device)
    energy = EnergyModel(args.accumulate_pj, args.mac_pj, tuple(args.mac_layers), args.repeat_first)
    queries = parse_queries(args.queries)
    require(bool(args.maps) or not queries, "queries: only with --maps, which asks for attention maps")
    images = load_images(args.data, args.data_root, args.images, args.batch_size, device, args.image_size, args.frames)
    sources = [source for text in args.models for source in sources_for(text, images)]
    with sole_user(args.out):
        console = plain_console(100)
        results = analyze_with_bar(sources, images, console, energy=energy, maps=args.maps, queries=queries)
        first = next(iter(results["attentions"].values()))
        lines = [f"energy: {line}" for line in first["energy"]["assumptions"]]
        lines += results["notes"][: -len(NOTES)]  # those of these models, before those of every analysis
        write_and_print(results, args.out, formats, console, models_table(results), lines)


def analyze_with_bar(sources: list[Source], images: Images, console: Console, **options: Any) -> dict[str, Any]:
    """Run `analyze` with the command line as its command and a progress bar."""
    with bars(console) as bar:
        total = len(sources) * PASSES * images.count
        task = bar.add_task(f"{images.noun}s", total=total, news="")
        options["progress"] = lambda model, what, n: bar.update(task, advance=n, news=f"{Path(model).name}: {what}")
        results = analyze(sources, images, command=command_line(), **options)
        bar.update(task, completed=total, news="")
    return results


def write_and_print(
    results: dict[str, Any], out: Path, formats: Sequence[str], console: Console, table: Table, lines: Sequence[str]
) -> None:
    """Write the report of `results` to the folder `out`, and print `table`, `lines` and what was written."""
    written = write_all(results, out, formats)
    console.print(table, *(line.replace("`", "") for line in lines), sep="\n")
    console.print(written, soft_wrap=True)


COLUMNS = (  # title, field of an entry, format and unit
    ("accuracy", "accuracy_mean", ".1%", 1),
    ("±", "accuracy_spread", ".1%", 1),
    ("params", "parameters", ",.0f", 1),
    ("state\nKiB", "state_bytes", ",.1f", 1024),
    ("peak\nMiB", "peak_inference_bytes", ",.1f", MIB),
    ("firing", "firing_rate", ".1%", 1),
    ("µJ per\n{noun}", "energy_pj", ",.2f", 1e6),
    ("share\nnear", "short_range_share", ".1%", 1),
    ("entropy", "entropy_mean", ".2f", 1),
    ("{noun}s\nper s", "images_per_second", ",.1f", 1),
)


def models_table(results: dict[str, Any]) -> Table:
    """Return a table with one row per model and a dash for what is not known of it."""
    titles = (title.format(noun=noun_of(results)) for title, *_ in COLUMNS)
    table = make_table("model", *(f">{title}" for title in titles), title=results["title"])
    for entry in results["attentions"].values():
        flat = {**entry, **entry["energy"], **entry.get("locality", {})}
        table.add_row(entry["label"], *(number(flat.get(field), form, unit) for _, field, form, unit in COLUMNS))
    return table
