"""What results leave in a folder, whoever made them: results.json, the interactive report, one HTML file that needs no
network, and tables and figures, of which `DEFINITIONS` has rows and captions and `drawings` the drawings."""

from __future__ import annotations

import html
import importlib.util
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from functools import partial
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

from lrfdyn.analysis.report import drawings
from lrfdyn.analysis.report.look import NEEDED, STYLE, pyplot
from lrfdyn.checks import checked
from lrfdyn.errors import LrfdynError, require, unknown_name
from lrfdyn.files import finite, write_atomic, write_json, write_table
from lrfdyn.version import __version__

RESULTS_FORMAT = "lrfdyn-results/1"
FORMATS = ("pdf", "svg", "png")
STAMPS = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}  # the same figure is the same file
# Inlined in this order: the later scripts use the functions of the earlier ones, and those of every page come first.
EVERYWHERE = ("report_base", "report_frame", "report_charts")
SCRIPTS = (*(f"report_{name}" for name in ("figures", "maps", "tables", "energy", "theory")), "report")
Entry = dict[str, Any]
Row = Sequence[Any]


def results_head(title: str, lead: str, command: str) -> dict[str, Any]:
    """Return what all results begin with."""
    head = {"format": RESULTS_FORMAT, "title": title, "lead": lead, "command": command}
    return {**head, "created": datetime.now().isoformat(timespec="seconds"), "version": __version__}


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def has_matplotlib() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def check_formats(formats: Sequence[str]) -> tuple[str, ...]:
    """Return the formats to write, none for "none"; an unknown one or a missing matplotlib is an error."""
    chosen = () if tuple(formats) == ("none",) else tuple(formats)
    for name in chosen:
        if name not in FORMATS:
            raise unknown_name("figures", name, [*FORMATS, "none"])
    require(not chosen or has_matplotlib(), f"figures: {NEEDED}, or pass --figures none")
    return chosen


@checked
def write_all(results: dict[str, Any], out: Path, formats: Sequence[str]) -> str:
    """Write `results` into the folder `out` (results.json, report.html, tables/*.csv and, in every one of `formats`,
    figures/* with captions.txt) and return a line that names what was written."""
    report, data, tables = out / "report.html", out / "results.json", out / "tables"
    try:
        write_json(data, results)
        write_report(results, report)
        made = figures(results)
        for name, figure in made.items():
            header, *rows = figure.rows
            write_table(tables / f"{name}.csv", [dict(zip(header, row, strict=True)) for row in rows])
        line = f"Report: {report}   results: {data}   {len(made)} tables: {tables}"
        if formats:
            drawn = write_figures(results, out / "figures", formats)
            line += f"   {len(drawn)} figures: {out / 'figures'}"
    except OSError as error:
        raise LrfdynError(f"out: cannot write in {out} ({error.strerror})") from None
    return line


def write_figures(results: dict[str, Any], folder: Path, formats: Sequence[str]) -> list[Path]:
    """Draw every figure that `results` have the numbers of in every format, write captions.txt beside them, and return
    the paths of the figures."""
    plt = pyplot("figures")
    paths, captions = [], []
    for name, figure in figures(results).items():
        if figure.draw is None:
            continue
        with plt.rc_context(STYLE):
            drawing = figure.draw(plt)
            if drawing is None:  # too little to draw
                continue
            for form in formats:
                paths.append(folder / f"{name}.{form}")
                write_atomic(paths[-1], partial(drawing.savefig, format=form, metadata=STAMPS.get(form)))
            plt.close(drawing)
        captions.append(f"{name}: {figure.caption.replace('`', '')}\n")
    write_atomic(folder / "captions.txt", lambda file: file.write_text("\n".join(captions), encoding="utf-8"))
    return paths


@checked
def write_report(results: dict[str, Any], path: Path) -> None:
    """Write the report of `results` to `path`, replacing an older one only when the new one is complete."""
    page = render_report(results)
    write_atomic(Path(path), lambda file: file.write_text(page, encoding="utf-8", newline="\n"))


