"""From pictures to masks: a trained segmentation model on image files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lrfdyn.data.augment import normalise
from lrfdyn.data.decode import IMAGENET_DEVIATION, IMAGENET_MEAN
from lrfdyn.data.preprocess import open_picture, reason, scaled_size
from lrfdyn.devices import choose_device
from lrfdyn.errors import LrfdynError, require
from lrfdyn.files import writable_folder, write_atomic
from lrfdyn.segmentation.drawing import class_shares, mask_image, overlay, pillow
from lrfdyn.segmentation.inference import best_class, segment
from lrfdyn.segmentation.model import Segmenter
from lrfdyn.sources import find_source

MOST_PIXELS = 2**24  # that the network sees at once: its scores are 150 numbers a pixel


def load_segmenter(source: str, device: str | None = None) -> Segmenter:
    """The trained segmentation model that a path or name stands for (see `lrfdyn.sources`), in evaluation mode."""
    place, found = choose_device(device), find_source(source)
    require(found.trained, f"model: {source} names a model without weights; expected a trained one")
    model = found.load()
    if not isinstance(model, Segmenter):
        raise LrfdynError(f"model: {source} is a {type(model).__name__}, expected a segmentation model")
    return model.to(place)


@torch.no_grad()
def predict_mask(model: Segmenter, image: Any, *, window: int | None = None, flip: bool = False) -> np.ndarray:
    """Classes `[H, W]` uint8 of a Pillow image. It is seen with the short side that the model was trained on; the
    scores are scaled back."""
    seen = image.convert("RGB").resize(size_seen(model, image), pillow().Image.Resampling.BILINEAR)
    like = next(model.parameters())
    levels = torch.from_numpy(np.array(seen)).permute(2, 0, 1)[None].to(like.device)
    images = normalise(levels, IMAGENET_MEAN, IMAGENET_DEVIATION).to(like.dtype)
    scores = segment(model, images, window=window, flip=flip)
    return best_class(scores, (image.height, image.width))[0].to(torch.uint8).cpu().numpy()


def size_seen(model: Segmenter, image: Any) -> tuple[int, int]:
    """Width and height at which the model sees an image: with the short side that it was trained on."""
    return scaled_size(image.size, model.config["image_size"] / min(image.size), MOST_PIXELS)


def predict_segmentation(
    model: str,
    images: Sequence[Path],
    out: Path,
    *,
    device: str | None = None,
    flip: bool = False,
    window: int | None = None,
) -> Iterator[dict[str, Any]]:
    """Writes NAME_mask.png (a palette picture of classes) and NAME_overlay.png (with a legend) of every image to `out`.

    Yields one record per image: `image`, `mask`, `overlay`, `width`, `height` and `classes`, the share of pixels per
    class name, the largest first; or `image` and `error` for one that cannot be read.
    """
    require(len(images) > 0, "images: expected at least one file")
    pillow()  # or say what is missing
    writable_folder(out, "out")
    network = load_segmenter(model, device)
    for path, name in zip(images, unique_names(images), strict=True):
        yield _predict(network, Path(path), out, name, flip=flip, window=window)


def unique_names(images: Sequence[Path]) -> list[str]:
    """The names of the files without ending; of those that are equal, the later ones are numbered."""
    names: dict[str, None] = {}
    for stem in (Path(path).stem for path in images):
        numbered = (f"{stem}_{number}" for number in count(2))
        names[next(name for name in chain([stem], numbered) if name not in names)] = None
    return list(names)


def _predict(model: Segmenter, path: Path, out: Path, name: str, *, flip: bool, window: int | None) -> dict[str, Any]:
    try:
        image = open_picture(path, "RGB")
        size_seen(model, image)
    except Exception as error:  # damaged files make decoders fail in any way
        return {"image": str(path), "error": reason(error)}
    mask = predict_mask(model, image, window=window, flip=flip)
    classes = model.num_classes
    files = {"mask": (f"{name}_mask.png", mask_image(mask, classes)),
             "overlay": (f"{name}_overlay.png", overlay(image, mask, classes))}  # fmt: skip
    try:
        for file, picture in files.values():
            write_atomic(out / file, partial(picture.save, format="PNG"))
    except OSError as error:
        raise LrfdynError(f"out: cannot write in {out} ({error.strerror or error})") from None
    return {
        "image": str(path),
        **{kind: str(out / file) for kind, (file, _) in files.items()},
        "width": image.width,
        "height": image.height,
        "classes": class_shares(mask, classes),
    }
