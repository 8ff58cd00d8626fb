"""Print what makes a shell complete commands, options, recipes and models.

bash: lrfdyn completion bash >> ~/.bashrc     zsh: lrfdyn completion zsh >> ~/.zshrc
fish: lrfdyn completion fish > ~/.config/fish/completions/lrfdyn.fish
"""

from __future__ import annotations

import argparse
import shlex

from lrfdyn.io.zoo import list_pretrained
from lrfdyn.models import list_models
from lrfdyn.training.recipes import list_recipes

BASH = """_lrfdyn() {{
  local words
  case "${{COMP_WORDS[1]}}" in
{cases}
  esac
  [ "$COMP_CWORD" -gt 1 ] || words={commands}
  COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _lrfdyn lrfdyn
"""
ZSH = "autoload -Uz compinit bashcompinit && compinit && bashcompinit\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="whose script to print")


def run(args: argparse.Namespace) -> None:
    words = {name: [*_names(name), *_words(sub)] for name, sub in _choices(args.parser).items()}
    quoted = {name: shlex.quote(" ".join(each)) for name, each in words.items()}
    commands = shlex.quote(" ".join(words))
    if args.shell == "fish":
        print(f"complete -c lrfdyn -n __fish_use_subcommand -f -a {commands}")
        for name, each in quoted.items():
            print(f"complete -c lrfdyn -n '__fish_seen_subcommand_from {name}' -a {each}")
        return
    cases = "\n".join(f"    {name}) words={each} ;;" for name, each in quoted.items())
    print((ZSH if args.shell == "zsh" else "") + BASH.format(cases=cases, commands=commands), end="")


def _choices(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parsers of a command's own commands."""
    found = (action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return next(found, {})


def _words(parser: argparse.ArgumentParser) -> list[str]:
    """Its options, and the names and options of what it leads to."""
    inner = (word for name, sub in _choices(parser).items() for word in (name, *_words(sub)))
    return list(dict.fromkeys((*parser._option_string_actions, *inner)))


def _names(command: str) -> list[str]:
    """What the first argument of a command may be, beside files."""
    if command in ("train", "recipes"):
        return list(list_recipes())
    trained = [entry.name for entry in list_pretrained()]
    if command in ("profile", "analyze", "export"):
        return [*list_models(), *trained]
    return list_models() if command == "models" else trained if command == "evaluate" else []
