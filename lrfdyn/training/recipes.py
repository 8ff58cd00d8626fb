"""Recipes: YAML files, one for each data set and host. What varies between experiments is an argument:

load_recipe("cifar100_spikformer", {"attention": "lrf_dyn", "dilations": (1, 3, 5)})
"""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args, get_origin

from lrfdyn.checks import UNIONS, checked, fits
from lrfdyn.errors import LrfdynError, needs, require, shown, unknown_name
from lrfdyn.files import expanded, plain_file
from lrfdyn.training.config import TrainConfig, key_types

ENDINGS = (".yaml", ".yml")
FOLDERS = (Path("recipes"), Path(__file__).parent.parent / "recipes")  # one's own, here, and those of the package
NOTES = ("description", "variants")  # of a file, for the list of recipes
# Keys that have a short name too.
SHORT_NAMES = {
    "model": "model.name", "attention": "model.attention", "dilations": "model.dilations",
    "dendrites": "model.dendrites", "token": "model.token", "directions": "model.directions",
    "coupling": "model.coupling", "norm": "model.norm", "scale_lrf": "model.scale_lrf", "train_qk": "model.train_qk",
}  # fmt: skip
DEEPEST, MOST_VALUES = 30, 10_000  # of a YAML file: levels, and values once all anchors are written out


def list_recipes() -> dict[str, Path]:
    """The recipes that a run can name; files that start with an underscore are only there to be extended."""
    return {path.stem: path for folder in reversed(FOLDERS) for path in sorted(folder.glob("[!_]*.yaml"))}


def find_recipe(name: str, beside: Path | None = None) -> Path:
    """The file of a recipe, by its name, in any case, or its path; for one that extends it, first `beside` that one."""
    is_path, argument = Path(name).suffix in ENDINGS, "recipe: extends" if beside else "recipe"
    file = expanded(name if is_path else f"{name}.yaml", argument)
    for folder in (beside, *FOLDERS) if beside else (Path(),) if is_path else FOLDERS:
        if (folder / file).is_file():
            return folder / file
    require(not is_path, f"{argument}: no such file: {name}")
    for known, path in list_recipes().items():
        if known.lower() == name.lower():
            return path
    raise unknown_name(argument, name, list_recipes())


@checked
def load_recipe(name: str | Path, overrides: Mapping[str, Any] | None = None, epochs: int | None = None) -> TrainConfig:
    """The configuration of a recipe, by its name or its file. `overrides` are values by `section.key` or by a short
    name (`SHORT_NAMES`); texts are read as on a command line. `epochs` are those of the whole schedule."""
    path = name if isinstance(name, Path) else find_recipe(name)
    values = _read(path, ())
    kinds = values.pop("attentions", {})  # keys of the model that the choice of a kind brings with it
    known = isinstance(kinds, Mapping) and all(isinstance(own, Mapping) for own in kinds.values())
    require(known, f"{path}: attentions: expected keys of the model by kind, got {shown(kinds)}")
    config = parse_config(values, str(path), overrides)
    if own := kinds.get(config.model.attention):
        config = parse_config(merge(values, {"model": own}), str(path), overrides)
    return config if epochs is None else dataclasses.replace(config, schedule=config.schedule.within(epochs))


def run_name(recipe: str, overrides: Mapping[str, Any]) -> str:
    """A name for the runs of a recipe that says which of its experiments they are."""
    parts = [find_recipe(recipe).stem]
    for short, key in SHORT_NAMES.items():
        value = overrides.get(short, overrides.get(key))
        if value is not None:
            text = re.sub(r"[^\w.]+", "_", str(value).removeprefix("timm/")).strip("_") or "none"
            parts.append(text if short in ("model", "attention", "token", "coupling") else f"{short}_{text}")
    return "-".join(parts)


def recipe_notes(path: Path) -> tuple[str, str, dict[str, list[Any]]]:
    """What a list of recipes says of this one: its data set, its description or else its first comment, and the values
    of `SHORT_NAMES` that its experiments choose from."""
    own, lines = read_yaml(path), path.read_text(encoding="utf-8").splitlines()
    comment = next((line.strip("# ") for line in lines if line.startswith("#")), "")
    data = _read(path, ()).get("data", {}).get("name", "")
    return data, own.get("description") or comment, own.get("variants") or {}


