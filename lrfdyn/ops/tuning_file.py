"""What was measured on a machine, in a file that belongs to it.

The folder is `LRFDYN_TUNING`, or `tuning` in the cache of the package; `LRFDYN_TUNING=0` turns the files off. A file
is of one GPU, one version of Triton and one state of the sources of the kernels: of others it says nothing.
"""

from __future__ import annotations

import hashlib
import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import triton

from lrfdyn.errors import LrfdynError, explain, require
from lrfdyn.files import cache_folder, expanded, in_turn, read_json, write_json
from lrfdyn.ops.machine import Machine

Known = dict[str, dict[str, int]]


def folder() -> Path | None:
    """Where the files are; None where they are turned off."""
    given = os.environ.get("LRFDYN_TUNING")
    if given == "0":
        return None
    return expanded(given, "LRFDYN_TUNING") if given else cache_folder() / "tuning"


@cache
def sources() -> str:
    """A digest of everything that kernels and their launches are made of."""
    digest = hashlib.sha256()
    place = Path(__file__).parent
    for path in sorted(place.rglob("*.py")):
        digest.update(f"{path.relative_to(place).as_posix()}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def owner(machine: Machine) -> dict[str, Any]:
    """What the measurements hold for."""
    return {"machine": asdict(machine), "triton": triton.__version__, "kernels": sources()}


def path_of(machine: Machine) -> Path | None:
    place = folder()
    if place is None:
        return None
    digest = hashlib.sha256(repr(owner(machine)).encode()).hexdigest()
    name = re.sub(r"\W+", "_", f"{machine.name} {machine.architecture}")
    return place / f"{name}-{digest[:16]}.json"


def _read(machine: Machine) -> Known:
    path = path_of(machine)
    if path is None or not path.is_file():
        return {}
    found = read_json(path, "LRFDYN_TUNING")
    require({key: found.get(key) for key in owner(machine)} == owner(machine), f"{path} is of another machine")
    known = found.get("options")
    valid = isinstance(known, dict) and all(
        isinstance(options, dict) and all(type(value) is int for value in options.values())
        for options in known.values()
    )
    require(valid, f"{path}: expected sizes under 'options'")
    assert isinstance(known, dict)
    return known


@cache
def read(machine: Machine) -> Known:
    """What is known of a machine, read once in a process. A file that cannot be used is ignored, with a warning."""
    try:
        return _read(machine)
    except (LrfdynError, OSError) as error:
        warnings.warn(f"measured block sizes are ignored: {explain(error)}", stacklevel=2)
        return {}


def add(machine: Machine, new: Mapping[str, Mapping[str, int]]) -> None:
    """Adds to the file, which several processes may do at once; what is new counts."""
    path = path_of(machine)
    if path is None or not new:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with in_turn(path.parent):
        read.cache_clear()
        write_json(path, {**owner(machine), "options": {**read(machine), **new}})
        read.cache_clear()
