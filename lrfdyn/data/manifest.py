"""What `lrfdyn data pack` says of its shards in `manifest.json` beside them, and whether they still are as it says."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lrfdyn.checks import check_fields, checked
from lrfdyn.errors import LrfdynError, explain, require
from lrfdyn.files import plain_file, read_json

MANIFEST = "manifest.json"
KEY, FORMAT = "lrfdyn_shards", 1  # by which it is known, and its value


@dataclass(frozen=True)
class Shard:
    """A tar file of one split, "train" or "test"."""

    name: str
    split: str
    images: int
    bytes: int
    sha256: str

    def __post_init__(self) -> None:
        check_fields(self)
        plain = self.name == Path(self.name).name and self.split in ("train", "test")
        require(plain, f"expected the name of a file and a split, got {self.name!r} and {self.split!r}")


@dataclass(frozen=True)
class Manifest:
    """Of what the shards are made, and how; lists are as JSON has them."""

    source: str
    task: str
    classes: int
    class_names: list[str] | None
    mean: list[float]  # that the source is normalised by
    deviation: list[float]
    short_side: int | None  # that larger pictures were scaled to
    quality: int  # of the JPEG files
    made_by: dict[str, str]  # versions
    images: dict[str, int]
    shards: list[Shard]

    def __post_init__(self) -> None:
        check_fields(self)
        names = self.class_names
        fits = names is None or len(names) == self.classes
        require(fits, f"class_names: expected {self.classes}, got {len(names or ())}")
        require(len(self.mean) == len(self.deviation) == 3, "mean, deviation: expected three numbers each")

    def as_dict(self) -> dict[str, Any]:
        return {KEY: FORMAT, **asdict(self)}


def read_manifest(folder: Path) -> Manifest | None:
    """That of the shards in a folder; None where there is none, or one of something else."""
    path = folder / MANIFEST
    if not path.exists():
        return None
    values = read_json(path, "root")
    if KEY not in values:
        return None
    try:
        require(values.pop(KEY) == FORMAT, "another version of lrfdyn made it")
        return Manifest(**{**values, "shards": [Shard(**shard) for shard in values["shards"]]})
    except (KeyError, TypeError, ValueError) as error:
        raise LrfdynError(f"root: cannot read {path} ({explain(error)})") from None


def check_sizes(shards: Iterable[Path]) -> Manifest | None:
    """The manifest of these shards, of which all must be there with the sizes that it says. Without one they are what
    they are. Where they lie in several folders, the first manifest is that of all."""
    first, shards = None, list(shards)
    for folder in dict.fromkeys(path.parent for path in shards):
        manifest = read_manifest(folder)
        if manifest is not None:
            _check_folder(folder, manifest, {path.name for path in shards if path.parent == folder})
        first = first or manifest
    return first


def _check_folder(folder: Path, manifest: Manifest, names: set[str]) -> None:
    known = {shard.name for shard in manifest.shards}
    for name in sorted(names - known):
        raise LrfdynError(f"root: the shard {folder / name} is not in {folder / MANIFEST}")
    for shard in manifest.shards:
        path = folder / shard.name
        require(path.is_file(), f"root: the shard {path} is missing, which {MANIFEST} lists")
        size = path.stat().st_size
        require(size == shard.bytes, f"root: the shard {path} has {size} bytes, {MANIFEST} says {shard.bytes}")


@checked
def check_shards(folder: Path, say: Callable[[Shard], object] = lambda shard: None) -> Manifest:
    """Reads all shards that `lrfdyn data pack` wrote to `folder`: the first that is missing or changed is an error.
    `say` hears of every one that is as it was written."""
    manifest = read_manifest(folder)
    if manifest is None:
        raise LrfdynError(f"shards: {folder} has no {MANIFEST} of lrfdyn data pack")
    _check_folder(folder, manifest, {path.name for path in folder.glob("*.tar")})
    for shard in manifest.shards:
        path = folder / shard.name
        try:
            with plain_file(path).open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise LrfdynError(f"shards: cannot read {path} ({explain(error)})") from None
        words = f"sha256 {found[:12]}..., {MANIFEST} says {shard.sha256[:12]}..."
        require(found == shard.sha256, f"shards: {path} has changed ({words})")
        say(shard)
    return manifest
