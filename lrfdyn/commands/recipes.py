"""List the recipes of `lrfdyn train`, or print one of them with all its keys.

Options replace keys, as in `lrfdyn train`: lrfdyn recipes imagenet_sdt_v3 --model sdt_v3_l --attention lrf_dyn
"""

from __future__ import annotations

import argparse
from itertools import groupby

from lrfdyn.commands.shared import add_keys, given_keys
from lrfdyn.training.recipes import dump_yaml, list_recipes, load_recipe, recipe_notes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "lrfdyn recipes [NAME] [--section.key VALUE ...]"
    parser.add_argument("name", nargs="?", help="a recipe, or the path of a .yaml file; none lists all recipes")
    add_keys(parser)


def run(args: argparse.Namespace) -> None:
    if args.name is None:
        print_recipes()
    else:
        print(dump_yaml(load_recipe(args.name, given_keys(args)).as_dict()), end="")


def print_recipes() -> None:
    """Prints all recipes, grouped by their data set, each with the arguments that its experiments choose from."""
    notes = sorted(((name, *recipe_notes(path)) for name, path in list_recipes().items()), key=lambda note: note[1::-1])
    width = max(len(name) for name, *_ in notes) + 2
    for data, group in groupby(notes, lambda note: note[1]):
        print(data)
        for name, _, description, variants in group:
            choices = [f"--{argument} {'|'.join(map(str, values))}" for argument, values in variants.items()]
            print(f"  {name:<{width}}{description}")
            if choices:
                print(f"  {'':<{width}}{'  '.join(choices)}")
        print()
    print("lrfdyn train NAME [--attention KIND ...] trains one, lrfdyn recipes NAME prints it with all its keys")
