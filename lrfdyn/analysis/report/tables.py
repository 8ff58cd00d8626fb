"""The numbers of an analysis as CSV files, one row per number and its place."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lrfdyn.files import write_atomic

Row = Sequence[Any]


def write_tables(results: dict[str, Any], folder: Path) -> list[Path]:
    """Writes every table that `results` have the numbers of and returns their paths."""
    paths = []
    for name, rows in tables(results).items():
        if len(rows) > 1:
            path = folder / f"{name}.csv"
            write_atomic(path, lambda file, rows=rows: _write(file, rows))  # type: ignore[misc]
            paths.append(path)
    return paths


def _write(path: Path, rows: Sequence[Row]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)


def tables(results: dict[str, Any]) -> dict[str, list[Row]]:
    """Tables by name, each with its header first."""
    entries = [(entry["label"], entry) for entry in results.get("attentions", {}).values()]
    made: dict[str, list[Row]] = {
        "summary": [SUMMARY, *(_summary(entry) for _, entry in entries)] if entries else [],
        "memory": [("model", "term", "formula", "elements", "bytes"), *_each(entries, _memory)],
        "energy": [
            ("model", "layer", "kind", "accumulates", "multiply_accumulates", "energy_pj"),
            *_each(entries, _energy),
        ],
        "firing": [("model", "layer", "firing_rate"), *_each(entries, _firing)],
        "attention_distance": [("model", "layer", "distance", "weight", "share"), *_each(entries, _distance)],
        "attention_entropy": [("model", "layer", "bin_low", "bin_high", "density"), *_each(entries, _entropy)],
        "receptive_field": [("model", "row", "column", "value"), *_each(entries, _field)],
        "receptive_field_share": [("model", "side", "share"), *_each(entries, _field_share)],
        "convergence": [CURVE, *_curves(results)],
    }
    for chart in results.get("charts", []):
        made[chart["id"].replace("-", "_")] = list(_chart(chart))
    return made


SUMMARY = (
    "label", "parameters", "accuracy_mean", "accuracy_spread", "state_bytes", "peak_inference_bytes", "firing_rate",
    "images_per_second", "accumulates", "multiply_accumulates", "energy_pj", "short_distance", "short_range_share",
    "short_range_share_uniform", "mean_distance", "mean_distance_uniform", "entropy_mean", "entropy_uniform",
)  # fmt: skip
CURVE = ("model", "seed", "epoch", "train_loss", "test_loss", "test_accuracy")


def _summary(entry: dict[str, Any]) -> Row:
    flat = {**entry, **(entry.get("energy") or {}), **(entry.get("locality") or {})}
    return [flat.get(name) for name in SUMMARY]


def _each(entries: Sequence[tuple[str, dict[str, Any]]], rows: Any) -> Iterator[Row]:
    for label, entry in entries:
        for row in rows(entry):
            yield (label, *row)


def _memory(entry: dict[str, Any]) -> Iterator[Row]:
    for term in entry.get("state_terms") or []:
        yield term["name"], term["formula"], term["elements"], term["bytes"]


def _energy(entry: dict[str, Any]) -> Iterator[Row]:
    for layer in (entry.get("energy") or {}).get("layers", []):
        yield tuple(layer[key] for key in ("name", "kind", "accumulates", "multiply_accumulates", "energy_pj"))


def _firing(entry: dict[str, Any]) -> Iterator[Row]:
    yield from (entry.get("firing_by_layer") or {}).items()


def _distance(entry: dict[str, Any]) -> Iterator[Row]:
    local = entry.get("locality") or {}
    layers = [("average", local.get("weight"), local.get("share"))]
    layers += zip(local.get("layers", []), local.get("weight_by_layer", []), local.get("share_by_layer", []),
                  strict=False)  # fmt: skip
    for name, weights, shares in layers:
        for distance, weight, share in zip(local.get("distance", []), weights or [], shares or [], strict=False):
            yield name, distance, weight, share


def _entropy(entry: dict[str, Any]) -> Iterator[Row]:
    local = entry.get("locality") or {}
    histogram = local.get("entropy_histogram") or {}
    edges = histogram.get("edges", [])
    layers = [("average", histogram.get("density"))]
    layers += zip(local.get("layers", []), histogram.get("density_by_layer", []), strict=False)
    for name, density in layers:
        for i, value in enumerate(density or []):
            yield name, edges[i], edges[i + 1], value


def _field(entry: dict[str, Any]) -> Iterator[Row]:
    for i, row in enumerate((entry.get("receptive_field") or {}).get("map", [])):
        for j, value in enumerate(row):
            yield i, j, value


def _field_share(entry: dict[str, Any]) -> Iterator[Row]:
    for square in (entry.get("receptive_field") or {}).get("share_inside", []):
        yield square["side"], square["share"]


def _curves(results: dict[str, Any]) -> Iterator[Row]:
    labels = {key: entry["label"] for key, entry in results.get("attentions", {}).items()}
    for run in results.get("runs", []):
        for record in run.get("curve") or []:
            yield labels.get(run["attention"]), run["seed"], *(record.get(name) for name in CURVE[2:])


def _chart(chart: dict[str, Any]) -> Iterator[Row]:
    """A chart of theory: lines or a map of regions."""
    x, y = chart["x"]["label"], chart["y"]["label"]
    if chart["kind"] == "regions":
        yield x, y, "region"
        for row, value in zip(chart["cells"], chart["y"]["values"], strict=True):
            for cell, at in zip(row, chart["x"]["values"], strict=True):
                yield at, value, chart["classes"][cell]
        return
    yield "series", x, y
    for series in chart["series"]:
        for at, value in series["points"]:
            yield series["label"], at, value
