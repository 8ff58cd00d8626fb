"""List the models, or the layers of one.

With a shell pattern, one line per model; with the name of a model, its layers, totals and configuration. Parameters
are counted, accuracies are those that the paper reports. With --pretrained the trained models of the zoo and their own.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from fnmatch import fnmatchcase
from typing import Any

from lrfdyn.attention import ATTENTIONS, attention_label
from lrfdyn.commands.shared import make_table, number, plain_console, print_json
from lrfdyn.errors import LrfdynError, near_names, require, require_integer, unknown_name
from lrfdyn.io.zoo import Pretrained, list_pretrained
from lrfdyn.models import SpikingModel, list_models
from lrfdyn.models.registry import model_class
from lrfdyn.models.summary import count_parameters, meta_model, summarize
from lrfdyn.paper import IMAGENET

METHODS = ("base", "lrf_ssa", "lrf_dyn")
SORTS = ("name", "parameters", "input", "accuracy")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("pattern", nargs="?", default="*", help="a name, or a shell pattern, for instance 'spikformer_8_*'")
    add("--attention", metavar="KIND", help=f"count with this attention: {', '.join(ATTENTIONS)}")
    add("--sort", choices=SORTS, default="name", help="order of the list; the best accuracy comes first")
    add("--depth", type=int, default=2, help="how many levels of modules the layers of one model are split into")
    add("--pretrained", action="store_true", help="list the trained models of the zoo, with measured accuracies")
    add("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> None:
    if args.attention is not None:
        args.attention = ATTENTIONS.name_of(args.attention)  # unknown: an error even where no model takes one
    if args.pretrained:
        show_zoo(args)
        return
    known, names = list_models(), list_models(args.pattern)
    if [name.lower() for name in names] == [args.pattern.lower()]:
        args.pattern = names[0]
        show_model(args)
        return
    if not names and any(sign in args.pattern for sign in "*?["):
        raise LrfdynError(f"pattern: no model matches {args.pattern!r}; {near_names(args.pattern, known)}")
    if not names:
        raise unknown_name("model", args.pattern, known)
    rows = [model_row(build(name, args.attention)) for name in names]
    rows.sort(key=lambda row: sort_key(row, args.sort, args.attention))
    if args.json:
        print_json(rows)
        return
    columns = ("model", ">parameters", ">input", ">T", "attention")
    table = make_table(*columns, ">paper\nbase", ">paper\nLRF-\nSSA", ">paper\nLRF-\nDyn")
    for row in rows:
        counts = (f"{row['parameters']:,}", str(row["input_size"][-1]), str(row["time_steps"]))
        accuracies = (number(row["paper"].get(method, {}).get("accuracy"), ".2f") for method in METHODS)
        table.add_row(row["name"], *counts, row["attention"] or "-", *accuracies)
    plain_console(80).print(
        table,
        "Top-1 accuracy in % on ImageNet-1k as the paper reports it, not measured here. "
        f"Every spiking model with an attention takes {', '.join(ATTENTIONS)}; listed is "
        f"{'the default' if args.attention is None else 'the one counted'}.",
    )


def show_zoo(args: argparse.Namespace) -> None:
    """Prints the trained models whose names, or whose networks' names, match."""
    entries = {entry.name: entry for entry in list_pretrained()}
    shown = [e for e in entries.values() if any(fnmatchcase(n, args.pattern.lower()) for n in (e.name, e.model))]
    shown = [entry for entry in shown if args.attention in (None, entry.attention)]
    of_kind = "" if args.attention is None else f" with {args.attention}"
    if not shown:
        raise LrfdynError(
            f"pattern: no trained model matches {args.pattern!r}{of_kind}; {near_names(args.pattern, entries)}"
        )
    orders = {"name": lambda e: e.name, "parameters": lambda e: e.parameters, "accuracy": lambda e: -e.mean}
    require(args.sort in orders, f"sort: expected one of {', '.join(orders)} with --pretrained, got {args.sort!r}")
    shown.sort(key=orders[args.sort])
    if args.json:
        facts = (("top1_mean", "mean"), ("top1_std", "deviation"), ("bytes", "bytes"))
        print_json([{**asdict(e), **{key: getattr(e, name) for key, name in facts}} for e in shown])
        return
    table = make_table("name", "data", "attention", ">top-1 %", ">params", ">MB")
    for e in shown:
        table.add_row(e.name, e.data, e.attention or "-", spread(e), f"{e.parameters:,}", f"{e.bytes / 1e6:.1f}")
    note = (
        "Top-1 accuracy in % on the test data, mean and standard deviation over the seeds; lrfdyn models --pretrained"
    )
    plain_console(80).print(table, f"{note} --json has all numbers. The card of a model is its README.md.")