@checked
def render_report(results: dict[str, Any]) -> str:
    """Return the report of `results` as one HTML page with its style, scripts and data inside."""
    found = results.get("format")
    require(found == RESULTS_FORMAT, f"results: expected the format {RESULTS_FORMAT!r}, got {found!r}")
    return render_page(results, ("report",), SCRIPTS)


def render_page(results: dict[str, Any], styles: Sequence[str], scripts: Sequence[str]) -> str:
    """Return an HTML page of `results` with these files of this folder inside, and those that every page has."""

    def asset(name: str) -> str:
        return resources.files("lrfdyn.analysis.report").joinpath(name).read_text(encoding="utf-8")

    data = json.dumps(finite(results), allow_nan=False, separators=(",", ":"))
    return Template(asset("report.html")).substitute(
        title=html.escape(str(results.get("title", "lrfdyn report"))),
        style="\n".join(asset(f"{name}.css") for name in styles),
        # A bare "<" could close the script element ("</script>") or open a comment in it ("<!--").
        data=data.replace("<", "\\u003c"),
        script="\n".join(asset(f"{name}.js") for name in (*EVERYWHERE, *scripts)),
    )


class Figure(NamedTuple):
    """A figure of some results."""

    rows: Sequence[Row]  # of its table, the header first
    caption: str
    # Takes pyplot, returns a figure or, for a lone dot, None; without one a table only.
    draw: Callable[[Any], Any] | None


def figures(results: dict[str, Any]) -> dict[str, Figure]:
    """Return every figure and table that `results` have the numbers of, by name."""
    runs, common = results.get("runs", []), {"pictures": results.get("pictures", []), "noun": noun_of(results)}
    entries = [
        {"place": i, **entry, "runs": [run for run in runs if run["attention"] == key], **common}
        for i, (key, entry) in enumerate(results.get("attentions", {}).items())
    ]
    words = _words(results, entries)
    made = {}
    for name, (columns, rows_of, caption) in DEFINITIONS.items():
        shown = [entry for entry in ({**entry, "rows": list(rows_of(entry))} for entry in entries) if entry["rows"]]
        if shown:
            rows = [(entry["label"], *row) for entry in shown for row in entry["rows"]]
            drawing = getattr(drawings, name, None)
            draw = drawing and partial(drawing, entries=shown)
            made[name] = Figure([("model", *columns.split()), *rows], caption.format(**words), draw)
    for chart in results.get("charts", []):
        caption, draw = f"{chart['title']}. {chart['caption']}", partial(drawings.theory_chart, chart=chart)
        made[chart["id"].replace("-", "_")] = Figure(_chart_rows(chart), caption, draw)
    return made


def noun_of(results: dict[str, Any]) -> str:
    """What one of the things is that results were measured on: an image or a recording."""
    return (results.get("data") or {}).get("kind") or "image"


def _words(results: dict[str, Any], entries: Sequence[Entry]) -> dict[str, str]:
    """What captions take from the results."""
    data = results.get("data") or {}
    kind = " of noise" if data.get("name") == "noise" else f" of {data['name']}" if data.get("name") else ""
    near = {_part(entry, "locality").get("short_distance") for entry in entries if _part(entry, "locality", "share")}
    several = any(len(entry.get("accuracy_values") or []) > 1 for entry in entries)
    cross = any(_part(entry, "receptive_field", "centre") for entry in entries)
    return {
        "images": f"{data.get('test', 'the')} {'' if kind == ' of noise' else 'test '}{noun_of(results)}s{kind}",
        "noun": noun_of(results),
        "summed": " The picture is the sum of all frames, brighter in orange and darker in blue."
        * (noun_of(results) == "recording"),
        "near": str(near.pop()) if len(near) == 1 else "a quarter of the largest on the grid of each model",
        "weights": "Weights are absolute values, averaged over heads (channels for LRF-Dyn), added up over the time "
        "steps and normalised to sum 1 for every query",
        "cross": " and the cross the pixel under that position" * cross,
        "assumptions": " ".join(next(filter(None, (_part(entry, "energy", "assumptions") for entry in entries)), [])),
        "spread": f"Bars are ± {results.get('spread')}." if several else "One run per model.",
        "band": "; the line is the mean over the seeds, the band runs from the lowest to the highest" * several,
    }


