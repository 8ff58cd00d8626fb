"""What commands share: arguments, tables, consoles and progress bars."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, JustifyMethod
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from lrfdyn.errors import require
from lrfdyn.files import finite
from lrfdyn.training.config import ATTENTION_KEYS, key_help, key_types
from lrfdyn.training.recipes import SHORT_NAMES, convert, parse_option, type_name

MIB = 2**20


def comma_list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def integer_list(text: str) -> tuple[int, ...]:
    return tuple(map(int, comma_list(text)))


def add_keys(parser: argparse.ArgumentParser) -> None:
    """Makes every key of a recipe an option, `--section.key VALUE` and its short name."""
    parser.allow_abbrev = False  # a shortened key would silently be another one tomorrow
    group = parser.add_argument_group("keys of the recipe", "lrfdyn train RECIPE --dry-run prints their values")
    short = {key: name for name, key in SHORT_NAMES.items()}
    for key, kind in key_types().items():
        flags = [f"--{name}" for name in (short.get(key), key) if name]
        group.add_argument(*flags, dest=key, default=argparse.SUPPRESS, metavar=type_name(kind), help=key_help()[key])


def given_keys(args: argparse.Namespace) -> dict[str, str]:
    """The keys of the recipe that were given, as texts."""
    return {key: value for key, value in vars(args).items() if "." in key}


def add_attention_options(parser: argparse.ArgumentParser) -> None:
    """Makes the options of attentions flags, under the names and with the values that a recipe has them."""
    group = parser.add_argument_group("options of the attention", "with the name of a model")
    for name in ATTENTION_KEYS[1:]:  # without its kind
        key, flags = f"model.{name}", dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
        values = type_name(key_types()[key]).removesuffix("|null")
        group.add_argument(*flags, dest=name, metavar=values, help=key_help()[key])


def given_attention_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of attentions that were given."""
    texts = {name: getattr(args, name) for name in ATTENTION_KEYS[1:]}
    kinds = {name: key_types()[f"model.{name}"] for name in texts}
    return {n: convert(parse_option(n, text), kinds[n], n) for n, text in texts.items() if text is not None}


def data_options(text: str) -> dict[str, Any]:
    """The further arguments of a data set, from YAML."""
    options = parse_option("data.options", text)
    named = isinstance(options, dict) and all(isinstance(key, str) for key in options)
    require(named, f"--data.options: expected {{name: value}}, got {text}")
    return options


def command_line() -> str:
    """The command as it was given, for the record."""
    return shlex.join(["lrfdyn", *sys.argv[1:]])


class PlainConsole(Console):
    """A console that prints texts as they are, brackets and colons too, and leaves errors to the command line."""

    def __init__(self, **how: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **how)

    def on_broken_pipe(self) -> None:
        raise  # the error that this is called for


def print_json(value: Any) -> None:
    """Prints JSON, which has no nan and no inf: they become null."""
    print(json.dumps(finite(value), indent=1, allow_nan=False))


def plain_console(width: int = 0, stderr: bool = False) -> Console:
    """A console at least `width` wide: the terminal breaks lines, no column is lost."""
    return PlainConsole(width=max(width, Console().width) if width else None, stderr=stderr)


def make_table(*headers: str, title: str | None = None) -> Table:
    """An empty table. Columns whose header begins with `>` hold numbers, the others texts that may be folded."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for header in headers:
        justify: JustifyMethod = "right" if header.startswith(">") else "left"
        table.add_column(header.lstrip(">"), justify=justify, no_wrap=justify == "right", overflow="fold")
    return table


def number(value: float | None, form: str, unit: float = 1) -> str:
    """A cell of a table, with a dash for what is not known."""
    return "-" if value is None else format(value / unit, form)


def bar(visible: bool = True) -> Progress:
    """A progress bar on the error stream, and only where a person sees it."""
    console = plain_console(stderr=True)
    return Progress(console=console, transient=True, disable=not visible or not console.is_terminal)


def bars(console: Console) -> Progress:
    """Bars whose tasks have a description and a field `news` for what was last heard of them."""
    # No markup: the texts may hold brackets.
    name, news = (TextColumn(f"{{task.{field}}}", markup=False) for field in ("description", "fields[news]"))
    columns = (name, BarColumn(), MofNCompleteColumn(), news, TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, speed_estimate_period=600)
