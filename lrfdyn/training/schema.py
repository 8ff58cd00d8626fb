"""Dataclasses as sections of a configuration: their values from YAML or a command line, checked by type, and what the
docstrings of their fields say."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import math
import textwrap
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, get_args, get_origin

from lrfdyn.errors import LrfdynError, require, unknown_name

Section = TypeVar("Section")


def parse_section(cls: type[Section], values: Any, source: str, prefix: str = "") -> Section:
    """The dataclass `cls` of nested `values`; an error names the source and the key, which begins with `prefix`."""
    where = prefix or "the top level"
    require(isinstance(values, Mapping), f"{source}: {where}: expected keys with values, got {values!r}")
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    arguments: dict[str, Any] = {}
    for key, value in values.items():
        if key not in fields:
            raise unknown_name(f"{source}: key in {prefix}" if prefix else f"{source}: section", key, fields)
        name = f"{prefix}.{key}" if prefix else key
        if dataclasses.is_dataclass(hints[key]):
            section: type[Any] = hints[key]
            arguments[key] = parse_section(section, {} if value is None else value, source, name)
        else:
            arguments[key] = convert(value, hints[key], f"{source}: {name}")
    for name, item in fields.items():
        needed = item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
        key = f"{prefix}.{name}" if prefix else name
        require(not needed or name in arguments, f"{source}: {key}: missing, and there is no default")
    try:
        return cls(**arguments)
    except LrfdynError as error:
        section_name = "" if str(error).startswith(prefix) else f"{prefix}."  # the augmentation names bare keys
        raise LrfdynError(f"{source}: {section_name}{error}") from None


def convert(value: Any, kind: Any, key: str) -> Any:
    """`value` as the type `kind`, or an error; only numbers change their type (1 for 1.0, and YAML's text '5e-4')."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (types.UnionType, typing.Union):
        options = [a for a in arguments if a is not type(None)]
        if value is None and len(options) < len(arguments):
            return None
        return convert(value, options[0], key)
    if origin is Literal:
        if value is False and "off" in arguments:
            value = "off"  # YAML reads off as false
        if value not in arguments:
            raise unknown_name(key, value, [str(a) for a in arguments])
        return value
    if origin is tuple:
        return _convert_tuple(value, arguments, key)
    if origin is dict or kind is dict:
        require(isinstance(value, Mapping), f"{key}: expected keys with values, got {value!r}")
        return dict(value)
    if kind is float and isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:
            return float(value)
        except ValueError:
            pass
    elif kind in (int, str, bool) and type(value) is kind:
        return value
    expected = {int: "an integer", float: "a number", str: "text", bool: "true or false"}.get(kind, str(kind))
    raise LrfdynError(f"{key}: expected {expected}, got {value!r}")


def _convert_tuple(value: Any, arguments: tuple[Any, ...], key: str) -> tuple[Any, ...]:
    if isinstance(value, str):  # from the command line: 1,3,5 or (1, 3, 5)
        parts = [part.strip() for part in value.strip("()[] ").split(",") if part.strip()]
        value = [int(p) if p.lstrip("-").isdigit() else p for p in parts]
    elif isinstance(value, int) and not isinstance(value, bool):
        value = [value]  # (1,) on the command line is 1
    require(isinstance(value, (list, tuple)), f"{key}: expected a list, got {value!r}")
    if arguments[1:] != (...,):
        require(len(value) == len(arguments), f"{key}: expected {len(arguments)} numbers, got {value!r}")
        return tuple(convert(v, kind, key) for v, kind in zip(value, arguments, strict=True))
    return tuple(convert(v, arguments[0], key) for v in value)


def type_name(kind: Any) -> str:
    """A type as the help of a command line shows it."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return "|".join("null" if a is type(None) else type_name(a) for a in arguments)
    if origin is Literal:
        return "|".join(map(str, arguments))
    if origin is tuple:
        return "TEXT,TEXT" if arguments[0] is str else "N,N"
    return {int: "N", float: "X", str: "TEXT", bool: "true|false"}.get(kind, "{KEY: VALUE}")


def field_docs(cls: type) -> dict[str, str]:
    """The docstrings that stand below the fields of a dataclass, each as one line."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body  # type: ignore[attr-defined]
    docs: dict[str, str] = {}
    for field, below in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            docs[ast.unparse(field.target)] = " ".join(str(below.value.value).split())
    return docs


def require_range(section: str, config: Any, kind: Literal["positive", ">= 0", "share"], *keys: str) -> None:
    """Whether the numbers `keys` of a section are finite and in a range: positive, not negative, or in [0, 1). None
    stands for a number that is not given."""
    low, high, words = {
        "positive": (math.nextafter(0, 1), math.inf, "a positive number"),
        ">= 0": (0, math.inf, "a number >= 0"),
        "share": (0, 1, "a number in [0, 1)"),
    }[kind]
    for key in keys:
        value = getattr(config, key)
        require(value is None or low <= value < high, f"{section}.{key}: expected {words}, got {value}")
