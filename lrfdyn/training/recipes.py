"""Recipes: YAML files, one for each data set and host. What varies between experiments is an argument:

load_recipe("cifar100_spikformer", {"attention": "lrf_dyn", "dilations": (1, 3, 5)})
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from lrfdyn.errors import LrfdynError, require, unknown_name
from lrfdyn.training.config import TrainConfig, key_types, parse_config
from lrfdyn.training.schema import convert

ENDINGS = (".yaml", ".yml")
FOLDERS = (Path("recipes"), Path(__file__).parent.parent / "recipes")  # one's own, here, and those of the package
NOTES = ("description", "variants")  # of a file, for the list of recipes
# Keys that have a short name too.
SHORT_NAMES = {
    "model": "model.name", "attention": "model.attention", "dilations": "model.dilations",
    "dendrites": "model.dendrites", "token": "model.token",
}  # fmt: skip


class RecipeNotes(NamedTuple):
    """What a list of recipes says of one."""

    data: str
    """The name of its data set."""
    description: str
    """Its `description`, or else its first comment."""
    variants: dict[str, list[Any]]
    """Values of `SHORT_NAMES` that its experiments choose from."""


def list_recipes() -> dict[str, Path]:
    """The recipes that a run can name; files that start with an underscore are only there to be extended."""
    found: dict[str, Path] = {}
    for folder in reversed(FOLDERS):
        found |= {path.stem: path for path in sorted(folder.glob("[!_]*.yaml"))}
    return found


def find_recipe(name: str, beside: Path | None = None) -> Path:
    """The file of a recipe, by its name or its path. A recipe that extends it lies `beside` it, where it is looked for
    first, or the name is one of the package's."""
    is_path = Path(name).suffix in ENDINGS
    file, argument = name if is_path else f"{name}.yaml", "recipe: extends" if beside else "recipe"
    for folder in (beside, *FOLDERS) if beside else (Path(),) if is_path else FOLDERS:
        if (folder / file).is_file():
            return folder / file
    require(not is_path, f"{argument}: no such file: {name}")
    raise unknown_name(argument, name, list_recipes() or ["a path to a .yaml file"])


def load_recipe(name: str | Path, overrides: Mapping[str, Any] | None = None) -> TrainConfig:
    """The configuration of a recipe, by its name or its file. `overrides` are values by `section.key` or by a short
    name (`SHORT_NAMES`); texts are read as on a command line."""
    path = name if isinstance(name, Path) else find_recipe(name)
    values = _read(path, ())
    for key, value in (overrides or {}).items():
        apply_override(values, key, value)
    return parse_config(values, str(path))


def run_name(recipe: str, overrides: Mapping[str, Any]) -> str:
    """A name for the runs of a recipe that says which of its experiments they are."""
    parts = [recipe]
    for short, key in SHORT_NAMES.items():
        value = overrides.get(short, overrides.get(key))
        if value is not None:
            text = re.sub(r"[^\w.]+", "_", str(value).removeprefix("timm/")).strip("_") or "none"
            parts.append(f"{short}_{text}" if short in ("dilations", "dendrites") else text)
    return "-".join(parts)


def recipe_notes(path: Path) -> RecipeNotes:
    """What a list of recipes says of this one."""
    own, text = read_yaml(path), path.read_text(encoding="utf-8")
    comments = [line.strip("# ") for line in text.splitlines() if line.startswith("#")]
    data = _read(path, ()).get("data", {}).get("name", "")
    return RecipeNotes(data, own.get("description") or next(iter(comments), ""), own.get("variants") or {})


def apply_override(values: dict[str, Any], key: str, value: Any) -> None:
    """Puts a value into nested `values`, by its key or short name; a text is read as YAML."""
    key = SHORT_NAMES.get(key, key)
    if key not in key_types():
        raise unknown_name("option", f"--{key}", [f"--{known}" for known in (*key_types(), *SHORT_NAMES)])
    section, name = key.split(".")
    if isinstance(value, str):
        try:
            value = _yaml().safe_load(value)
        except _yaml().YAMLError:
            raise LrfdynError(f"--{key}: cannot read {value!r} as YAML") from None
    convert(value, key_types()[key], f"--{key}")  # an error names the option, and not the file that it replaces
    values[section] = merge(values.get(section) or {}, {name: value})


def merge(base: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """`more` over `base`, section by section."""
    merged = dict(base)
    for key, value in more.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def dump_yaml(values: Mapping[str, Any]) -> str:
    return _yaml().safe_dump(dict(values), sort_keys=False, default_flow_style=None, width=100)


def read_yaml(path: Path, argument: str = "recipe") -> Any:
    """The content of a YAML file; an error names `argument`."""
    yaml = _yaml()
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise LrfdynError(f"{argument}: cannot read {path} ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise LrfdynError(f"{argument}: {path} is not UTF-8 text ({error.reason} at byte {error.start})") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" in line {mark.line + 1}" if mark else ""
        raise LrfdynError(f"{argument}: {path} is not YAML{line} ({getattr(error, 'problem', error)})") from None


def _read(path: Path, seen: Sequence[Path]) -> dict[str, Any]:
    """The sections of a file over those of the file that it extends."""
    require(path.resolve() not in seen, f"recipe: {path} extends itself")
    values = read_yaml(path)
    require(isinstance(values, dict), f"recipe: {path}: expected sections with keys, got {values!r}")
    # A section whose keys are all commented out says nothing, and must not undo what it extends.
    values = {key: value for key, value in values.items() if value is not None and key not in NOTES}
    base = values.pop("extends", None)
    if base is None:
        return values
    require(isinstance(base, str), f"{path}: extends: expected a file or the name of a recipe, got {base!r}")
    return merge(_read(find_recipe(base, path.parent), [*seen, path.resolve()]), values)


def _yaml() -> ModuleType:
    try:
        import yaml
    except ImportError:
        raise LrfdynError("recipe: recipes need PyYAML; pip install 'lrfdyn[train]'") from None
    return yaml
