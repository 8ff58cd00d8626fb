"""The figures of a report: each has its rows, its caption and its drawing in one table, `DEFINITIONS`.

A CSV table, a figure for papers and its caption all come from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from lrfdyn.analysis.report import drawings

Entry = dict[str, Any]
Row = Sequence[Any]


class Figure(NamedTuple):
    """A figure of some results: the rows of its table, the header first, its caption, and `draw(pyplot)`, which returns
    the matplotlib figure and is None where there is a table only."""

    rows: Sequence[Row]
    caption: str = ""
    draw: Callable[[Any], Any] | None = None


def figures(results: dict[str, Any]) -> dict[str, Figure]:
    """Return every figure and table that `results` have the numbers of, by name."""
    runs = results.get("runs", [])
    entries = [
        {**entry, "place": i, "runs": [run for run in runs if run["attention"] == key]}
        for i, (key, entry) in enumerate(results.get("attentions", {}).items())
    ]
    words = _words(results, entries)
    made = {}
    for name, (columns, rows_of, caption, drawing) in DEFINITIONS.items():
        shown = [entry for entry in ({**entry, "rows": list(rows_of(entry))} for entry in entries) if entry["rows"]]
        if shown:
            rows = [(entry["label"], *row) for entry in shown for row in entry["rows"]]
            draw = None if drawing is None else partial(drawing, entries=shown)
            made[name] = Figure([("model", *columns.split()), *rows], caption.format(**words), draw)
    for chart in results.get("charts", []):
        caption, draw = f"{chart['title']}. {chart['caption']}", partial(drawings.theory_chart, chart=chart)
        made[chart["id"].replace("-", "_")] = Figure(list(_chart(chart)), caption, draw)
    return made


def _words(results: dict[str, Any], entries: Sequence[Entry]) -> dict[str, str]:
    """What captions take from the results."""
    data = results.get("data") or {}
    kind = " of noise" if data.get("name") == "noise" else f" of {data['name']}" if data.get("name") else ""
    near = {_part(entry, "locality").get("short_distance") for entry in entries if _part(entry, "locality", "share")}
    several = any(len(entry.get("accuracy_values") or []) > 1 for entry in entries)
    cross = any(_part(entry, "receptive_field", "centre") for entry in entries)
    return {
        "images": f"{data.get('test', 'the')} {'' if kind == ' of noise' else 'test '}images{kind}",
        "near": str(near.pop()) if len(near) == 1 else "a quarter of the largest on the grid of each model",
        "weights": "Weights are absolute values, averaged over heads (channels for LRF-Dyn), added up over the time "
        "steps and normalised to sum 1 for every query",
        "cross": " and the cross the pixel under that position" * cross,
        "assumptions": " ".join(next(filter(None, (_part(entry, "energy", "assumptions") for entry in entries)), [])),
        "spread": f"Bars are ± {results.get('spread', 'the spread over the seeds')}."
        if several
        else "One run per model.",
        "band": "; the line is the mean over the seeds, the band runs from the lowest to the highest" * several,
    }


def _part(entry: Any, *names: str) -> Any:
    """A part of an entry; an empty one where it was not measured."""
    for name in names:
        entry = entry.get(name) or {}
    return entry


def _records(names: str, *part: str) -> Callable[[Entry], Iterator[Row]]:
    """Rows with these values of the records in a part of an entry."""
    return lambda entry: ([record.get(name) for name in names.split()] for record in _part(entry, *part))


def _percent(xlabel: str, ylabel: str, **more: Any) -> Callable[..., Any]:
    """A drawing of lines of shares, as percent."""
    return partial(drawings.curves, scale=100, xlabel=xlabel, ylabel=ylabel, **more)


def _by_layer(entry: Entry) -> Iterator[Row]:
    local = partial(_part, entry, "locality")
    for name, *values in zip(*map(local, ("layers", "weight_by_layer", "share_by_layer")), strict=False):
        yield from ((name, *row) for row in zip(local("distance"), *(v or [] for v in values), strict=False))


def _entropies(entry: Entry) -> Iterator[Row]:
    histogram = _part(entry, "locality", "entropy_histogram")
    edges = histogram.get("edges", [])
    densities = [histogram.get("density"), *histogram.get("density_by_layer", [])]
    for name, density in zip(["average", *_part(entry, "locality", "layers")], densities, strict=False):
        yield from ((name, *row) for row in zip(edges, edges[1:], density or [], strict=False))


def _rates(entry: Entry) -> Iterator[Row]:
    rates = _part(entry, "firing_by_layer").items()
    return ((name, i / max(1, len(rates) - 1), rate) for i, (name, rate) in enumerate(rates))


def _summary(entry: Entry) -> Iterator[Row]:
    flat = {**entry, **_part(entry, "energy"), **_part(entry, "locality")}
    yield [flat.get(name) for name in SUMMARY.split()]


def _placed(entry: Entry) -> Iterator[Row]:
    if entry.get("accuracy_mean") is not None and entry.get("state_bytes"):
        yield [entry[name] for name in PLACE.split()]


def _chart(chart: dict[str, Any]) -> Iterator[Row]:
    """The rows of a chart of theory: lines or a map of regions."""
    x, y = chart["x"]["label"], chart["y"]["label"]
    if chart["kind"] == "regions":
        yield x, y, "region"
        for row, value in zip(chart["cells"], chart["y"]["values"], strict=True):
            yield from ((at, value, chart["classes"][cell]) for at, cell in zip(chart["x"]["values"], row, strict=True))
    else:
        yield "series", x, y
        yield from ((series["label"], *point) for series in chart["series"] for point in series["points"])


PLACE = "parameters accuracy_mean accuracy_spread state_bytes peak_inference_bytes"
EPOCH = "epoch train_loss test_loss test_accuracy"
COUNTS = "kind accumulates multiply_accumulates energy_pj"
SUMMARY = (
    f"{PLACE} firing_rate images_per_second accumulates multiply_accumulates energy_pj short_distance "
    "short_range_share short_range_share_uniform mean_distance mean_distance_uniform entropy_mean entropy_uniform"
)
# Columns of the table, rows of one model, caption with words to fill in, and drawing.
DEFINITIONS: dict[str, tuple[str, Callable[[Entry], Iterable[Row]], str, Callable[..., Any] | None]] = {
    "summary": (SUMMARY, _summary, "", None),
    "memory": ("term formula elements bytes", _records("name formula elements bytes", "state_terms"), "", None),
    "attention_distance": (
        "distance weight share",
        lambda e: zip(*(_part(e, "locality", name) for name in ("distance", "weight", "share")), strict=False),
        "Mean attention weight against Manhattan distance on the token grid, averaged over layers, and the share of "
        "attention at a distance of at most {near}; {images}. {weights}.",
        drawings.attention_distance,
    ),
    "attention_distance_layers": (
        "layer distance weight share",
        _by_layer,
        "Mean attention weight against Manhattan distance, layer by layer; {images}. {weights}.",
        drawings.attention_distance_layers,
    ),
    "attention_entropy": (
        "layer bin_low bin_high density",
        _entropies,
        "Distribution of the entropy (natural logarithm) of the attention of single queries, averaged over layers, "
        "each curve divided by its largest value; {images}. {weights}; queries without any weight are left out.",
        drawings.attention_entropy,
    ),
    "receptive_fields": (
        "row column value",
        lambda e: ((i, j, v) for i, row in enumerate(_part(e, "receptive_field", "map")) for j, v in enumerate(row)),
        "Effective receptive fields: absolute gradient of the centre position of the last feature map with respect to "
        "the input, through the surrogate gradients, averaged over {images}, each map divided by its largest value; "
        "the colour is the square root{cross}.",
        drawings.receptive_fields,
    ),
    "receptive_field_share": (
        "side share",
        _records("side share", "receptive_field", "share_inside"),
        "Share of the effective receptive field inside centred squares; {images}.",
        _percent("side of a centred square (pixels)", "% of the receptive field inside", ylim=(0, 103)),
    ),
    "energy": (
        f"layer {COUNTS}",
        _records(f"name {COUNTS}", "energy", "layers"),
        "Energy of the synaptic operations of one image over all time steps, counted from the spikes that were sent; "
        "{images}. {assumptions}",
        drawings.energy,
    ),
    "firing_rates": (
        "layer depth firing_rate",
        _rates,
        "Firing rate of every neuron layer: spikes per neuron and time step; {images}.",
        _percent("depth (first to last neuron layer)", "firing rate (%)", ylim=(0, None), width=2 * drawings.WIDTH),
    ),
    "memory_accuracy": (
        PLACE,
        _placed,
        "Test accuracy against memory: left, the derived state of one attention layer for one image and time step; "
        "right, the measured peak of an evaluation pass at batch 1. The area of a point is proportional to the number "
        "of parameters. {spread}",
        drawings.memory_accuracy,
    ),
    "convergence": (
        f"seed {EPOCH}",
        lambda e: ((run.get("seed"), *row) for run in e["runs"] for row in _records(EPOCH, "curve")(run)),
        "Test accuracy and training loss after every epoch{band}.",
        drawings.convergence,
    ),
}
