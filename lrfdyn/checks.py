"""Arguments of the public functions, checked against their type hints."""

from __future__ import annotations

import inspect
import math
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, wraps
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from lrfdyn.errors import LrfdynError, shown

UNIONS = (types.UnionType, typing.Union)
WORDS = {int: "an integer", float: "a finite number", str: "text", bool: "True or False", type(None): "None"}
PLURALS = {int: "integers", float: "finite numbers", str: "texts", bool: "True or False", Path: "paths"}
Checked = TypeVar("Checked", bound=Callable[..., Any])


def checked(thing: Checked) -> Checked:
    """A decorator of functions, and of classes for their constructors: an argument that does not have its annotated
    type is a `LrfdynError` that names it. `**options` are left to whoever takes them in the end."""
    if isinstance(thing, type):
        thing.__init__ = checked(thing.__init__)  # type: ignore[misc]
        return thing
    signature = inspect.signature(thing)
    packed = {p.name for p in signature.parameters.values() if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}

    @wraps(thing)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        check_types({name: value for name, value in given.items() if name not in packed}, hints_of(thing))
        return thing(*args, **kwargs)

    return call  # type: ignore[return-value]


def check_types(values: Mapping[str, Any], hints: Mapping[str, Any]) -> None:
    """An error for the first of the named values that does not have the type that is hinted at."""
    for name, value in values.items():
        hint = hints.get(name, Any)
        if not fits(value, hint):
            raise LrfdynError(f"{name}: expected {in_words(hint)}, got {shown(value)}")


def check_fields(instance: object) -> None:
    """An error for the first attribute of a dataclass's instance that does not have its type."""
    kind: Any = type(instance)
    check_types(vars(instance), hints_of(kind))


@cache
def hints_of(owner: Any) -> dict[str, Any]:
    """The types of a function's arguments or a class's fields; those that only a type checker imports are left out."""
    known: dict[str, Any] = {}
    for part in reversed(owner.__mro__) if isinstance(owner, type) else (owner,):
        names = getattr(part, "__globals__", None) or vars(sys.modules[part.__module__])
        for name, hint in inspect.get_annotations(part).items():
            with suppress(NameError, TypeError):  # the latter of a ClassVar
                known |= get_type_hints(types.SimpleNamespace(__annotations__={name: hint}), names)
    return known


def fits(value: object, hint: Any) -> bool:
    """Whether a value has a type. Numbers must be finite, and any sequence but a text will do for a tuple."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint in (int, float):
        number = isinstance(value, Integral if hint is int else Real) and not isinstance(value, bool)
        return number and (isinstance(value, Integral) or math.isfinite(value))  # type: ignore[arg-type]
    if origin in UNIONS:
        return any(fits(value, kind) for kind in inner)
    if origin is Literal:
        return value in inner
    if origin in (tuple, list, Sequence):
        if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
            return False
        kinds = inner if origin is tuple and inner[-1] is not ... else inner[:1] * len(value)
        return len(value) == len(kinds) and all(map(fits, value, kinds))
    if origin in (dict, Mapping):
        return isinstance(value, origin) and all(fits(k, inner[0]) and fits(v, inner[1]) for k, v in value.items())
    kind = origin or hint
    known = isinstance(kind, type) and kind is not Any and not getattr(kind, "_is_protocol", False)
    return not known or isinstance(value, kind)


def in_words(hint: Any) -> str:
    """What an error says was expected."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in UNIONS:
        return " or ".join(map(in_words, inner))
    if origin is Literal:
        return " or ".join(map(repr, inner))
    if origin in (tuple, list, Sequence):
        count = f"{len(inner)} " if origin is tuple and inner[-1] is not ... else ""
        return f"a sequence of {count}{PLURALS.get(inner[0]) or getattr(inner[0], '__name__', 'value') + 's'}"
    if origin in (dict, Mapping):
        return f"a {origin.__name__} with {in_words(inner[0])} as keys"
    kind = origin or hint
    return WORDS.get(kind) or f"an object of type {getattr(kind, '__name__', kind)}"
