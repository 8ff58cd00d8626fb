"""Image, ground truth and the masks of several models side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from lrfdyn.errors import require, unknown_name
from lrfdyn.files import write_atomic
from lrfdyn.segmentation.data import IGNORED, Pair, find_pairs, find_root, read_pair
from lrfdyn.segmentation.drawing import blend, grid, legend, pillow
from lrfdyn.segmentation.model import Segmenter
from lrfdyn.segmentation.predict import load_segmenter, predict_mask

SCENES = 4  # where none are named


def choose_pairs(root: Path, names: Sequence[str] = (), count: int = SCENES) -> list[Pair]:
    """Return validation pairs by name, or `count` of them spread over the whole split."""
    pairs = find_pairs(find_root(root), "validation")
    if not names:
        places = np.linspace(0, len(pairs) - 1, min(count, len(pairs))).round().astype(int)
        return [pairs[i] for i in places]
    known = {pair.image.stem: pair for pair in pairs}
    for name in names:
        if name not in known:
            raise unknown_name("scene", name, known)
    return [known[name] for name in names]


def segmentation_figure(
    models: Mapping[str, str | Segmenter], pairs: Sequence[Pair], out: Path, *, device: str | None = None
) -> dict[str, list[float]]:
    """Write the figure, a PNG file or by its ending a JPEG file: a row per pair, a column per model by its title.
    Return the pixel accuracy of every model on every pair, in percent, which the captions say too."""
    require(len(models) > 0, "models: expected at least one")
    networks = {
        title: load_segmenter(model, device) if isinstance(model, str) else model for title, model in models.items()
    }
    counts = {network.num_classes for network in networks.values()}
    require(len(counts) == 1, f"models: expected the same number of classes in all, got {sorted(counts)}")
    (classes,) = counts
    accuracy: dict[str, list[float]] = {title: [] for title in networks}
    rows, captions = [], []
    for pair in pairs:
        pixels, truth = read_pair(pair, classes)  # as the models saw them, whatever EXIF says
        image = pillow().Image.fromarray(pixels)
        masks = {title: predict_mask(network.eval(), image) for title, network in networks.items()}
        labelled = truth != IGNORED
        for title, mask in masks.items():
            accuracy[title].append(100 * float((mask == truth)[labelled].mean()) if labelled.any() else float("nan"))
        pictures = [image, *(blend(image, mask, classes) for mask in (truth, *masks.values()))]
        rows.append([*pictures, legend([truth, *masks.values()], classes, 300, limit=12, percent=False)])
        correct = ", ".join(f"{title} {values[-1]:.1f} %" for title, values in accuracy.items())
        captions.append(f"{pair.image.stem}: correct pixels {correct}")
    sheet = grid(["image", "ground truth", *networks, "largest classes"], rows, captions)
    how = {"format": "JPEG", "quality": 88} if out.suffix.lower() in (".jpg", ".jpeg") else {"format": "PNG"}
    write_atomic(out, lambda file: sheet.save(file, **how))
    return accuracy
