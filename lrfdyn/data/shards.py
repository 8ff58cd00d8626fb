"""WebDataset shards: tar files that hold `<key>.jpg` (or .jpeg, .png, .webp) and `<key>.cls` (the class index as text)
for every sample. The headers are read once (`.<shard>.index.npy` keeps what they say), so an epoch can start at any
step. To read nearly in sequence, the shards are shuffled, and samples only among `shuffle_shards` of them at a time."""

from __future__ import annotations

import glob
import io
import os
import tarfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lrfdyn.data.augment import Augmentation
from lrfdyn.data.base import register_data
from lrfdyn.data.decode import DecodedData, Images, Part
from lrfdyn.data.hashed_random import ORDER, SHARD_ORDER, hashed, permutation
from lrfdyn.data.manifest import Manifest, check_sizes
from lrfdyn.errors import LrfdynError, require, require_integer
from lrfdyn.files import plain_file, remove_abandoned, write_atomic

ENDINGS = ("jpg", "jpeg", "png", "webp")
MASKED_ENDINGS = ("jpg", "jpeg", "webp")  # of images with masks, which are .png
FORMAT = 1  # of the kept index
MOST_DIGITS = 6  # of a class index


class Member(NamedTuple):
    """A file in a shard. As text it is the shard, its name in it, and where it begins."""

    shard: Path
    offset: int
    size: int

    def __str__(self) -> str:
        return f"{self.shard} ({self.name}{' ' if self.name else ''}at byte {self.offset})"

    @property
    def name(self) -> str:
        """That its header has, just before it; none where that cannot be read."""
        with suppress(OSError, tarfile.TarError):
            header = self._bytes(self.offset - tarfile.BLOCKSIZE, tarfile.BLOCKSIZE)
            return tarfile.TarInfo.frombuf(header, tarfile.ENCODING, "surrogateescape").name
        return ""

    @property
    def stem(self) -> str:
        return Path(self.name).stem

    def read(self) -> bytes:
        return self._bytes(self.offset, self.size)

    def _bytes(self, offset: int, size: int) -> bytes:
        with open(self.shard, "rb", buffering=0) as file:
            return os.pread(file.fileno(), size, offset)


