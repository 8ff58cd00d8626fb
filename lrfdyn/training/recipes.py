"""Recipes: YAML files, each short because it names another that it extends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from lrfdyn.errors import LrfdynError, require, unknown_name
from lrfdyn.training.config import TrainConfig, key_types, parse_config
from lrfdyn.training.convert import convert

PACKAGE = Path(__file__).parent.parent
ENDINGS = (".yaml", ".yml")
# Here, in the installed package, or beside it: in the repository the second is a link to the third.
FOLDERS = (Path("recipes"), PACKAGE / "recipes", PACKAGE.parent / "recipes")


def list_recipes() -> dict[str, Path]:
    """The recipes that a run can name; files that start with an underscore are only there to be extended."""
    found: dict[str, Path] = {}
    for folder in reversed(FOLDERS):
        found |= {path.stem: path for path in sorted(folder.glob("[!_]*.yaml"))}
    return found


def find_recipe(name: str) -> Path:
    path, known = Path(name), list_recipes()
    if path.suffix in ENDINGS:
        require(path.is_file(), f"recipe: no such file: {name}")
        return path
    if name in known:
        return known[name]
    raise unknown_name("recipe", name, known or ["a path to a .yaml file"])


def load_recipe(path: Path, overrides: Mapping[str, str] | None = None) -> TrainConfig:
    """The configuration of a file; `overrides` are texts by `section.key`, as on a command line."""
    values = _read(path, ())
    for key, text in (overrides or {}).items():
        apply_override(values, key, text)
    return parse_config(values, str(path))


def apply_override(values: dict[str, Any], key: str, text: str) -> None:
    if key not in key_types():
        raise unknown_name("option", f"--{key}", [f"--{known}" for known in key_types()])
    section, name = key.split(".")
    try:
        value = _yaml().safe_load(text)
    except _yaml().YAMLError:
        raise LrfdynError(f"--{key}: cannot read {text!r} as YAML") from None
    convert(value, key_types()[key], f"--{key}")  # an error names the option, and not the file that it replaces
    if values.get(section) is None:
        values[section] = {}
    values[section] = merge(values[section], {name: value})


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
    require(path.resolve() not in seen, f"recipe: {path} extends itself")
    values = read_yaml(path)
    require(isinstance(values, dict), f"recipe: {path}: expected sections with keys, got {values!r}")
    # A section whose keys are all commented out says nothing, and must not undo what it extends.
    values = {key: value for key, value in values.items() if value is not None}
    base = values.pop("extends", None)
    if base is None:
        return values
    require(isinstance(base, str), f"{path}: extends: expected a file or the name of a recipe, got {base!r}")
    return merge(_read(_find_base(path.parent, base), [*seen, path.resolve()]), values)


def _find_base(folder: Path, base: str) -> Path:
    """A file beside the recipe that extends it, or a recipe of the package: both with or without their ending."""
    file = base if Path(base).suffix in ENDINGS else f"{base}.yaml"
    for place in (folder, *FOLDERS):
        if (place / file).is_file():
            return place / file
    require(file != base, f"recipe: extends: cannot find {base} in {folder} or among the recipes of the package")
    named = {path.stem: path for place in reversed(FOLDERS) for path in place.glob("*.yaml")}
    raise unknown_name("recipe: extends", base, named)


def _yaml() -> ModuleType:
    try:
        import yaml
    except ImportError:
        raise LrfdynError("recipe: recipes need PyYAML; pip install 'lrfdyn[train]'") from None
    return yaml