def _part(entry: Any, *names: str) -> Any:
    """A part of an entry; an empty one where it was not measured."""
    for name in names:
        entry = entry.get(name) or {}
    return entry


def _records(names: str, *part: str) -> Callable[[Entry], Iterator[Row]]:
    """Rows with these values of the records in a part of an entry."""
    return lambda entry: (_values(record, names) for record in _part(entry, *part))


def _values(record: Entry, names: str) -> Row:
    return [record.get(name) for name in names.split()]


def _by_layer(entry: Entry) -> Iterator[Row]:
    local = partial(_part, entry, "locality")
    for name, *values in zip(*map(local, ("layers", "weight_by_layer", "share_by_layer")), strict=False):
        yield from ((name, *row) for row in zip(local("distance"), *(v or [] for v in values), strict=False))


def _histogram(name: str, values: str) -> Callable[[Entry], Iterator[Row]]:
    """Rows with the bins of a histogram of locality, averaged and of every layer."""

    def rows(entry: Entry) -> Iterator[Row]:
        histogram = _part(entry, "locality", name)
        edges = histogram.get("edges", [])
        found = [histogram.get(values), *histogram.get(f"{values}_by_layer", [])]
        for layer, one in zip(["average", *_part(entry, "locality", "layers")], found, strict=False):
            yield from ((layer, *row) for row in zip(edges, edges[1:], one or [], strict=False))

    return rows


def _maps(part: str) -> Callable[[Entry], Iterator[Row]]:
    """Rows with the attention maps of all pictures and queries: the average or those of the layers."""

    def rows(entry: Entry) -> Iterator[Row]:
        looks = _part(entry, "attention_maps")
        for picture, queries in zip(entry["pictures"], looks.get("maps", []), strict=False):
            for place, found in zip(looks["queries"], queries, strict=True):
                average = part == "average"
                names, fields = (["average"], [found[part]]) if average else (looks["layers"], found[part])
                for layer, field in zip(names, fields, strict=True):
                    for i, row in enumerate(field or []):
                        yield from ((picture["name"], *place, layer, i, j, value) for j, value in enumerate(row))

    return rows


def _rates(entry: Entry) -> Iterator[Row]:
    rates = _part(entry, "firing_by_layer").items()
    return ((name, i / max(1, len(rates) - 1), rate) for i, (name, rate) in enumerate(rates))


def _chart_rows(chart: dict[str, Any]) -> list[Row]:
    """The rows of a chart of theory: lines or a map of regions."""
    x, y = chart["x"], chart["y"]
    if chart["kind"] == "lines":
        points = ((series["label"], *point) for series in chart["series"] for point in series["points"])
        return [("series", x["label"], y["label"]), *points]
    places = ((at, value) for value in y["values"] for at in x["values"])
    regions = (chart["classes"][cell] for row in chart["cells"] for cell in row)
    rows = ((*place, region) for place, region in zip(places, regions, strict=True))
    return [(x["label"], y["label"], "region"), *rows]