class ShardTable:
    """Where the samples of `shards` are, shard by shard in the order of the tar files: a row for each, of `shard`, its
    number, and of `table`, offset and size of the image and then its label, or with `masks` where its mask is."""

    def __init__(self, shards: Sequence[Path], masks: bool = False) -> None:
        for folder in {path.parent for path in shards}:
            remove_abandoned(folder)
        self.shards, tables = shards, [_index(path, masks) for path in shards]
        self.shard = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
        self.table = np.concatenate(tables)

    def member(self, index: int, column: int = 0) -> Member:
        offset, size = self.table[index, column : column + 2].tolist()
        return Member(self.shards[self.shard[index]], offset, size)

    def order(self, rows: np.ndarray, window: int, seed: int, epoch: int) -> np.ndarray:
        """The samples `rows`, numbered anew, in an order that shuffles the shards, and samples among `window` of them
        at a time."""
        place = np.argsort(permutation(len(self.shards), seed, epoch, SHARD_ORDER))  # of every shard
        scattered = hashed(seed, epoch, ORDER, np.arange(len(rows)))
        return np.lexsort((scattered, place[self.shard[rows]] // window))


class ShardImages(ShardTable, Images):
    """All samples of `shards` with a class each."""

    def __init__(self, shards: Sequence[Path]) -> None:
        super().__init__(shards)
        self.labels = self.table[:, 2].copy()

    def name(self, index: int) -> str:
        return str(self.member(index))

    def read(self, index: int) -> bytes:
        return self.member(index).read()


def _index(path: Path, masks: bool) -> np.ndarray:
    """The rows of a shard's table, kept beside it where that is possible."""
    kept = path.with_name(f".{path.name}.{'masks' if masks else 'index'}.npy")
    try:
        made_from = [FORMAT, path.stat().st_size, path.stat().st_mtime_ns, *([0] if masks else [])]
        with suppress(Exception):  # none is kept, or a file that is damaged in any way
            table = np.load(plain_file(kept), allow_pickle=False)
            ends = [table[1:, i : i + 2].sum(1).max() for i in ((0, 2) if masks else (0,))]
            whole = table.dtype == np.int64 and len(table) > 1 and table[1:].min() >= 0
            if whole and table[0].tolist() == made_from and max(ends) <= made_from[1]:
                return table[1:]
        table = np.array([made_from, *_scan(path, masks)], np.int64)
    except (OSError, tarfile.TarError) as error:
        raise LrfdynError(f"root: cannot read the shard {path} ({error})") from None
    with suppress(OSError):  # a folder that is only read from
        buffer = io.BytesIO()
        np.save(buffer, table)
        write_atomic(kept, lambda file: file.write_bytes(buffer.getvalue()))
    return table[1:]


def _scan(path: Path, masks: bool) -> list[tuple[int, ...]]:
    images: dict[str, tuple[int, ...]] = {}
    targets: dict[str, tuple[int, ...]] = {}
    endings, target = (MASKED_ENDINGS, "png") if masks else (ENDINGS, "cls")
    with tarfile.open(plain_file(path), "r:") as tar:
        for member in filter(tarfile.TarInfo.isfile, tar):
            folder, slash, base = member.name.rpartition("/")
            stem, _, ending = base.partition(".")  # a key ends at the first dot
            key = folder + slash + stem
            if ending.lower() in endings:
                require(key not in images, f"root: {path} has two images for the key {key}")
                images[key] = (member.offset_data, member.size)
            elif ending == target:
                targets[key] = (member.offset_data, member.size) if masks else (_class(path, tar, member),)
    for key in images:
        require(key in targets, f"root: {path} has no {key}.{target}")
    require(bool(images), f"root: the shard {path} has no images")
    return [(*place, *targets[key]) for key, place in images.items()]


def _class(path: Path, tar: tarfile.TarFile, member: tarfile.TarInfo) -> int:
    text = tar.extractfile(member).read(MOST_DIGITS + 20)  # type: ignore[union-attr]  # it is a file
    number = text.strip().isdigit() and len(text.strip()) <= MOST_DIGITS
    require(number, f"root: {member.name} in {path} is not a class index: {text[:20]!r}")
    return int(text)


def find_shards(root: Path, patterns: str | Sequence[str], argument: str) -> list[Path]:
    patterns = [patterns] if isinstance(patterns, str) else patterns
    texts = isinstance(patterns, Sequence) and all(isinstance(pattern, str) for pattern in patterns)
    require(texts, f"{argument}: expected a file pattern or a list of them, got {patterns!r}")
    found = {Path(path) for pattern in patterns for path in glob.glob(str(root / pattern))}
    require(bool(found), f"{argument}: no shards match {', '.join(patterns)} in {root}")
    return sorted(found)


def matching_manifest(shards: Sequence[Path], task: str, reader: str) -> Manifest | None:
    """That of the shards, checked, where they have one; it must be of this task. `reader` is what reads the others."""
    manifest = check_sizes(shards)
    fits = manifest is None or manifest.task == task
    require(fits, f"root: {shards[0].parent} holds shards for {manifest and manifest.task}, which {reader} reads")
    return manifest


@register_data("webdataset")
class Shards(DecodedData):
    """`train` and `test` are file patterns or lists of them, relative to `root` or absolute: shards may lie on several
    disks. What `lrfdyn data pack` says of its shards is checked, and gives the classes, their names and the statistics
    of the colours. Further `options` are those of `DecodedData`."""

    def __init__(
        self,
        root: Path,
        augment: Augmentation,
        *,
        train: str | Sequence[str] = "train*.tar",
        test: str | Sequence[str] = "val*.tar",
        num_classes: int | None = None,
        shuffle_shards: int = 16,
        **options: Any,
    ) -> None:
        require_integer("shuffle_shards", shuffle_shards, 1)
        files, test_files = find_shards(root, train, "train"), find_shards(root, test, "test")
        manifest = matching_manifest([*files, *test_files], self.task, "mask_shards")
        images, test_images = ShardImages(files), ShardImages(test_files)
        classes = 1 + int(max(images.labels.max(), test_images.labels.max()))
        if manifest is not None:
            self.mean, self.deviation = tuple(manifest.mean), tuple(manifest.deviation)
            classes, self.class_names = max(classes, manifest.classes), manifest.class_names
        num_classes = classes if num_classes is None else num_classes
        require_integer("num_classes", num_classes, classes)  # as many as the shards have
        if num_classes != classes:
            self.class_names = None
        self._window, self._images, self._rows = shuffle_shards, images, np.arange(len(images.labels))
        super().__init__(images, test_images, num_classes, augment, **options)

    def hold_out(self, images: int) -> None:
        super().hold_out(images)
        train = self.splits["train"]
        assert isinstance(train, Part)
        self._rows = self._rows[train.chosen]

    def order(self, seed: int, epoch: int) -> np.ndarray:
        return self._images.order(self._rows, self._window, seed, epoch)