def spread(entry: Pretrained) -> str:
    return f"{entry.mean:.2f}" + ("" if entry.deviation is None else f" ± {entry.deviation:.2f}")


def build(name: str, attention: str | None) -> SpikingModel:
    """The model without memory, with `attention` where it takes one."""
    takes = attention in model_class(name).attentions()
    return meta_model(name, **({"attention": attention} if takes else {}))


def model_row(model: SpikingModel) -> dict[str, Any]:
    """What the list and the JSON say of a model."""
    name, default = model.name or "", model.options().get("attention")
    return {
        "name": name,
        "parameters": count_parameters(model),
        "input_size": list(model.input_size),
        "time_steps": model.time_steps,
        "num_classes": model.num_classes,
        "attention": model.config.get("attention"),
        "default_attention": default,
        "attentions": model.attentions(),
        "paper": {method: row._asdict() for method, row in IMAGENET.get(name, {}).items()},
    }


def sort_key(row: dict[str, Any], by: str, attention: str | None) -> float:
    """What a list is sorted by; the accuracy is that with `attention`, or of the host as published."""
    paper = row["paper"].get(attention if attention in METHODS else "base", {})
    return (0, row["parameters"], row["input_size"][-1], -paper.get("accuracy", 0))[SORTS.index(by)]


def show_model(args: argparse.Namespace) -> None:
    """Prints the layers and facts of one model."""
    require_integer("depth", args.depth, 1)
    model = build(args.pattern, args.attention)
    fits = args.attention in (None, model.config.get("attention"))
    known = ", ".join(model.attentions())
    require(fits, f"attention: {args.pattern} has {f'{known} alone' if known else 'none'}, got {args.attention!r}")
    row, layers = model_row(model), summarize(model, args.depth)
    if args.json:
        print_json({**row, "config": model.config, "layers": [asdict(layer) for layer in layers]})
        return
    table = make_table("layer", "kind", ">output", ">parameters", ">share")
    for layer in layers:
        shape, share = "x".join(map(str, layer.output or ("-",))), layer.parameters / row["parameters"]
        table.add_row(layer.path, layer.kind, shape, f"{layer.parameters:,}", f"{share:.1%}")
    table.add_section()
    table.add_row("all", "", "", f"{row['parameters']:,}", "100.0%")
    plain_console(80).print(table, *facts(model, row), sep="\n")


def facts(model: SpikingModel, row: dict[str, Any]) -> list[str]:
    """Lines on input, output, attention, the paper's numbers and the configuration of a model."""
    lines = [
        f"input: {'x'.join(map(str, model.input_size))} for T = {model.time_steps} time steps",
        "output: channels x height x width, of one image and time step",
        f"weights: {4 * row['parameters'] / 1e6:,.1f} MB in float32",
    ]
    if row["attentions"]:
        kinds = (f"{kind} (default)" if kind == row["default_attention"] else kind for kind in row["attentions"])
        lines.append(f"attention: {row['attention']}; takes {', '.join(kinds)}")
    for method, entry in row["paper"].items():
        label = "as published" if method == "base" else f"with {attention_label(method)}"
        numbers = f"{entry['parameters']:.2f} M parameters, {entry['accuracy']:.2f} % top-1 on ImageNet-1k"
        lines.append(f"paper: {label}: {numbers}")
    return [*lines, "config: " + ", ".join(f"{key}={value!r}" for key, value in model.config.items())]