def parse_config(
    values: Mapping[str, Any], source: str = "recipe", overrides: Mapping[str, Any] | None = None
) -> TrainConfig:
    """The configuration of nested `values`, with `overrides` as in `load_recipe`; errors name `source` and the key."""
    overrides = {} if overrides is None else overrides
    for where, given in (("the top level", values), ("overrides", overrides)):
        require(isinstance(given, Mapping), f"{source}: {where}: expected keys with values, got {shown(given)}")
    for short, value in overrides.items():
        key = SHORT_NAMES.get(short, short)
        if key not in key_types():
            raise unknown_name("option", f"--{key}", [f"--{known}" for known in (*key_types(), *SHORT_NAMES)])
        (section, name), kind = key.split("."), key_types()[key]
        if isinstance(value, str):
            parsed = parse_option(key, value)
            number = kind in (str, str | None) and isinstance(parsed, (int, float))  # a folder may be called 2024
            value = value if number else parsed
        convert(value, kind, f"--{key}")
        old = values.get(section) or {}
        require(isinstance(old, Mapping), f"{source}: {section}: expected keys with values, got {shown(old)}")
        values = merge(values, {section: merge(old, {name: value})})
    return _parse(TrainConfig, values, source)


def _parse(cls: Any, values: Any, source: str, prefix: str = "") -> Any:
    """The dataclass `cls` of nested `values`, whose keys begin with `prefix`."""
    where = prefix or "the top level"
    require(isinstance(values, Mapping), f"{source}: {where}: expected keys with values, got {shown(values)}")
    hints, arguments = typing.get_type_hints(cls), {}
    names = {key: f"{prefix}.{key}".removeprefix(".") for key in hints}
    for key, value in values.items():
        if key not in hints:
            raise unknown_name(f"{source}: key in {prefix}" if prefix else f"{source}: section", key, hints)
        if dataclasses.is_dataclass(hints[key]):
            arguments[key] = _parse(hints[key], {} if value is None else value, source, names[key])
        else:
            arguments[key] = convert(value, hints[key], f"{source}: {names[key]}")
    for item in dataclasses.fields(cls):
        optional = item.default is not item.default_factory  # one of them is given
        require(optional or item.name in arguments, f"{source}: {names[item.name]}: missing, and there is no default")
    try:
        return cls(**arguments)
    except LrfdynError as error:
        section = "" if str(error).startswith(prefix) else f"{prefix}."  # the augmentation names bare keys
        raise LrfdynError(f"{source}: {section}{error}") from None


def convert(value: Any, kind: Any, key: str) -> Any:
    """`value` as the type `kind`, or an error; only numbers change their type (1 for 1.0, and YAML's text '5e-4')."""
    origin, arguments = get_origin(kind), get_args(kind)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _parse(kind, value, key, kind.__name__.removesuffix("Config").lower())
    if origin in UNIONS:  # T | None
        return None if value is None else convert(value, arguments[0], key)
    if origin is Literal:
        value = "off" if value is False and "off" in arguments else value  # YAML reads off as false
        value = value.lower() if isinstance(value, str) else value
        if value not in arguments:
            raise unknown_name(key, value, arguments)
        return value
    if origin is tuple:
        return _convert_tuple(value, arguments, key)
    if origin is dict:
        require(fits(value, Mapping[str, Any]), f"{key}: expected keys with values, got {shown(value)}")
        for name, item in value.items():
            try:
                json.dumps(item, allow_nan=False)
            except (TypeError, ValueError):
                plain = "expected text, finite numbers, or lists or keys with such values"
                raise LrfdynError(f"{key}: {name}: {plain}, got {shown(item)}") from None
        return dict(value)
    if kind is float and isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:
            return float(value)
        except (ValueError, OverflowError):
            pass
    elif type(value) is kind:
        return value
    expected = {int: "an integer", float: "a number", str: "text", bool: "true or false"}[kind]
    raise LrfdynError(f"{key}: expected {expected}, got {shown(value)}")


