"""List the models."""

from __future__ import annotations

import argparse

import torch
from rich.console import Console
from rich.table import Table

from lrfdyn.errors import LrfdynError
from lrfdyn.models import create_model, list_models


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pattern", nargs="?", default="*", help="a shell pattern, for instance 'spikformer_8_*'")


def run(arguments: argparse.Namespace) -> None:
    names = list_models(arguments.pattern)
    if not names:
        raise LrfdynError(f"pattern: no model matches {arguments.pattern!r}; known: {', '.join(list_models())}")
    table = Table("model", "parameters", "input", "T", "classes")
    for column in table.columns[1:]:
        column.justify = "right"
    for name in names:
        with torch.device("meta"):
            model = create_model(name)
        size = model.config.get("image_size", 224)
        table.add_row(
            name,
            f"{sum(p.numel() for p in model.parameters()):,}",
            f"{size}x{size}",
            str(model.time_steps),
            str(model.config["num_classes"]),
        )
    Console().print(table)
