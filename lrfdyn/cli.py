"""The command line: one table of sub-commands, one line per error, exit code 2 for bad input."""

from __future__ import annotations

import argparse
import io
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

from lrfdyn.errors import LrfdynError, near_names, unknown_name
from lrfdyn.version import __version__

COMMANDS = (
    "reproduce", "models", "recipes", "train", "sweep", "evaluate", "figure-segmentation", "analyze", "theory",
    "profile", "export", "predict", "completion",
)  # fmt: skip


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            near = near_names(value, map(str, action.choices))
            raise argparse.ArgumentError(action, f"unknown name {value!r}; {near}")


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Defaults that say something: not None, and not the False of a switch."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        silent = action.default is None or action.default is False
        return action.help if silent else super()._get_help_string(action)


def build_parser(only: str | None = None) -> Parser:
    """The parser of all commands. Where `only` names one, just that one is imported, which is quicker."""
    parser = Parser(prog="lrfdyn", description="Spiking vision transformers with neural dynamics self-attention.")
    parser.add_argument("--version", action="version", version=f"lrfdyn {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name in (only,) if only in COMMANDS[:-1] else COMMANDS:  # completion needs all
        module = import_module(f"lrfdyn.commands.{name.replace('-', '_')}")
        doc = (module.__doc__ or "").strip()
        sub = commands.add_parser(name, help=doc.splitlines()[0], description=doc, formatter_class=HelpFormatter)
        module.add_arguments(sub)
        sub.set_defaults(run=module.run, options=list(sub._option_string_actions), parser=parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files may hold letters that its encoding lacks
    warnings.formatwarning = lambda message, *_: f"lrfdyn: {message}\n"  # not the line of code that it is from
    argv = sys.argv[1:] if argv is None else argv
    parser = build_parser(*argv[:1])
    args, unknown = parser.parse_known_args(argv)
    if args.command is None:
        parser.print_help()
        return 0
    try:
        if unknown:
            raise unknown_name("option", unknown[0].partition("=")[0], args.options)
        return args.run(args) or 0  # a command may end with an exit code of its own
    except LrfdynError as error:
        print(f"lrfdyn {args.command}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\nlrfdyn {args.command}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of a pipe went away
        sys.stderr.close()
        return 0
