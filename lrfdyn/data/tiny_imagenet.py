"""Tiny-ImageNet-200 as it comes. Its images are decoded once, kept in a file of levels that is mapped into memory, and
served from the device's memory."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lrfdyn.data.array_file import cache_folder, cached_array, fingerprint
from lrfdyn.data.augment import Augmentation
from lrfdyn.data.base import NumberedData, place, register_data
from lrfdyn.data.hashed_random import Keys
from lrfdyn.data.loading import load_parts, to_device
from lrfdyn.data.preprocess import eight_bits, reason, require_pillow
from lrfdyn.errors import LrfdynError, require, require_integer
from lrfdyn.files import plain_file, text_lines

TOGETHER = 500  # images that a process decodes at a time
FOLDER = "tiny-imagenet-200"


class DecodedOnce(NumberedData):
    """Image files of one size, `[n, 3, size, size]` in one file that is made at the first use, by `workers` processes
    (None: one a core), and kept in the folder `cache`, by default `.levels` in that of the data; changed images make it
    anew. All of it goes to the memory of a GPU. Subclasses find the files."""

    in_channels = 3
    images_at_once = 1024

    def __init__(
        self,
        root: Path,
        files: Sequence[str],
        labels: Sequence[int],
        train: int,
        augment: Augmentation,
        *,
        cache: str | None = None,
        workers: int | None = None,
    ) -> None:
        require_pillow("data: decoding images")
        super().__init__(root, augment)
        require(augment.crop != "resized", "crop: expected pad or none for images that are kept decoded, got resized")
        require_integer("workers", 0 if workers is None else workers, 0)
        self.root, self._files, self._workers = root, np.array([os.fsencode(file) for file in files]), workers
        self.cache = cache_folder(cache, root / ".levels")
        self.number(labels, train)
        self._levels: np.ndarray | None = None
        self._resident: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def levels(self) -> np.ndarray:
        """All images, those of training first, mapped from the cache."""
        if self._levels is None:
            names = (os.fsdecode(file) for file in self._files)
            made_of = fingerprint(self.root, ((name,) for name in names), "image")
            facts = {"shape": [len(self._files), 3, self.image_size, self.image_size], "images": made_of}
            what, path = f"levels of {len(self._files)} images", self.cache / type(self).__name__
            self._levels = cached_array(path, facts, self._make, what)
        return self._levels

    def _make(self) -> Iterator[np.ndarray]:
        return load_parts(self._decode, len(self._files), TOGETHER, self._workers)

    def _decode(self, numbers: np.ndarray) -> np.ndarray:
        from PIL.Image import open as open_image

        levels = np.empty((len(numbers), self.image_size, self.image_size, 3), np.uint8)
        for row, number in zip(levels, numbers, strict=True):
            path = Path(os.fsdecode(self._files[number]))
            try:
                with open_image(plain_file(path)) as file:
                    pixels = np.asarray(eight_bits(file).convert("RGB"))
            except Exception as error:  # damaged files make decoders fail in any way
                raise LrfdynError(f"data: cannot read the image {path} ({reason(error)})") from None
            high, wide, size = *pixels.shape[:2], self.image_size
            require(high == wide == size, f"data: the image {path} is {wide}x{high} pixels, expected {size}x{size}")
            row[:] = pixels
        return levels.transpose(0, 3, 1, 2)

    def load(self, split: str, steps: Sequence[Keys], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        if device not in self._resident:
            with torch.inference_mode(False), warnings.catch_warnings():  # they stay, for training too
                warnings.simplefilter("ignore", UserWarning)  # levels that are mapped cannot be written; nobody does
                both = torch.from_numpy(self.levels()), torch.from_numpy(self.labels)
                self._resident[device] = both[0].to(device), both[1].to(device)
        levels, labels = self._resident[device]
        for where in (to_device(self.rows[split][keys.samples], device) for keys in steps):
            yield levels.index_select(0, where), labels.index_select(0, where)

    def picture(self, split: str, index: int) -> tuple[np.ndarray, int]:
        row = self.rows[split][index]
        return self.levels()[row].transpose(1, 2, 0), int(self.labels[row])


@register_data("tiny_imagenet")
class TinyImageNet(DecodedOnce):
    """Tiny-ImageNet-200: `train/<wnid>/images/*.JPEG`, `val/images/*.JPEG`, `val/val_annotations.txt`, `wnids.txt` and
    `words.txt`, in `root` or in `tiny-imagenet-200` there. Classes are numbered in the sorted order of their wnids, as
    those of ImageNet are, and have the first of their names in `words.txt`. `val` is for tests; the images in `test`
    have no published labels. The `options` are those of `DecodedOnce`."""

    num_classes, image_size, train_images, test_images = 200, 64, 100_000, 10_000
    # Of all pixels of the 100,000 training images, as Pillow decodes them.
    mean, deviation = (0.4802, 0.4481, 0.3975), (0.2764, 0.2689, 0.2816)

    def __init__(
        self, root: Path, augment: Augmentation, *, cache: str | None = None, workers: int | None = None
    ) -> None:
        folder = place(root, (FOLDER,), "wnids.txt")
        wnids = sorted(line for line in text_lines(folder / "wnids.txt", "root") if line)
        require(bool(wnids), f"root: {folder / 'wnids.txt'} lists no classes")
        names = dict(line.split("\t", 1) for line in text_lines(folder / "words.txt", "root") if "\t" in line)
        files, labels = _training_files(folder / "train", wnids)
        test_files, test_labels = _test_files(folder / "val", wnids)
        self.num_classes = len(wnids)
        self.class_names = [names.get(wnid, wnid).partition(",")[0].strip() for wnid in wnids]
        everything, train = [*labels, *test_labels], len(files)
        super().__init__(root, [*files, *test_files], everything, train, augment, cache=cache, workers=workers)


def _training_files(folder: Path, wnids: Sequence[str]) -> tuple[list[str], list[int]]:
    files, labels = list[str](), list[int]()
    for label, wnid in enumerate(wnids):
        images = folder / wnid / "images"
        require(images.is_dir(), f"root: no such folder {images}")
        found = sorted(entry.path for entry in os.scandir(images) if entry.name.lower().endswith(".jpeg"))
        require(bool(found), f"root: the class folder {images} has no images")
        files, labels = files + found, labels + [label] * len(found)
    return files, labels


def _test_files(folder: Path, wnids: Sequence[str]) -> tuple[list[str], list[int]]:
    files, labels, known = list[str](), list[int](), {wnid: label for label, wnid in enumerate(wnids)}
    listed = folder / "val_annotations.txt"
    for number, line in enumerate(text_lines(listed, "root"), 1):
        name, wnid = (*line.split("\t"), "", "")[:2]
        require(wnid in known, f"root: {listed}: line {number}: expected an image and its class, got {line[:40]!r}")
        files.append(str(folder / "images" / name))
        labels.append(known[wnid])
    require(bool(files), f"root: {listed} lists no images")
    return files, labels
