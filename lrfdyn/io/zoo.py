"""The zoo: trained models by name. zoo.json, which comes with the package, is its index: checksums and numbers of all.

A model is looked for in `weights/` of a checkout, in the cache (the folder LRFDYN_CACHE, or `lrfdyn` where the system
has its caches), and on the Hugging Face hub under the owner LRFDYN_HUB_OWNER (`lrfdyn`), which fills the cache. Its
files must have the checksums of the index wherever they are.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from lrfdyn.checks import checked
from lrfdyn.data import data_class
from lrfdyn.errors import LrfdynError, explain, near_names, require
from lrfdyn.files import cache_folder, expanded, file_digest, read_json, temporary_folder, writable_folder
from lrfdyn.io.remote import OURS, huggingface_hub

INDEX = Path(__file__).parents[1] / "zoo.json"
CHECKOUT = Path(__file__).parents[2]
OWNER = "lrfdyn"


@checked
@dataclass(frozen=True)
class Pretrained:
    """A trained model of the zoo, as its index has it. Accuracies are top-1 in percent on all `test_images`."""

    name: str
    model: str  # in the registry
    attention: str | None
    data: str
    recipe: str
    epochs: float
    seed: int  # of the weights that are stored
    precision: str  # that it was trained with
    top1: Mapping[str, float]  # by seed, after training and with its precision
    float32: float  # of the stored seed, all computed in float32: the weights as they were trained,
    bf16: float  # as they are stored, rounded to bfloat16,
    integer: float | None  # and made integers of what is stored; None where the model has no such form
    train_images: int
    test_images: int
    parameters: int
    state_bytes: int | None  # of an attention layer, for an image and time step
    energy_pj: float  # of an image
    logs: tuple[str, ...]  # folders in the repository: one for each seed
    files: Mapping[str, Mapping[str, Any]]  # `sha256` and `bytes` by name

    @property
    def mean(self) -> float:
        return statistics.mean(self.top1.values())

    @property
    def deviation(self) -> float | None:
        """Over the seeds; None of one alone."""
        return statistics.stdev(self.top1.values()) if len(self.top1) > 1 else None

    @property
    def bytes(self) -> int:
        return sum(facts["bytes"] for facts in self.files.values())


@cache
def read_index(path: Path) -> dict[str, Pretrained]:
    """The models of an index by name."""
    index = read_json(path, "zoo")
    require(index.get("format") == 1, f"zoo: {path} has format {index.get('format')!r}, expected 1")
    return {
        name: Pretrained(name, **{**entry, "logs": tuple(entry["logs"])}) for name, entry in index["models"].items()
    }


@checked
def list_pretrained(pattern: str = "*") -> list[Pretrained]:
    """The trained models of the zoo whose names a shell pattern matches, in the order of their names.

    for entry in lrfdyn.list_pretrained("*_digits_*"):
        print(entry.name, entry.mean, entry.parameters)
    """
    found = read_index(INDEX)
    return [found[name] for name in sorted(found) if fnmatchcase(name, pattern.lower())]


def hub_owner() -> str:
    return os.environ.get("LRFDYN_HUB_OWNER") or OWNER


def zoo_entry(source: str) -> Pretrained | None:
    """What a name in the zoo stands for, with its owner or without; None where it is none."""
    owner, _, name = source.rpartition("/")
    return read_index(INDEX).get(name) if owner in ("", OWNER, hub_owner()) else None


def zoo_hint(source: str) -> str:
    """What is said of a name that may have been meant to be one of the zoo."""
    owner, _, name = source.rpartition("/")
    return f" (the zoo: {near_names(name, read_index(INDEX))})" if owner in ("", OWNER, hub_owner()) else ""


def choose_pretrained(model: str, attention: str | None, data: str | bool) -> Pretrained:
    """The trained model of a network and attention on the data set `data`, or with True the only one there is."""
    of_model = [entry for entry in list_pretrained() if entry.model == model]
    known = ", ".join(f"{entry.data} with {entry.attention}" for entry in of_model)
    others = f"; {model} has {known}" if known else "; lrfdyn models --pretrained lists what there is"
    own = [entry for entry in of_model if entry.attention == attention]
    named = model if attention is None else f"{model} with {attention}"
    require(bool(own), f"pretrained: no trained {named} in the zoo{others}")
    found = [entry for entry in own if data is True or entry.data == str(data).lower()]
    several = ", ".join(entry.data for entry in own)
    require(bool(found), f"pretrained: {named} was trained on {several}, got {data!r}")
    require(len(found) == 1, f"pretrained: {named} was trained on {several}; expected one of them, got True")
    return found[0]


def general_model(recordings: bool = False) -> Pretrained:
    """What is taken where no model is named: of those for colour images, or for recordings of an event camera, the one
    that knows the most classes, and of several the most accurate."""

    def suits(entry: Pretrained) -> bool:
        data = data_class(entry.data)
        return data.framed if recordings else not data.framed and data.in_channels == 3

    found = [entry for entry in list_pretrained() if suits(entry)]
    what = "recordings" if recordings else "colour images"
    require(bool(found), f"model: no model was named, and the zoo has none for {what}")
    return max(found, key=lambda entry: (data_class(entry.data).num_classes, entry.bf16))


def zoo_folder(
    entry: Pretrained,
    cache_dir: str | os.PathLike[str] | None = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
) -> Path:
    """The folder of a model of the zoo, verified; where there is none yet, it is downloaded."""
    cached = (cache_folder() if cache_dir is None else expanded(cache_dir, "cache_dir")) / entry.name
    # Beside an installed package a folder `weights` is somebody else's.
    own = [CHECKOUT / "weights" / entry.name] if (CHECKOUT / "pyproject.toml").is_file() else []
    for folder in (*own, cached):
        if any((folder / name).exists() for name in entry.files):  # an sdist has the cards alone
            verify(entry, folder)
            return folder
    places = " and ".join(f"not in {folder.parent}" for folder in (*own, cached))
    require(not local_files_only, f"source: {entry.name} is {places}, and local_files_only asks for no download")
    repository = f"{hub_owner()}/{entry.name}"
    with temporary_folder(writable_folder(cached.parent, "LRFDYN_CACHE")) as place:
        made = place / entry.name
        with huggingface_hub(f"source: {entry.name} is {places}, and the hub does not give {repository}") as hub:
            hub.snapshot_download(repository, local_dir=made, token=token, allow_patterns=[*entry.files], **OURS)
        verify(entry, made)
        with suppress(OSError):  # another process was faster
            os.replace(made, cached)
    verify(entry, cached)
    return cached


def verify(entry: Pretrained, folder: Path) -> None:
    """An error for the first file that does not have the checksum of the index."""
    hint = "delete the folder to get it anew, or update lrfdyn"
    for name, facts in entry.files.items():
        try:
            found = file_digest(folder / name)
        except OSError as error:
            why = error.strerror or explain(error)  # without the path again
            raise LrfdynError(f"source: {entry.name} is not whole: {folder / name}: {why}; {hint}") from None
        same = found == facts["sha256"]
        require(
            same, f"source: {folder / name} is damaged or of another version (its checksum is not the zoo's); {hint}"
        )
