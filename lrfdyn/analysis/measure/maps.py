"""Where single queries look: their attention weights as maps over the grid, and the pictures that these are laid over.

Weights are those of `locality`: absolute values, added up over the time steps, normalised to sum 1 for every query.
"""

from __future__ import annotations

import struct
import zlib
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lrfdyn.analysis.measure.locality import BLOCK, DIGITS
from lrfdyn.analysis.measure.observe import RANDOM, Images, ImageTensors, observe, watch_attentions
from lrfdyn.attention import Attention
from lrfdyn.attention.base import Spikes
from lrfdyn.checks import checked
from lrfdyn.data.preprocess import Preprocessing, reason, require_pillow
from lrfdyn.errors import LrfdynError, require

Place = tuple[int, int]  # row and column of a token
DARKER, BRIGHTER = (88, 172, 255), (255, 156, 66)  # colours of events, told apart with any colour vision
PNG = b"\x89PNG\r\n\x1a\n"  # what every such file begins with


class AttentionMaps:
    """The weights of some queries in every attention layer."""

    def __init__(self, queries: Sequence[Place] = ()) -> None:
        self.queries = [*queries]
        self.grid: Place | None = None
        self.layers: dict[str, list[Tensor]] = {}  # of every batch, `[B, queries, N]`, not yet normalised
        self.notes: dict[str, None] = {}  # what could not be measured, each line once

    def watch(self, model: nn.Module) -> list[RemovableHandle]:
        return watch_attentions(model, self._add)

    def _add(self, name: str, module: Attention, x: Tensor, spikes: Spikes) -> None:
        grid = (x.shape[3], x.shape[4])
        if self.grid is None:
            self.grid, (height, width) = grid, grid
            self.queries = self.queries or list(dict.fromkeys([(height // 2, width // 2), (height // 4, width // 4)]))
            for place in self.queries:
                inside = len(place) == 2 and 0 <= place[0] < height and 0 <= place[1] < width
                require(inside, f"queries: expected places on the grid of {height} x {width} tokens, got {place}")
        require(grid == self.grid, f"maps: expected attention layers on one grid, got {self.grid} and {grid}")
        blocks = module.mixing_weights(spikes, grid, BLOCK)
        if blocks is None:
            self.notes[module.missing("how it mixes tokens (mixing_weights): it has no attention maps")] = None
            return
        wanted = [row * grid[1] + column for row, column in self.queries]
        rows: dict[int, Tensor] = {}
        for queries, weights in blocks:
            rows |= {n: weights[:, n - queries.start] for n in wanted if n in queries}
        found = torch.stack([rows[n] for n in wanted], 1).double().cpu()
        self.layers.setdefault(name, []).append(found.expand(x.shape[1], -1, -1))

    def record(self) -> dict[str, Any]:
        """The maps of every image and query: by layer, and averaged over the layers where the query has any weight."""
        if not self.layers:
            return {}
        weights = torch.stack([torch.cat(batches) for batches in self.layers.values()], 2)  # images, queries, layers, N
        total = weights.sum(-1, keepdim=True)
        maps = torch.where(total > 0, weights / total.clamp(min=torch.finfo(total.dtype).tiny), torch.nan)
        maps = maps.unflatten(-1, self.grid or (1, -1))
        return {
            "grid": [*(self.grid or ())],
            "layers": [*self.layers],
            "queries": [[*place] for place in self.queries],
            "maps": [
                [{"average": _values(m.nanmean(0)), "by_layer": [*map(_values, m)]} for m in image] for image in maps
            ],
        }


def _values(field: Tensor) -> list[list[float]] | None:
    """A map `[H, W]` as rows of numbers; None for that of a query without any weight."""
    return None if field.isnan().any() else [[round(value, DIGITS) for value in row] for row in field.tolist()]


@checked
def attention_maps(model: nn.Module, images: ImageTensors, queries: Sequence[Place] = ()) -> dict[str, Any]:
    """The attention weights of single queries of `model` on `images` `[n, C, H, W]` or batches of them.

    `queries` are rows and columns of tokens on the grid, counted from 0; without any, the token in the middle and the
    one at a quarter of both sides. Returns the `grid`, the names of the `layers`, the `queries` and `maps`: for every
    image and query a dictionary with the map of every layer (`by_layer`) and their mean (`average`), rows of weights
    that sum to 1, or None where the query has no weight at all.

        maps = attention_maps(model, images, [(2, 2), (4, 4)])
        first = maps["maps"][0][1]["by_layer"][3]  # of the first image, the second query, the fourth layer
    """
    measured = AttentionMaps(queries)
    (record,) = observe(model, images, measured)
    none = f"model: expected one with attention layers, got {type(model).__name__}"
    require(bool(record), next(iter(measured.notes), none))
    return record


@dataclass(frozen=True)
class Pictures:
    """Images that maps are laid over: as models take them, `[n, C, H, W]` or frames `[T, n, C, H, W]`, and as a page
    shows them."""

    images: Tensor
    shown: list[dict[str, str]]  # `name` and `source`, the address of a PNG that holds the picture itself


def choose_pictures(images: Images, wanted: Sequence[str]) -> Pictures:
    """The pictures that `wanted` names: one number, so many of the analysed images at equal steps, or image files,
    which are scaled and cropped as the test images are. A recording is shown as the sum of its frames, in the colours
    of events."""
    how = images.preprocessing
    require(images.name != RANDOM, f"maps: need images of a data set, got {RANDOM} noise")
    if len(wanted) == 1 and wanted[0].isdecimal():
        count, every = int(wanted[0]), torch.cat(images.batches, -4)
        most = every.shape[-4]
        files = "" if how is None else ", or files"
        require(1 <= count <= most, f"maps: expected 1 to {most} of the {images.noun}s{files}, got {count}")
        chosen = torch.linspace(0, most - 1, count).round().long()
        names = [f"{images.noun} {n + 1}" for n in chosen.tolist()]
        picked = every.index_select(-4, chosen.to(every.device))
    else:
        if how is None:
            raise LrfdynError(f"maps: expected a number of the recordings of {images.name}, got {wanted[0]}")
        require_pillow("maps: reading images")
        picked = torch.stack([_read(how, Path(path)) for path in wanted]).to(images.device)
        names = [Path(path).stem for path in wanted]
    shown = zip(names, picked.unbind(-4), strict=True)
    return Pictures(picked, [{"name": n, "source": _address(_levels(how, x.cpu().float()))} for n, x in shown])


def _read(how: Preprocessing, path: Path) -> Tensor:
    try:
        return torch.from_numpy(how.load(path))
    except Exception as error:  # damaged files make decoders fail in any way
        raise LrfdynError(f"maps: cannot read {path} ({reason(error)})") from None


def _levels(how: Preprocessing | None, image: Tensor) -> Tensor:
    """The levels `[C, H, W]` of a picture, uint8; of frames `[T, 2, H, W]` of events the sum of each channel in its
    colour, the more the lighter."""
    if how is None:
        total = image.sum(0)
        colours = torch.tensor([DARKER, BRIGHTER], dtype=total.dtype)
        mixed = torch.einsum("chw,cl->lhw", total / total.max().clamp(min=1), colours)
        return mixed.round().clamp(0, 255).byte()
    mean, std = (torch.tensor(values).reshape(-1, 1, 1) for values in (how.mean, how.std))
    return ((image * std + mean) * 255).round().clamp(0, 255).byte()


def _address(levels: Tensor) -> str:
    """A picture `[C, H, W]` as the data address of a PNG: grey of one or two channels, else the first three."""
    levels = levels[: 3 if len(levels) >= 3 else 1].permute(1, 2, 0)
    height, width, channels = levels.shape
    rows = b"".join(b"\0" + bytes(row.flatten().tolist()) for row in levels)  # every row begins with its filter

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2 if channels == 3 else 0, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b""))
    return f"data:image/png;base64,{b64encode(PNG + b''.join(chunk(*part) for part in parts)).decode()}"


def parse_queries(texts: Sequence[str]) -> list[Place]:
    """Places of queries from texts such as "4:2", row and column."""
    places = []
    for text in texts:
        parts = text.split(":")
        known = len(parts) == 2 and all(part.isdecimal() for part in parts)
        require(known, f"queries: expected ROW:COLUMN, two integers, got {text!r}")
        places.append((int(parts[0]), int(parts[1])))
    return places
