"""Compute Theorems 1 and 2 of the paper exactly, and show where their last inequality fails.

Writes report.html, results.json, tables/*.csv and figures/*.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from lrfdyn.analysis.report.write import FORMATS, check_formats, write_all
from lrfdyn.analysis.theory_report import TheorySettings, theory_results
from lrfdyn.commands.arguments import comma_list, command_line, integer_list
from lrfdyn.files import writable_folder

DEFAULT = TheorySettings()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--out", type=Path, default=Path("theory"), help="folder for report, results, tables and figures")
    add("--tokens", type=int, default=DEFAULT.n, help="N")
    add("--beta", type=float, default=DEFAULT.beta, help="fall of the similarity per token")
    add("--alpha", type=float, help="similarity at distance 0; default 1 + beta (N - 1)")
    add("--share", type=float, default=DEFAULT.share, help="lambda, the share of the local weights in LRF-SSA")
    add("--dilations", type=integer_list, default=",".join(map(str, DEFAULT.dilations)), metavar="A,B", help="of R")
    add("--figures", type=comma_list, default=",".join(FORMATS), metavar="A,B", help="formats, or none")


def run(arguments: argparse.Namespace) -> None:
    formats = check_formats(arguments.figures)
    settings = TheorySettings(
        arguments.tokens, arguments.beta, arguments.alpha, arguments.share, tuple(arguments.dilations)
    )
    writable_folder(arguments.out, "out")
    results = theory_results(settings, command_line())
    written = write_all(results, arguments.out, formats)
    console = Console()
    table = Table("quantity", box=box.SIMPLE_HEAD, title=f"N = {settings.n}, beta = {settings.beta:g}")
    for name in ("sum", "closed form", "difference"):
        table.add_column(name, justify="right")
    for row in results["checks"]:
        table.add_row(row["name"], f"{row['sum']:.9f}", f"{row['closed_form']:.9f}", f"{row['difference']:.1e}")
    console.print(table)
    for note in results["notes"]:
        console.print(note, highlight=False)
    console.print(written, highlight=False, soft_wrap=True)
