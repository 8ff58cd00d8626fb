"""Names and colours of classes: ADE20K's own 150, and numbered ones in well-separated colours for other data."""

from __future__ import annotations

import colorsys
from functools import cache
from pathlib import Path

import numpy as np

ADE20K_CLASSES = 150
GOLDEN_TURN = 0.618033988749895  # neighbouring numbers get hues far apart
NO_CLASS = (0, 0, 0)


@cache
def _table() -> tuple[tuple[str, tuple[int, int, int]], ...]:
    """Of SceneParse150, in the order of its classes: synonyms, and the colours that everybody draws them in."""
    lines = (Path(__file__).parent / "ade20k.tsv").read_text(encoding="utf-8").splitlines()[1:]
    rows = [line.split("\t") for line in lines]
    return tuple((name, (int(red), int(green), int(blue))) for red, green, blue, name in rows)


def class_names(classes: int = ADE20K_CLASSES) -> list[str]:
    """Return one word or two for each class: the first of its synonyms."""
    if classes == ADE20K_CLASSES:
        return [name.partition(",")[0] for name, _ in _table()]
    return [f"class {i + 1}" for i in range(classes)]


def palette(classes: int = ADE20K_CLASSES) -> np.ndarray:
    """Return the colours of the classes, levels `[256, 3]`; class 255, which is none, is black."""
    colours = np.zeros((256, 3), np.uint8)
    if classes == ADE20K_CLASSES:
        colours[:classes] = [colour for _, colour in _table()]
    else:
        for i in range(classes):
            colours[i] = [
                round(255 * level) for level in colorsys.hsv_to_rgb((i * GOLDEN_TURN) % 1, 0.85, 0.95 - 0.3 * (i % 2))
            ]
    colours[255] = NO_CLASS
    return colours
