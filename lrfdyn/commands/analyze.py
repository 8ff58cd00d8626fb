"""Measure locality, receptive fields, firing, energy and memory of models and compare them in one report.

MODEL is a name, NAME or NAME:ATTENTION (random weights), the folder of a run of lrfdyn train, of lrfdyn sweep or of
lrfdyn reproduce, a saved model, a .safetensors file or a hub repository. Several give the comparison. Writes
report.html, results.json, tables/*.csv and figures/*.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from lrfdyn.analysis.analyze import NOTES, PASSES, analyze, find_sources
from lrfdyn.analysis.measure.observe import RANDOM, Images, load_images
from lrfdyn.analysis.measure.spikes import EnergyModel
from lrfdyn.analysis.report.write import FORMATS, check_formats, write_all
from lrfdyn.commands.arguments import comma_list, command_line
from lrfdyn.commands.bar import bars
from lrfdyn.commands.models import wide_console
from lrfdyn.data.base import DATA
from lrfdyn.devices import choose_device
from lrfdyn.files import writable_folder
from lrfdyn.sources import Source

ENERGY = EnergyModel()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("models", nargs="+", metavar="MODEL", help="what to analyse")
    add("--data", default=RANDOM, help=f"test images of {', '.join(DATA)}, or {RANDOM} noise")
    add("--data-root", type=Path, help="folder of the data's files")
    add("--image-size", type=int, help="pixels a side; default the data's, or for noise the model's")
    add("--images", type=int, default=64, help="how many, at equal steps through the test set")
    add("--batch-size", type=int, default=16, help="images at a time")
    add("--out", type=Path, default=Path("analysis"), help="folder for report, results, tables and figures")
    add("--device", default="auto", help="cpu, cuda, or auto: a GPU where there is one")
    add("--figures", type=comma_list, default=",".join(FORMATS), metavar="A,B", help="formats, or none")
    add("--accumulate-pj", type=float, default=ENERGY.accumulate_pj, help="energy of an accumulate")
    add("--mac-pj", type=float, default=ENERGY.multiply_accumulate_pj, help="energy of a multiply-accumulate")
    add("--mac-layers", type=comma_list, default="", metavar="A,B",
        help="shell patterns of layers that multiply-accumulate even if their input is spikes")  # fmt: skip
    add("--repeat-first", action="store_true", help="count the first layer of a static image at every time step")


def run(arguments: argparse.Namespace) -> None:
    formats = check_formats(arguments.figures)
    energy = EnergyModel(arguments.accumulate_pj, arguments.mac_pj, tuple(arguments.mac_layers), arguments.repeat_first)
    device = choose_device(arguments.device)
    images = load_images(
        arguments.data, arguments.data_root, arguments.images, arguments.batch_size, device, arguments.image_size
    )
    sources = [source for text in arguments.models for source in find_sources(text, images)]
    writable_folder(arguments.out, "out")
    console = wide_console(100)
    results = analyze_with_bar(sources, images, console, energy=energy)
    written = write_all(results, arguments.out, formats)
    console.print(table(results))
    first = next(iter(results["attentions"].values()))
    for line in first["energy"]["assumptions"]:
        console.print(f"energy: {line}", highlight=False)
    for note in results["notes"][: -len(NOTES)]:  # those of these models, before those of every analysis
        console.print(note, highlight=False)
    console.print(written, highlight=False, soft_wrap=True)


def analyze_with_bar(sources: list[Source], images: Images, console: Console, **options: Any) -> dict[str, Any]:
    """Run `analyze` with the command line as its command and a progress bar."""
    with bars(console) as bar:
        total = len(sources) * PASSES * images.count
        task = bar.add_task("images", total=total, news="")

        def progress(model: str, what: str, done: int) -> None:
            bar.update(task, advance=done, news=f"{Path(model).name}: {what}")

        results = analyze(sources, images, command=command_line(), progress=progress, **options)
        bar.update(task, completed=total, news="")
    return results


COLUMNS = (  # title, field of an entry, format and unit
    ("accuracy", "accuracy_mean", "{:.1%}", 1),
    ("±", "accuracy_spread", "{:.1%}", 1),
    ("params", "parameters", "{:,.0f}", 1),
    ("state\nKiB", "state_bytes", "{:,.1f}", 1024),
    ("peak\nMiB", "peak_inference_bytes", "{:,.1f}", 2**20),
    ("firing", "firing_rate", "{:.1%}", 1),
    ("µJ per\nimage", "energy_pj", "{:,.2f}", 1e6),
    ("share\nnear", "short_range_share", "{:.1%}", 1),
    ("entropy", "entropy_mean", "{:.2f}", 1),
    ("images\nper s", "images_per_second", "{:,.0f}", 1),
)


def table(results: dict[str, Any]) -> Table:
    """Return a table with one row per model and a dash for what is not known of it."""
    made = Table(title=results["title"], box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    made.add_column("model", overflow="fold", min_width=20)
    for title, *_ in COLUMNS:
        made.add_column(title, justify="right", no_wrap=True)
    for entry in results["attentions"].values():
        flat = {**entry, **entry["energy"], **entry.get("locality", {})}
        values = ((flat.get(field), form, unit) for _, field, form, unit in COLUMNS)
        made.add_row(entry["label"], *("-" if v is None else form.format(v / unit) for v, form, unit in values))
    return made
