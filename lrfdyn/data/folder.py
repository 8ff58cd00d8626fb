"""ImageNet and Imagenette as they come, and any images in such folders: `train/<class>/*.JPEG` and
`val/<class>/*.JPEG`. The class index is the place of the folder's name in their sorted order, which for ImageNet's
synsets is the usual numbering."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from lrfdyn.data.augment import Augmentation
from lrfdyn.data.base import register_data
from lrfdyn.data.decode import DecodedData, Images
from lrfdyn.errors import LrfdynError, require

ENDINGS = (".jpeg", ".jpg", ".png", ".bmp", ".webp")


class FolderImages(Images):
    def __init__(self, folder: Path) -> None:
        require(folder.is_dir(), f"root: no such folder {folder}")
        try:
            self.classes = sorted(e.name for e in os.scandir(folder) if e.is_dir() and not e.name.startswith("."))
            require(bool(self.classes), f"root: {folder} has no class folders")
            files, labels = [], []
            for label, name in enumerate(self.classes):
                found = sorted(e.name for e in os.scandir(folder / name) if e.name.lower().endswith(ENDINGS))
                require(bool(found), f"root: the class folder {folder / name} has no images")
                files += [os.fsencode(f"{name}/{file}") for file in found]
                labels += [label] * len(found)
        except OSError as error:
            raise LrfdynError(f"root: cannot list {error.filename} ({error.strerror})") from None
        self.folder = folder
        # One array and not a million objects: every worker process would come to hold its own copy of those.
        self.files = np.array(files)
        self.labels = np.array(labels, np.int64)

    def name(self, index: int) -> str:
        return str(self.folder / os.fsdecode(self.files[index]))

    def read(self, index: int) -> bytes:
        return Path(self.name(index)).read_bytes()


@register_data("folder")
class ImageFolder(DecodedData):
    """`options` are those of `DecodedData`."""

    def __init__(self, root: Path, augment: Augmentation, **options: Any) -> None:
        train, test = FolderImages(root / "train"), FolderImages(root / "val")
        differ = sorted(set(train.classes) ^ set(test.classes))
        require(
            not differ, f"root: the class folder {differ[0] if differ else ''} is in only one of {root}/{{train,val}}"
        )
        super().__init__(train, test, len(train.classes), augment, **options)
        self.class_names = train.classes


@register_data("imagenet")
class ImageNet(ImageFolder):
    num_classes, train_images = 1000, 1_281_167


@register_data("imagenette")
class Imagenette(ImageFolder):
    num_classes, image_size, train_images = 10, 128, 9_469
