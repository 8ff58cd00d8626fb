"""Oxford-IIIT Pet as it comes, for segmentation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from lrfdyn.data.augment import Augmentation
from lrfdyn.data.base import register_data
from lrfdyn.data.pets import Pet, find_pets
from lrfdyn.errors import require, shown
from lrfdyn.segmentation.data import MaskedData
from lrfdyn.segmentation.pairs import Pair

TRIMAPS = "annotations/trimaps"
BORDER = 3  # in a trimap


@register_data("oxford_pets_trimaps")
class OxfordPetsTrimaps(MaskedData):
    """The pet before its background (Parkhi et al., 2012): `images/*.jpg` and `annotations/trimaps/*.png`, with the
    split of `annotations/trainval.txt` and `annotations/test.txt`, in `root` or in `oxford-iiit-pet` there. A trimap
    has 1 for the pet, 2 for the background and 3 for the border between them, which the authors call not classified.
    So it is ignored, in training and in tests, and there are two classes. Many tutorials make it a third class, which
    `border="class"` does; the numbers of the two do not compare. Further `options` are those of `MaskedData`."""

    num_classes, image_size, train_images, test_images = 2, 256, 3_680, 3_669
    class_names: Sequence[str] = ("pet", "background")

    def __init__(
        self, root: Path, augment: Augmentation, *, border: Literal["ignore", "class"] = "ignore", **options: Any
    ) -> None:
        require(border in ("ignore", "class"), f"border: expected ignore or class, got {shown(border)}")
        if border == "class":
            self.class_names = ("pet", "background", "border")
        else:
            self.ignored = (BORDER,)
        folder, train, test = find_pets(root)
        require((folder / TRIMAPS).is_dir(), f"root: no such folder {folder / TRIMAPS}")
        super().__init__(_pairs(folder, train), _pairs(folder, test), len(self.class_names), augment, **options)


def _pairs(folder: Path, pets: Sequence[Pet]) -> list[Pair]:
    return [Pair(folder / "images" / f"{pet.name}.jpg", folder / TRIMAPS / f"{pet.name}.png") for pet in pets]
