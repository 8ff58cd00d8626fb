"""From pictures to masks: a trained segmentation model on image files, and several models side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lrfdyn.checks import checked
from lrfdyn.data.augment import normalise
from lrfdyn.data.preprocess import Preprocessing, open_picture, reason, scaled_size
from lrfdyn.devices import choose_device
from lrfdyn.errors import LrfdynError, require, unknown_name
from lrfdyn.files import writable_folder, write_atomic
from lrfdyn.segmentation.data import MaskedData
from lrfdyn.segmentation.drawing import blend, class_shares, grid, legend, mask_image, overlay, pillow
from lrfdyn.segmentation.inference import best_class, segment
from lrfdyn.segmentation.model import Segmenter
from lrfdyn.segmentation.pairs import IGNORED
from lrfdyn.sources import find_source

MOST_PIXELS = 2**24  # that the network sees at once: its scores are 150 numbers a pixel


@checked
def load_segmenter(source: str, device: str | None = None) -> Segmenter:
    """The trained segmentation model that a path or name stands for (see `lrfdyn.sources`), in evaluation mode."""
    place, found = choose_device(device), find_source(source)
    require(found.trained, f"model: {source} names a model without weights; expected a trained one")
    model = found.load()
    if not isinstance(model, Segmenter):
        raise LrfdynError(f"model: {source} is a {type(model).__name__}, expected a segmentation model")
    return model.to(place)


def size_seen(model: Segmenter, image: Any) -> tuple[int, int]:
    """Width and height at which the model sees an image: with the short side that it was trained on."""
    return scaled_size(image.size, model.config["image_size"] / min(image.size), MOST_PIXELS)


@torch.no_grad()
@checked
def predict_mask(model: Segmenter, image: Any, *, window: int | None = None, flip: bool = False) -> np.ndarray:
    """Classes `[H, W]` uint8 of a Pillow image, which is seen with the short side that the model was trained on, and
    normalised as its training data was; by ImageNet's statistics where the model does not say."""
    how = model.preprocessing or Preprocessing.usual(model.in_channels, model.config["image_size"])
    require(how.channels == 3, f"model: expected a mean of 3 channels, as pictures have, got {list(how.mean)}")
    seen = image.convert("RGB").resize(size_seen(model, image), pillow().Image.Resampling.BILINEAR)
    like = next(model.parameters())
    levels = torch.from_numpy(np.array(seen)).permute(2, 0, 1)[None].to(like.device)
    images = normalise(levels, how.mean, how.std).to(like.dtype)
    scores = segment(model, images, window=window, flip=flip)
    require(bool(scores.isfinite().all()), "model: its scores are not finite")
    return best_class(scores, (image.height, image.width))[0].to(torch.uint8).cpu().numpy()


@checked
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
    network, names = load_segmenter(model, device), set[str]()
    for path in map(Path, images):
        numbered = (f"{path.stem}_{number}" for number in count(2))  # of equal names the later ones are numbered
        name = next(name for name in chain([path.stem], numbered) if name not in names)
        names.add(name)
        try:
            image = open_picture(path, "RGB")
            size_seen(network, image)
        except Exception as error:  # damaged files make decoders fail in any way
            yield {"image": str(path), "error": reason(error)}
            continue
        mask, classes = predict_mask(network, image, window=window, flip=flip), network.num_classes
        own = network.class_names
        pictures = {"mask": mask_image(mask, classes), "overlay": overlay(image, mask, classes, own)}
        files = {kind: out / f"{name}_{kind}.png" for kind in pictures}
        try:
            for kind, file in files.items():
                write_atomic(file, partial(pictures[kind].save, format="PNG"))
        except OSError as error:
            raise LrfdynError(f"out: cannot write in {out} ({error.strerror or error})") from None
        written = {"image": str(path), **{kind: str(file) for kind, file in files.items()}}
        yield {**written, "width": image.width, "height": image.height, "classes": class_shares(mask, classes, own)}


def choose_scenes(source: MaskedData, names: Sequence[str] = (), count: int = 4) -> list[int]:
    """Return the numbers of test pictures by name, or of `count` of them spread over all."""
    pairs = source.test_pairs
    if not names:
        return np.linspace(0, len(pairs) - 1, min(count, len(pairs))).round().astype(int).tolist()
    known = {pairs[i].image.stem: i for i in range(len(pairs))}
    for name in names:
        if name not in known:
            raise unknown_name("scene", name, known)
    return [known[name] for name in names]


def segmentation_figure(
    models: Mapping[str, str | Segmenter],
    source: MaskedData,
    scenes: Sequence[int],
    out: Path,
    *,
    device: str | None = None,
) -> dict[str, list[float]]:
    """Write the figure, a PNG file or by its ending a JPEG file: a row per test picture of `source` whose number is in
    `scenes`, a column per model by its title. Return the pixel accuracy of every model on every picture, in percent,
    which the captions say too."""
    require(len(models) > 0, "models: expected at least one")
    require(len(scenes) > 0, "scenes: expected at least one")
    networks = {title: load_segmenter(m, device) if isinstance(m, str) else m for title, m in models.items()}
    counts = {network.num_classes for network in networks.values()}
    require(len(counts) == 1, f"models: expected the same number of classes in all, got {sorted(counts)}")
    (classes,), named = counts, next(iter(networks.values())).class_names or source.class_names
    same = classes == source.num_classes
    require(same, f"models: expected {source.num_classes} classes, as the data has, got {classes}")
    accuracy: dict[str, list[float]] = {title: [] for title in networks}
    rows, captions = [], []
    for scene in scenes:
        pixels, truth = source.picture("test", scene)  # as the models saw them, whatever EXIF says
        image, labelled = pillow().Image.fromarray(pixels), truth != IGNORED
        masks = [predict_mask(network.eval(), image) for network in networks.values()]
        for values, mask in zip(accuracy.values(), masks, strict=True):
            values.append(100 * float((mask == truth)[labelled].mean()) if labelled.any() else float("nan"))
        names = legend(np.stack([truth, *masks]), classes, 300, limit=12, percent=False, names=named)
        rows.append([image, *(blend(image, mask, classes) for mask in (truth, *masks)), names])
        correct = ", ".join(f"{title} {values[-1]:.1f} %" for title, values in accuracy.items())
        captions.append(f"{source.test_pairs[scene].image.stem}: correct pixels {correct}")
    sheet = grid(["image", "ground truth", *networks, "largest classes"], rows, captions)
    how = {"format": "JPEG", "quality": 88} if out.suffix.lower() in (".jpg", ".jpeg") else {"format": "PNG"}
    write_atomic(out, lambda file: sheet.save(file, **how))
    return accuracy
