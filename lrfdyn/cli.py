"""The command line: one table of sub-commands, one line per error, exit code 2 for bad input."""

from __future__ import annotations

import argparse
import io
import os
import sys
import threading
import warnings
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, NoReturn

from lrfdyn._start import listen
from lrfdyn.errors import LrfdynError, explain, first_line, near_names, out_of_memory, printable, shown, unknown_name
from lrfdyn.version import __version__

COMMANDS = (
    "reproduce", "models", "recipes", "train", "sweep", "evaluate", "figure-segmentation", "analyze", "theory",
    "profile", "export", "predict", "data", "tune", "completion",
)  # fmt: skip


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {LrfdynError(message)} (see {self.prog} --help)\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            near = near_names(value, map(str, action.choices))
            raise argparse.ArgumentError(action, f"unknown name {shown(value)}; {near}")


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
    """Runs a command and returns its exit code: 2 for bad input and for what the system refuses, with one line on the
    error stream, 130 after Ctrl-C, 141 where the reader of a pipe has gone."""
    command, argv = "lrfdyn", sys.argv[1:] if argv is None else argv
    _open_streams()
    argv = [argv[0].lower(), *argv[1:]] if argv and argv[0].lower() in COMMANDS else argv
    try:
        listen()
        parser = build_parser(*argv[:1])
        try:
            args, unknown = parser.parse_known_args(argv)
        finally:
            sys.stdout.flush()  # --help and --version end here
        if args.command is None and not unknown:
            parser.print_help()
            sys.stdout.flush()
            return 0
        command = f"lrfdyn {args.command or ''}".strip()
        if unknown:
            options = args.options if args.command else parser._option_string_actions
            raise unknown_name("option", unknown[0].partition("=")[0], options)
        code = args.run(args) or 0  # a command may end with an exit code of its own
        sys.stdout.flush()  # here and not when the interpreter ends, where nobody hears of a full disk
        return code
    except KeyboardInterrupt:
        return _fail(f"\n{command}: interrupted", 130)
    except BrokenPipeError:
        return _fail("", 141)
    except (LrfdynError, OSError, UnicodeError) as error:
        return _fail(f"{command}: error: {printable(explain(error))}", 2)
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        return _fail(f"{command}: error: memory: {printable(first_line(error))} Fewer or smaller images need less.", 2)


def _open_streams() -> None:
    """Closed streams lead nowhere, and what is printed needs no encoding that has all letters."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 (as long as the process lives)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files may hold letters that its encoding lacks
    threading.excepthook = _thread_failed
    warnings.formatwarning = lambda message, *_: f"lrfdyn: {message}\n"  # not the line of code that it is from


def _thread_failed(failed: Any) -> None:
    """A full disk in a thread, such as TensorBoard's, is told by whoever uses the thread."""
    if not isinstance(failed.exc_value, OSError):
        threading.__excepthook__(failed)


def _fail(message: str, code: int) -> int:
    """Prints the message, where there is one, and returns the code. A stream that cannot be written leads nowhere from
    here on: the interpreter would try again when it ends, and end with a code of its own."""
    if message:
        with suppress(OSError):
            print(message, file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())
    return code