def _convert_tuple(value: Any, kinds: tuple[Any, ...], key: str) -> tuple[Any, ...]:
    if isinstance(value, str):  # from the command line: 1,3,5 or (1, 3, 5)
        parts = [part.strip() for part in value.strip("()[] ").split(",") if part.strip()]
        value = [int(p) if re.fullmatch(r"-?[0-9]{1,18}", p) else p for p in parts]
    elif type(value) is int:
        value = [value]  # (1,) on the command line is 1
    require(isinstance(value, (list, tuple)), f"{key}: expected a list, got {shown(value)}")
    kinds = kinds[:1] * len(value) if kinds[1] is ... else kinds
    require(len(value) == len(kinds), f"{key}: expected {len(kinds)} numbers, got {shown(value)}")
    return tuple(convert(v, kind, key) for v, kind in zip(value, kinds, strict=True))


def type_name(kind: Any) -> str:
    """A type as the help of a command line shows it."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in UNIONS:
        return f"{type_name(arguments[0])}|null"
    if origin is Literal:
        return "|".join(arguments)
    if origin is tuple:
        inner = "[N,N]" if get_origin(arguments[0]) is tuple else type_name(arguments[0])
        return {"TEXT": "TEXT,TEXT", "N": "N,N", "X": "N,N"}.get(inner, f"[{inner}, ...]")
    return {int: "N", float: "X", str: "TEXT", bool: "true|false"}.get(kind, "{KEY: VALUE}")


def merge(base: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """`more` over `base`, section by section."""
    merged = dict(base)
    for key, value in more.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def dump_yaml(values: Mapping[str, Any]) -> str:
    return _yaml().safe_dump(dict(values), sort_keys=False, default_flow_style=None, width=100)


def parse_option(key: str, text: str) -> Any:
    try:
        return parse_yaml(text)
    except _yaml().YAMLError:
        raise LrfdynError(f"--{key}: cannot read {shown(text)} as YAML") from None


def parse_yaml(text: str) -> Any:
    """YAML as plain values. A key that stands twice in a mapping is an error: PyYAML would take the last one. So are
    nesting without end, and anchors that make much of little."""
    yaml, sizes = _yaml(), dict[Any, int]()  # the values in a node, those behind its aliases included

    class Loader(yaml.SafeLoader):  # type: ignore[misc, name-defined]  # a module that is known when it is there
        level = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            def check(fine: bool, problem: str) -> None:
                if not fine:
                    raise yaml.MarkedYAMLError(problem=problem, problem_mark=self.get_mark())

            alias = self.check_event(yaml.AliasEvent)
            self.level += 1
            check(self.level <= DEEPEST, f"more than {DEEPEST} levels deep")
            node = super().compose_node(parent, index)
            self.level -= 1
            check(not alias or node in sizes, "an alias inside of what it stands for")
            parts = () if isinstance(node, yaml.ScalarNode) else node.value
            inner = (part for item in parts for part in (item if isinstance(item, tuple) else (item,)))
            sizes[node] = 1 + sum(sizes[part] for part in inner)
            check(sizes[node] <= MOST_VALUES, f"more than {MOST_VALUES} values")
            return node

        def construct_object(self, node: Any, deep: bool = False) -> Any:
            try:
                return super().construct_object(node, deep)
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):  # of int(), float(), a match
                problem = f"cannot read {shown(node.value)} as {node.tag.rpartition(':')[2]}"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from None

        def compose_mapping_node(self, anchor: Any) -> Any:
            node, seen = super().compose_mapping_node(anchor), set()
            for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
                if key.value in seen:
                    raise yaml.MarkedYAMLError(problem=f"the key {key.value} stands twice", problem_mark=key.start_mark)
                seen.add(key.value)
            return node

    return yaml.load(text, Loader)


def read_yaml(path: Path, argument: str = "recipe") -> Any:
    """The content of a YAML file; an error names `argument`."""
    yaml = _yaml()
    try:
        return parse_yaml(plain_file(path).read_text(encoding="utf-8"))
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
    require(isinstance(values, dict), f"recipe: {path}: expected sections with keys, got {shown(values)}")
    # A section whose keys are all commented out says nothing, and must not undo what it extends.
    values = {key: value for key, value in values.items() if value is not None and key not in NOTES}
    base = values.pop("extends", None)
    if base is None:
        return values
    require(isinstance(base, str), f"{path}: extends: expected a file or the name of a recipe, got {shown(base)}")
    return merge(_read(find_recipe(base, path.parent), [*seen, path.resolve()]), values)


def _yaml() -> ModuleType:
    with needs("recipe: recipes need PyYAML; pip install 'lrfdyn[train]'"):
        import yaml
    return yaml
