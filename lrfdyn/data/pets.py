"""Oxford-IIIT Pet as it comes, for classification; its official split lists are for segmentation too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lrfdyn.data.augment import Augmentation
from lrfdyn.data.base import place, register_data
from lrfdyn.data.decode import DecodedData, Images
from lrfdyn.errors import require
from lrfdyn.files import plain_file, text_lines

FOLDERS = ("oxford-iiit-pet",)  # what an archive may have made
BREEDS = 37


class Pet(NamedTuple):
    """A line of a split list."""

    name: str  # of the files, without ending
    label: int

    @property
    def breed(self) -> str:
        return self.name.rpartition("_")[0].replace("_", " ")


def find_pets(root: Path) -> tuple[Path, list[Pet], list[Pet]]:
    """The folder that holds `images` and `annotations`, and the pets for training and for tests."""
    folder = place(root, FOLDERS, "annotations/trainval.txt")
    require((folder / "images").is_dir(), f"root: no such folder {folder / 'images'}")
    return folder, _listed(folder / "annotations" / "trainval.txt"), _listed(folder / "annotations" / "test.txt")


def _listed(path: Path) -> list[Pet]:
    """Lines have a name, the class from 1 on, the species and the number of the breed in it."""
    pets = []
    for number, line in enumerate(text_lines(path, "root"), 1):
        if line and not line.startswith("#"):
            name, label = (*line.split(), "", "")[:2]
            known = label.isdecimal() and 1 <= int(label) <= BREEDS and "/" not in name
            require(known, f"root: {path}: line {number}: expected a name and a class 1..{BREEDS}, got {line[:40]!r}")
            pets.append(Pet(name, int(label) - 1))
    require(bool(pets), f"root: {path} lists no images")
    return pets


class PetImages(Images):
    def __init__(self, folder: Path, pets: Sequence[Pet]) -> None:
        self.folder, self.names = folder, np.array([pet.name for pet in pets])
        self.labels = np.array([pet.label for pet in pets], np.int64)

    def name(self, index: int) -> str:
        return str(self.folder / f"{self.names[index]}.jpg")

    def read(self, index: int) -> bytes:
        return plain_file(Path(self.name(index))).read_bytes()


@register_data("oxford_pets")
class OxfordPets(DecodedData):
    """Cats and dogs of 37 breeds (Parkhi et al., 2012): `images/*.jpg`, with the official split of
    `annotations/trainval.txt` and `annotations/test.txt`, in `root` or in `oxford-iiit-pet` there. Classes are in the
    order of those lists and called by the names of their files. `options` are those of `DecodedData`."""

    num_classes, image_size, train_images, test_images = BREEDS, 224, 3_680, 3_669

    def __init__(self, root: Path, augment: Augmentation, **options: Any) -> None:
        folder, train, test = find_pets(root)
        breeds = {pet.label: pet.breed for pet in (*train, *test)}
        self.class_names = [breeds.get(label, f"class {label}") for label in range(BREEDS)]
        images = folder / "images"
        super().__init__(PetImages(images, train), PetImages(images, test), BREEDS, augment, **options)
