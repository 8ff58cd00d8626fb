"""Things by name: attentions, models, data sets and tasks, those of other packages included: modules that an entry
point of the group `lrfdyn.plugins` names and whose import runs their `register_...` decorators."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from typing import TypeVar

from lrfdyn.errors import first_line, require, unknown_name

Item = TypeVar("Item")
_plugins = iter(entry_points(group="lrfdyn.plugins"))  # every call goes on with those that are left
_loading = threading.RLock()  # other threads wait for the names; a plugin may look up some itself


def load_plugins() -> None:
    """Imports what installed packages offer, once; a package that cannot be imported is a warning, not an error."""
    with _loading:
        for point in _plugins:
            try:
                point.load()
            except Exception as error:  # another package's, so anything
                warnings.warn(f"plugin {point.name!r} ({point.value}) is left out: {first_line(error)}", stacklevel=2)


class Registry(Mapping[str, Item]):
    """A mapping from names to `what` they stand for. An unknown name is an error that lists the near matches."""

    def __init__(self, what: str) -> None:
        self.what = what
        self._items: dict[str, Item] = {}

    def add(self, name: str, item: Item) -> Item:
        """Makes `item` known as `name`, which must be free, and returns it."""
        require(isinstance(name, str) and bool(name), f"{self.what}: expected a name, got {name!r}")
        # A module that is loaded again brings the same class or function again.
        known, new = (
            (getattr(thing, "__module__", None), getattr(thing, "__qualname__", thing))
            for thing in (self._items.get(name, item), item)
        )
        require(known == new, f"{self.what}: the name {name!r} is taken")
        self._items[name] = item
        return item

    def name_of(self, given: str) -> str:
        """The name in the registry that `given` is, with capitals or without."""
        if given in self:
            return given
        for name in self:
            if name.lower() == str(given).lower():
                return name
        raise unknown_name(self.what, given, self)

    def __getitem__(self, name: str) -> Item:
        return self._items[self.name_of(name)]

    def __contains__(self, name: object) -> bool:
        load_plugins()
        return isinstance(name, str) and name in self._items

    def __iter__(self) -> Iterator[str]:
        load_plugins()
        return iter(self._items)

    def __len__(self) -> int:
        load_plugins()
        return len(self._items)
