"""Compute Theorems 1 and 2 of the paper exactly, and show where their last inequality fails.

Writes report.html, results.json, tables/*.csv and figures/*.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from lrfdyn.analysis.report.write import FORMATS, check_formats
from lrfdyn.analysis.theory_report import TheorySettings, theory_results
from lrfdyn.commands.analyze import write_and_print
from lrfdyn.commands.shared import comma_list, command_line, integer_list, make_table, plain_console
from lrfdyn.files import sole_user

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


def run(args: argparse.Namespace) -> None:
    formats = check_formats(args.figures)
    settings = TheorySettings(args.tokens, args.beta, args.alpha, args.share, tuple(args.dilations))
    with sole_user(args.out):
        results = theory_results(settings, command_line())
        title = f"N = {settings.n}, beta = {settings.beta:g}"
        table = make_table("quantity", ">sum", ">closed form", ">difference", title=title)
        for row in results["checks"]:
            table.add_row(row["name"], f"{row['sum']:.9f}", f"{row['closed_form']:.9f}", f"{row['difference']:.1e}")
        write_and_print(results, args.out, formats, plain_console(), table, results["notes"])
