"""Pictures with masks in WebDataset shards: `<key>.jpg` and `<key>.png`, of which 0 is no class and 1 the first one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np

from lrfdyn.data.augment import Augmentation
from lrfdyn.data.base import register_data
from lrfdyn.data.shards import ShardTable, find_shards, matching_manifest
from lrfdyn.errors import require, require_integer
from lrfdyn.segmentation.data import MaskedData
from lrfdyn.segmentation.pairs import Pair


class ShardPairs(ShardTable, Sequence[Pair]):
    """All samples of `shards` with a mask each."""

    def __init__(self, shards: Sequence[Path]) -> None:
        super().__init__(shards, masks=True)

    def __len__(self) -> int:
        return len(self.shard)

    @overload
    def __getitem__(self, index: int) -> Pair: ...
    @overload
    def __getitem__(self, index: slice) -> list[Pair]: ...
    def __getitem__(self, index: int | slice) -> Pair | list[Pair]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return Pair(self.member(index), self.member(index, 2))


@register_data("mask_shards")
class MaskShards(MaskedData):
    """Shards of pictures with masks, as `lrfdyn data pack` writes them, which says how many classes there are; without
    its manifest `num_classes` does. `train` and `test` are file patterns or lists of them, relative to `root` or
    absolute. An epoch shuffles the shards, and pictures among `shuffle_shards` of them. Further `options` are those of
    `MaskedData`."""

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
        manifest = matching_manifest([*files, *test_files], self.task, "webdataset")
        if manifest is not None:
            classes, names = manifest.classes, manifest.class_names
            same = num_classes in (None, classes)
            require(same, f"num_classes: the shards in {root} have {classes}, got {num_classes}")
            num_classes, self.class_names = classes, names
            self.mean, self.deviation = tuple(manifest.mean), tuple(manifest.deviation)
        require(num_classes is not None, f"num_classes: expected one, as {root} has no manifest.json that says it")
        self._table, self._window = ShardPairs(files), shuffle_shards
        super().__init__(self._table, ShardPairs(test_files), int(num_classes or 0), augment, **options)

    def order(self, seed: int, epoch: int) -> np.ndarray:
        return self._table.order(np.arange(self.train_images), self._window, seed, epoch)
