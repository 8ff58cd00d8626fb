"""Names and colours of classes, coloured masks, overlays and side-by-side figures, drawn with Pillow."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lrfdyn.data.preprocess import scaled_size
from lrfdyn.errors import needs
from lrfdyn.segmentation.pairs import CLASSES, IGNORED

if TYPE_CHECKING:
    from PIL.Image import Image

GOLDEN_TURN = 0.618033988749895  # neighbouring numbers get hues far apart
BLEND = 0.55  # of the colour in an overlay
MARGIN, GAP, INK, FAINT, PAPER = 8, 6, (25, 25, 25), (110, 110, 110), (255, 255, 255)
Names = Sequence[str] | None
LEGEND_HEIGHT = 160  # at least, beside an image: eight classes and the number of the others


def pillow() -> Any:
    """Import Pillow with the modules that drawing needs; an error says how to install it."""
    with needs("pictures: drawing needs Pillow; pip install 'lrfdyn[segmentation]'"):
        import PIL.Image
        import PIL.ImageDraw
        import PIL.ImageFont
    return PIL


@cache
def _table(classes: int) -> list[tuple[list[int], str]]:
    """Colour and name of every class: ADE20K's own, or numbers in well-separated colours for other data."""
    if classes == CLASSES:
        lines = (Path(__file__).parent / "ade20k.tsv").read_text(encoding="utf-8").splitlines()[1:]
        return [(list(map(int, colour)), name) for *colour, name in (line.split("\t") for line in lines)]
    hues = [colorsys.hsv_to_rgb((i * GOLDEN_TURN) % 1, 0.85, 0.95 - 0.3 * (i % 2)) for i in range(classes)]
    return [([round(255 * level) for level in hue], f"class {i + 1}") for i, hue in enumerate(hues)]


def class_names(classes: int = CLASSES) -> list[str]:
    """Return one word or two for each class: the first of ADE20K's synonyms, or a number for other data."""
    return [name.partition(",")[0] for _, name in _table(classes)]


def palette(classes: int = CLASSES) -> np.ndarray:
    """Return the colours of the classes, levels `[256, 3]`; class 255, which is none, is black."""
    colours = np.zeros((256, 3), np.uint8)
    colours[:classes] = [colour for colour, _ in _table(classes)]
    return colours


def class_shares(mask: np.ndarray, classes: int, names: Names = None) -> dict[str, float]:
    """Return the share of every class in the pixels of `mask` that have one, the largest first. `names` of the classes
    are those of a data set that has its own."""
    counts, names = np.bincount(mask[mask != IGNORED].ravel(), minlength=classes), names or class_names(classes)
    total = max(1, counts.sum())
    return {names[i]: float(counts[i] / total) for i in np.argsort(-counts, kind="stable") if counts[i]}


def mask_image(mask: np.ndarray, classes: int) -> Image:
    """Return `mask` `[H, W]` as a palette picture of its classes (255 for none) in the colours of the data set."""
    image = pillow().Image.fromarray(mask.astype(np.uint8), "L")
    image.putpalette(palette(classes).tobytes())
    return image


def blend(image: Image, mask: np.ndarray, classes: int) -> Image:
    """Lay the colours of the classes over the image; pixels without a class stay as they are."""
    pixels = np.asarray(image.convert("RGB"), np.float32)
    weight = np.where(mask == IGNORED, 0.0, BLEND)[..., None]
    mixed = pixels * (1 - weight) + palette(classes)[mask].astype(np.float32) * weight
    return pillow().Image.fromarray(mixed.round().astype(np.uint8))


def overlay(image: Image, mask: np.ndarray, classes: int, names: Names = None) -> Image:
    """Draw `blend` with a legend at its side, which is higher than a small image."""
    side = legend(mask, classes, max(image.height, LEGEND_HEIGHT), names=names)
    sheet = pillow().Image.new("RGB", (image.width + side.width, side.height), PAPER)
    sheet.paste(blend(image, mask, classes), (0, 0))
    sheet.paste(side, (image.width, 0))
    return sheet


def legend(
    mask: np.ndarray, classes: int, height: int, limit: int = 14, percent: bool = True, names: Names = None
) -> Image:
    """Draw the largest classes of a mask or several, as many as fit, with their share of the pixels."""
    shares, size = class_shares(mask, classes, names), int(np.clip(height / 24, 11, 28))
    line = round(1.5 * size)
    room = max(1, min(limit, (height - MARGIN) // line))
    shown = list(shares.items())[: room - 1 if len(shares) > room > 1 else room]
    texts = [f"{name} {100 * share:.1f} %" if percent else name for name, share in shown]
    if len(shares) > len(shown):
        texts.append(f"and {len(shares) - len(shown)} more")
    font = pillow().ImageFont.load_default(size)
    width = round(max(map(font.getlength, texts), default=0)) + 2 * MARGIN + 2 * size
    image = pillow().Image.new("RGB", (width, height), PAPER)
    draw = pillow().ImageDraw.Draw(image)
    colours, names = palette(classes), names or class_names(classes)
    for i, text in enumerate(texts):
        y, listed = MARGIN // 2 + i * line, i < len(shown)
        if listed:
            colour = tuple(colours[names.index(shown[i][0])].tolist())
            draw.rectangle((MARGIN, y + 1, MARGIN + size, y + size + 1), fill=colour, outline=FAINT)
        draw.text((MARGIN + round(1.5 * size), y), text, fill=INK if listed else FAINT, font=font)
    return image


def grid(titles: Sequence[str], rows: Sequence[Sequence[Image]], captions: Sequence[str], side: int = 300) -> Image:
    """Draw a table of pictures of one row height, with a title over each column and a caption under each row."""

    def fit(image: Image) -> Image:
        factor = min(side / image.height, 1.6 * side / image.width)
        return image.resize(scaled_size(image.size, factor), pillow().Image.Resampling.LANCZOS)

    font, small = map(pillow().ImageFont.load_default, (20, 14))
    scaled = [[fit(image) for image in row] for row in rows]
    columns = [max(round(font.getlength(title)), *(row[i].width for row in scaled)) for i, title in enumerate(titles)]
    lefts = [MARGIN + sum(columns[:i]) + GAP * i for i in range(len(columns))]
    size = (lefts[-1] + columns[-1] + MARGIN, 34 + len(rows) * (side + 26) + MARGIN)
    sheet = pillow().Image.new("RGB", size, PAPER)
    draw = pillow().ImageDraw.Draw(sheet)
    for left, column, title in zip(lefts, columns, titles, strict=True):
        draw.text((left + column / 2, 6), title, fill=INK, font=font, anchor="ma")
    for y, (row, caption) in enumerate(zip(scaled, captions, strict=True)):
        top = 34 + y * (side + 26)
        for left, column, image in zip(lefts, columns, row, strict=True):
            sheet.paste(image, (left + (column - image.width) // 2, top + (side - image.height) // 2))
        draw.text((MARGIN, top + side + 4), caption, fill=FAINT, font=small)
    return sheet
