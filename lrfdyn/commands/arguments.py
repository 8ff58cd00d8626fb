"""What the arguments of several commands have in common."""

from __future__ import annotations

import argparse
import shlex
import sys

from lrfdyn.training.config import key_help, key_types
from lrfdyn.training.recipes import SHORT_NAMES, type_name


def comma_list(text: str) -> tuple[str, ...]:
    """The parts of `a,b`."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def integer_list(text: str) -> tuple[int, ...]:
    """The numbers of `1,2`."""
    return tuple(int(part) for part in comma_list(text))


def add_keys(parser: argparse.ArgumentParser) -> None:
    """Makes every key of a recipe an option, `--section.key VALUE` and its short name."""
    parser.allow_abbrev = False  # a shortened key would silently be another one tomorrow
    group = parser.add_argument_group("keys of the recipe", "lrfdyn train RECIPE --dry-run prints their values")
    short = {key: name for name, key in SHORT_NAMES.items()}
    for key, kind in key_types().items():
        flags = [f"--{name}" for name in (short.get(key), key) if name]
        group.add_argument(*flags, dest=key, default=argparse.SUPPRESS, metavar=type_name(kind), help=key_help()[key])


def given_keys(arguments: argparse.Namespace) -> dict[str, str]:
    """The keys of the recipe that were given, as texts."""
    return {key: value for key, value in vars(arguments).items() if "." in key}


def command_line() -> str:
    """The command as it was given, for the record."""
    return shlex.join(["lrfdyn", *sys.argv[1:]])
