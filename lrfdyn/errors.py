"""Errors that a user can act on: one line that names the argument, what came and what was expected."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import PurePath
from reprlib import Repr

MOST_LISTED = 240  # letters of the names that an error lists
LONGEST = 360  # characters of an error
_brief = Repr()
_brief.maxlevel, _brief.maxstring, _brief.maxother = 2, 80, 80
MOST_LETTERS = 100  # of a path that the system refused


class LrfdynError(ValueError):
    """Bad input. The command line prints it as one line and exits with code 2. Whatever is put into it, it stays one
    line of visible characters, of which the middle is left out where they are very many."""

    def __init__(self, message: str) -> None:
        if len(message) > LONGEST:
            message = f"{message[: LONGEST // 2]} ... {message[-LONGEST // 2 :]}"
        super().__init__(printable(message))


def shown(value: object) -> str:
    """A value as an error shows it: in full where it is short, its type where it is no plain value."""
    if value is None or isinstance(value, (bool, int, float, str, bytes, list, tuple, dict, set, PurePath)):
        try:
            return _brief.repr(value)
        except ValueError:  # Python writes no integer of more than 4,300 digits
            return "a very long integer"
    return f"the class {value.__name__}" if isinstance(value, type) else f"an object of type {type(value).__name__}"


def unknown_name(what: str, name: object, known: Iterable[str]) -> LrfdynError:
    """An error for a name that is not in a registry, with the near matches."""
    return LrfdynError(f"{what}: unknown name {shown(name)}; {near_names(name, known)}")


def near_names(name: object, known: Iterable[str]) -> str:
    """The known names that are near to one that is not known, or else all of them, in words."""
    names, given = sorted(known), shown(name).strip("'").lower()
    lower = {known_name.lower(): known_name for known_name in names}
    alike = [each for each in lower if _same_meaning(given, each)] or get_close_matches(given, lower, n=3, cutoff=0.5)
    near = [lower[each] for each in alike[:3]]
    if near:
        return f"did you mean {' or '.join(near)}?"
    some = [each for i, each in enumerate(names) if len(", ".join(names[: i + 1])) <= MOST_LISTED]
    more = f" and {len(names) - len(some)} more" if len(names) > len(some) else ""
    return f"known: {', '.join(some)}{more}"


def _same_meaning(given: str, known: str) -> bool:
    """Whether the last parts of two names (`a.b`, `--a.b`) are the same but for `_` and `-`, or one has the first
    letters of the other's words: `lr` is `learning_rate`."""
    word, words = (re.split(r"[_-]", name.strip("-*?").rpartition(".")[2]) for name in (given, known))
    return bool(word[0]) and "".join(word) in ("".join(words), "".join(part[:1] for part in words if words[1:]))


def first_line(error: BaseException) -> str:
    """What another library's error says, in one line; its name where it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def out_of_memory(error: BaseException) -> bool:
    """Whether PyTorch found no memory, on a GPU or a CPU."""
    return type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in str(error)


def explain(error: BaseException) -> str:
    """What an error says; of the system's also the path that it is about, shortened."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error) or type(error).__name__
    path = "" if error.filename is None else f": {os.fsdecode(error.filename)}"
    return error.strerror + (path if len(path) <= MOST_LETTERS else f"{path[:MOST_LETTERS]}...")


def printable(text: str) -> str:
    """`text` in one line, with escapes for what would move the cursor or cannot be encoded."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


@contextmanager
def needs(message: str) -> Iterator[None]:
    """For imports of packages that not everybody has installed: without them, an error with this message."""
    try:
        yield
    except ImportError:
        raise LrfdynError(message) from None


def require(condition: bool, message: str) -> None:
    if not condition:
        raise LrfdynError(message)


def require_integer(name: str, value: object, minimum: int, most: int | None = None) -> None:
    integer = isinstance(value, int) and not isinstance(value, bool) and minimum <= value
    require(integer, f"{name}: expected an integer >= {minimum}, got {shown(value)}")
    require(most is None or value <= most, f"{name}: expected at most {most}, got {shown(value)}")  # type: ignore[operator]
