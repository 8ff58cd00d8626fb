"""From what YAML and a command line give to the type that a key has."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

from lrfdyn.errors import LrfdynError, require, unknown_name


def convert(value: Any, kind: Any, key: str) -> Any:
    """`value` as `kind`, or an error; only numbers change their type (1 for 1.0, and YAML's text '5e-4')."""
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
        return _tuple(value, arguments, key)
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
    raise LrfdynError(f"{key}: expected {_describe(kind)}, got {value!r}")


def _tuple(value: Any, arguments: tuple[Any, ...], key: str) -> tuple[Any, ...]:
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


def _describe(kind: Any) -> str:
    names = {int: "an integer", float: "a number", str: "text", bool: "true or false"}
    return names.get(kind, str(kind))


def type_name(kind: Any) -> str:
    """For the help of a command line."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return "|".join("null" if a is type(None) else type_name(a) for a in arguments)
    if origin is Literal:
        return "|".join(map(str, arguments))
    if origin is tuple:
        return "TEXT,TEXT" if arguments[0] is str else "N,N"
    return {int: "N", float: "X", str: "TEXT", bool: "true|false"}.get(kind, "{KEY: VALUE}")