PLACE = "parameters accuracy_mean accuracy_spread state_bytes peak_inference_bytes"
EPOCH = "epoch train_loss test_loss test_accuracy"
COUNTS = "kind accumulates multiply_accumulates energy_pj"
SUMMARY = (
    f"{PLACE} firing_rate images_per_second accumulates multiply_accumulates energy_pj short_distance "
    "short_range_share short_range_share_uniform mean_distance mean_distance_uniform entropy_mean entropy_uniform"
)
# Columns of the table, rows of one model, and the caption with words to fill in. The function of the same name in
# `drawings` draws it; without one it is a table only.
DEFINITIONS: dict[str, tuple[str, Callable[[Entry], Iterable[Row]], str]] = {
    "summary": (SUMMARY, lambda e: [_values({**e, **_part(e, "energy"), **_part(e, "locality")}, SUMMARY)], ""),
    "memory": ("term formula elements bytes", _records("name formula elements bytes", "state_terms"), ""),
    "attention_distance": (
        "distance weight share",
        lambda e: zip(*(_part(e, "locality", name) for name in ("distance", "weight", "share")), strict=False),
        "Mean attention weight against Manhattan distance on the token grid, averaged over layers, and the share of "
        "attention at a distance of at most {near}; {images}. {weights}.",
    ),
    "attention_distance_layers": (
        "layer distance weight share",
        _by_layer,
        "Mean attention weight against Manhattan distance, layer by layer; {images}. {weights}.",
    ),
    "attention_entropy": (
        "layer bin_low bin_high density",
        _histogram("entropy_histogram", "density"),
        "Distribution of the entropy (natural logarithm) of the attention of single queries, averaged over layers, "
        "each curve divided by its largest value; {images}. {weights}; queries without any weight are left out.",
    ),
    "attention_scores": (
        "layer bin_low bin_high share",
        _histogram("score_histogram", "share"),
        "Distribution of the attention weights of all pairs of a query and a key, in units of the uniform weight 1/N, "
        "averaged over layers, in bins of equal width on the logarithmic axis (the first one holds all that is less); "
        "the legend has the mean entropy of a query's weights and the share of pairs whose weight is zero, which have "
        "no bin; {images}. {weights}.",
    ),
    "attention_maps": (
        "picture query_row query_column layer row column weight",
        _maps("average"),
        "Attention of single queries (outlined), laid over the picture: the weights that the query gives the tokens, "
        "averaged over layers, each map divided by its largest value. {weights}; those of LRF-Dyn do not depend on the "
        "{noun}.{summed}",
    ),
    "attention_maps_layers": (
        "picture query_row query_column layer row column weight",
        _maps("by_layer"),
        "Attention of single queries (outlined), laid over the picture, layer by layer: the weights that the query "
        "gives the tokens, each map divided by its largest value; no map where it gives none. {weights}; those of "
        "LRF-Dyn do not depend on the {noun}.{summed}",
    ),
    "receptive_fields": (
        "row column value",
        lambda e: ((i, j, v) for i, row in enumerate(_part(e, "receptive_field", "map")) for j, v in enumerate(row)),
        "Effective receptive fields: absolute gradient of the centre position of the last feature map with respect to "
        "the input, through the surrogate gradients, averaged over {images}, each map divided by its largest value; "
        "the colour is the square root{cross}.",
    ),
    "receptive_field_share": (
        "side share",
        _records("side share", "receptive_field", "share_inside"),
        "Share of the effective receptive field inside centred squares; {images}.",
    ),
    "energy": (
        f"layer {COUNTS}",
        _records(f"name {COUNTS}", "energy", "layers"),
        "Energy of the synaptic operations of one {noun} over all time steps, counted from the spikes that were sent; "
        "{images}. {assumptions}",
    ),
    "firing_rates": (
        "layer depth firing_rate",
        _rates,
        "Firing rate of every neuron layer: spikes per neuron and time step; {images}.",
    ),
    "memory_accuracy": (
        PLACE,
        lambda e: [_values(e, PLACE)] * bool(e.get("state_bytes") and e.get("accuracy_mean") is not None),
        "Test accuracy against memory: left, the derived state of one attention layer for one {noun} and time step; "
        "right, the measured peak of an evaluation pass at batch 1. The area of a point is proportional to the number "
        "of parameters. {spread}",
    ),
    "convergence": (
        f"seed {EPOCH}",
        lambda e: ((run.get("seed"), *row) for run in e["runs"] for row in _records(EPOCH, "curve")(run)),
        "Test accuracy and training loss after every epoch{band}.",
    ),
}
