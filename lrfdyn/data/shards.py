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
from typing import Any

import numpy as np

from lrfdyn.data.augment import Augmentation
from lrfdyn.data.base import register_data
from lrfdyn.data.decode import DecodedData, Images, Part
from lrfdyn.data.hashed_random import ORDER, SHARD_ORDER, hashed, permutation
from lrfdyn.errors import LrfdynError, require, require_integer
from lrfdyn.files import plain_file, remove_abandoned, write_atomic

ENDINGS = ("jpg", "jpeg", "png", "webp")
FORMAT = 1  # of the kept index
MOST_DIGITS = 6  # of a class index


class ShardImages(Images):
    """All samples of `shards`, shard by shard in the order of the tar files."""

    def __init__(self, shards: Sequence[Path]) -> None:
        for folder in {path.parent for path in shards}:
            remove_abandoned(folder)
        self.shards, tables = shards, [_index(path) for path in shards]
        self.shard = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
        self.offset, self.size, self.labels = np.concatenate(tables).T.copy()

    def name(self, index: int) -> str:
        """Of the shard and of the image in it, which its header has, just before it."""
        offset, member = int(self.offset[index]), ""
        with suppress(OSError, tarfile.TarError):
            header = self._bytes(index, offset - tarfile.BLOCKSIZE, tarfile.BLOCKSIZE)
            member = tarfile.TarInfo.frombuf(header, tarfile.ENCODING, "surrogateescape").name + " "
        return f"{self.shards[self.shard[index]]} ({member}at byte {offset})"

    def read(self, index: int) -> bytes:
        return self._bytes(index, int(self.offset[index]), int(self.size[index]))

    def _bytes(self, index: int, offset: int, size: int) -> bytes:
        with open(self.shards[self.shard[index]], "rb", buffering=0) as file:
            return os.pread(file.fileno(), size, offset)


def _index(path: Path) -> np.ndarray:
    """`[n, 3]`: offset, size and label of every image of a shard, kept beside it where that is possible."""
    kept = path.with_name(f".{path.name}.index.npy")
    try:
        made_from = [FORMAT, path.stat().st_size, path.stat().st_mtime_ns]
        with suppress(Exception):  # none is kept, or a file that is damaged in any way
            table = np.load(plain_file(kept), allow_pickle=False)
            whole = table.dtype == np.int64 and len(table) > 1 and table[1:].min() >= 0
            if whole and table[0].tolist() == made_from and table[1:, :2].sum(1).max() <= made_from[1]:
                return table[1:]
        table = np.array([made_from, *_scan(path)], np.int64)
    except (OSError, tarfile.TarError) as error:
        raise LrfdynError(f"root: cannot read the shard {path} ({error})") from None
    with suppress(OSError):  # a folder that is only read from
        buffer = io.BytesIO()
        np.save(buffer, table)
        write_atomic(kept, lambda file: file.write_bytes(buffer.getvalue()))
    return table[1:]


def _scan(path: Path) -> list[tuple[int, int, int]]:
    images: dict[str, tuple[int, int]] = {}
    labels: dict[str, int] = {}
    with tarfile.open(plain_file(path), "r:") as tar:
        for member in filter(tarfile.TarInfo.isfile, tar):
            folder, slash, base = member.name.rpartition("/")
            stem, _, ending = base.partition(".")  # a key ends at the first dot
            key = folder + slash + stem
            if ending.lower() in ENDINGS:
                require(key not in images, f"root: {path} has two images for the key {key}")
                images[key] = (member.offset_data, member.size)
            elif ending == "cls":
                text = tar.extractfile(member).read(MOST_DIGITS + 20)  # type: ignore[union-attr]  # it is a file
                number = text.strip().isdigit() and len(text.strip()) <= MOST_DIGITS
                require(number, f"root: {member.name} in {path} is not a class index: {text[:20]!r}")
                labels[key] = int(text)
    for key in images:
        require(key in labels, f"root: {path} has no {key}.cls")
    require(bool(images), f"root: the shard {path} has no images")
    return [(*place, labels[key]) for key, place in images.items()]


def _find(root: Path, patterns: str | Sequence[str], argument: str) -> list[Path]:
    patterns = [patterns] if isinstance(patterns, str) else patterns
    texts = isinstance(patterns, Sequence) and all(isinstance(pattern, str) for pattern in patterns)
    require(texts, f"{argument}: expected a file pattern or a list of them, got {patterns!r}")
    found = {Path(path) for pattern in patterns for path in glob.glob(str(root / pattern))}
    require(bool(found), f"{argument}: no shards match {', '.join(patterns)} in {root}")
    return sorted(found)


@register_data("webdataset")
class Shards(DecodedData):
    """`train` and `test` are file patterns or lists of them, relative to `root` or absolute: shards may lie on several
    disks. Further `options` are those of `DecodedData`."""

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
        images, self._window = ShardImages(_find(root, train, "train")), shuffle_shards
        test_images = ShardImages(_find(root, test, "test"))
        classes = 1 + int(max(images.labels.max(), test_images.labels.max()))
        num_classes = classes if num_classes is None else num_classes
        require_integer("num_classes", num_classes, classes)  # as many as the shards have
        self._shards, self._shard = len(images.shards), images.shard  # their number, and that of every image
        super().__init__(images, test_images, num_classes, augment, **options)

    def hold_out(self, images: int) -> None:
        super().hold_out(images)
        train = self.splits["train"]
        assert isinstance(train, Part)
        self._shard = self._shard[train.chosen]

    def order(self, seed: int, epoch: int) -> np.ndarray:
        place = np.argsort(permutation(self._shards, seed, epoch, SHARD_ORDER))  # of every shard
        scattered = hashed(seed, epoch, ORDER, np.arange(self.train_images))
        return np.lexsort((scattered, place[self._shard] // self._window))
