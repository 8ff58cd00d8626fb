"""Whole models with little memory: sections of the network, a few images, tiles of rows and time steps in turn.

The maps between sections live in one planned buffer, spikes as bits. Inside a section only a tile of rows exists, with
the rows around it that its convolutions read, and on CPUs only one time step of it: neurons carry their membranes on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from lrfdyn.attention import Attention
from lrfdyn.attention.row_stream import BUFFERS, RowStream
from lrfdyn.convert.fold import fold_batch_norm
from lrfdyn.deploy.call_lock import CallLock
from lrfdyn.deploy.lowmem.feature_maps import FeatureMap, FeatureMapShape, buffer_bytes, place_maps
from lrfdyn.deploy.lowmem.stepped_neurons import reset_membranes, step_neurons
from lrfdyn.deploy.streaming_attention import StreamingAttention
from lrfdyn.errors import require, require_integer, unknown_name
from lrfdyn.models import SpikingModel
from lrfdyn.nn.layers import is_repeated
from lrfdyn.nn.sections import Section

MIXING = ("parallel", "streaming")
STEPS = ("sequence", "together")
# By kind of device: a GPU needs enough work per launch.
IMAGES = {"cuda": 16, "cpu": 1}
# A tile may take this part of what its section takes whole (of the largest section), but attention stays in one.
TILE_SHARE = 1 / 8
WARM_UP = 2


@dataclass(frozen=True)
class PlannedSection:
    """A section for one shape of input: `rows` output rows of `steps` time steps at a time."""

    section: Section
    out: FeatureMapShape
    rows: int
    steps: int

    @property
    def tiles(self) -> int:
        return -(-self.out.height // self.rows)


@dataclass(frozen=True)
class Plan:
    """What `images` images at a time cost: the bytes of the buffer of all maps, and how the sections are cut."""

    images: int
    sections: tuple[PlannedSection, ...]

    @property
    def map_bytes(self) -> int:
        return buffer_bytes([planned.out for planned in self.sections])


@dataclass(frozen=True)
class CapturedGraph:
    """A CUDA graph and all that it reads and writes outside its own memory, but for weights and maps."""

    graph: torch.cuda.CUDAGraph
    images: Tensor
    logits: Tensor
    streams: list[RowStream | None]  # a layer has a new one for the next shape of input


class LowMemoryModel(nn.Module):
    """A folded copy of a model that computes the same logits; made by `compile_for_inference`.

    It may be moved, copied and saved like any module, and stays in evaluation mode. Calls from several threads wait for
    each other, since they share the buffer.
    """

    def __init__(
        self, model: SpikingModel, images: int | None, tile_mib: float | None, steps: str, graph: bool
    ) -> None:
        super().__init__()
        self.model, self.images, self.tile_mib, self.graph = model, images, tile_mib, graph
        self.in_sequence = steps == "sequence"
        if self.in_sequence:
            step_neurons(model)
        self._lock = CallLock()
        self._bind_modules()

    def _bind_modules(self) -> None:
        """Makes what belongs to this very copy of the modules: functions of them, and memory."""
        self.chain = list(self.model.sections())
        # What an observer of memory puts around every section.
        self.span: Callable[[str], AbstractContextManager[object]] = nullcontext
        self._release_memory()

    def _release_memory(self) -> None:
        """Lets go of the buffer of the maps and of all graphs."""
        self._buffer: Tensor | None = None
        self._captured: dict[tuple[Any, ...], CapturedGraph] = {}
        # Of the graphs, which run one after the other; a pool without graphs cannot be taken up again.
        self._pool: Any = None

    def __getstate__(self) -> dict[str, Any]:
        bound = ("chain", "span", "_buffer", "_pool", "_captured")
        return {key: value for key, value in super().__getstate__().items() if key not in bound}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._bind_modules()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LowMemoryModel:
        self._release_memory()  # graphs read the weights where they were
        return super()._apply(fn, recurse)

    def train(self, mode: bool = True) -> LowMemoryModel:
        return super().train(False)

    def plan(self, images: Tensor) -> Plan:
        """How images `[B, C, H, W]` or `[T, B, C, H, W]` like these would be computed."""
        self._require_images(images)
        batch = images.shape[-4]
        at_once = min(batch, self.images or batch)
        time = images.shape[0] if images.dim() == 5 else self.model.time_steps
        _, height, width = images.shape[-3:]
        grids = [(height, width)]
        for section in self.chain:
            grids.append((-(-grids[-1][0] // section.stride), -(-grids[-1][1] // section.stride)))
        tile = self._tile_bytes(time, grids, images.dtype.itemsize)
        planned = []
        for section, grid, out_grid in zip(self.chain, grids, grids[1:], strict=False):
            rows, steps = self._rows_and_steps(section, time, grid, tile // images.dtype.itemsize)
            out = FeatureMapShape(section.holds, time, at_once, section.channels, *out_grid, images.dtype)
            tiles = -(-out.height // rows)
            planned.append(PlannedSection(section, out, -(-out.height // tiles), steps))
        return Plan(at_once, tuple(planned))

    def _tile_bytes(self, time: int, grids: Sequence[tuple[int, int]], itemsize: int) -> int:
        if self.tile_mib is not None:
            return int(self.tile_mib * 2**20)
        whole = {
            section: section.numbers_per_pixel(time) * height * width * itemsize
            for section, (height, width) in zip(self.chain, grids, strict=False)
        }
        untiled = max((size for section, size in whole.items() if not section.tiled), default=0)
        return max(int(TILE_SHARE * max(whole.values())), untiled)

    def _rows_and_steps(self, section: Section, time: int, grid: tuple[int, int], numbers: int) -> tuple[int, int]:
        """How many output rows and time steps at a time stay within so many `numbers`."""
        height, width = grid

        def fitting(steps: int) -> int:
            return numbers // (section.numbers_per_pixel(steps) * width)

        in_turn = self.in_sequence and not any(isinstance(m, StreamingAttention) for m in section.modules())
        # Fewer steps at a time cost nothing but calls; tiles of rows cost their halo. The other way round without one.
        choices = [n for n in range(time, 0, -1) if time % n == 0] if in_turn else [time]
        fit = next((n for n in choices if fitting(n) >= height), choices[-1])
        if not section.tiled:
            return height, fit
        if not section.halo:
            fit = time
        rows = min(fitting(fit), height)
        return max(rows - 2 * section.halo if rows < height else rows, section.stride) // section.stride, fit

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """Logits `[B, classes]` of images `[B, C, H, W]` or frames `[T, B, C, H, W]`."""
        with self._lock:  # the clones are ordinary tensors, which may be changed in place and trained on
            logits = [self._logits(chunk).clone() for chunk in self._chunks(images)]
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    @torch.no_grad()
    def forward_features(self, images: Tensor) -> Tensor:
        """The last feature map, `[T, B, C, H, W]`."""
        with self._lock:
            maps = []
            for chunk in self._chunks(images):
                with torch.inference_mode():
                    features = self._feature_map(chunk).load()
                maps.append(features.clone())
            return torch.cat(maps, 1)

    def _require_images(self, images: Tensor) -> None:
        require(isinstance(images, Tensor), f"images: expected a tensor, got {type(images).__name__}")
        require(images.dim() in (4, 5), f"images: expected [B, C, H, W] or [T, B, C, H, W], got {list(images.shape)}")
        require(0 not in images.shape, f"images: expected no empty dimension, got {list(images.shape)}")

    def _chunks(self, images: Tensor) -> tuple[Tensor, ...]:
        self._require_images(images)
        return images.split(self.images or images.shape[-4], images.dim() - 4)

    @torch.inference_mode()
    def _logits(self, images: Tensor) -> Tensor:
        if not (self.graph and images.is_cuda):
            return self._run(images)
        kind = images.device.type
        key = (images.shape, images.dtype, torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind))
        if key not in self._captured:
            self._captured[key] = self._capture(images)
        captured = self._captured[key]
        captured.images.copy_(images, non_blocking=True)
        captured.graph.replay()
        return captured.logits

    def _capture(self, images: Tensor) -> CapturedGraph:
        given = images.clone()
        stream, current = _capture_stream(images.device), torch.cuda.current_stream(images.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):  # kernels are compiled and chosen outside the graph
                self._run(given)
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream):
            logits = self._run(given)
        return CapturedGraph(graph, given, logits, [layer.stream for layer in self._streaming()])

    def _streaming(self) -> list[StreamingAttention]:
        return [module for module in self.modules() if isinstance(module, StreamingAttention)]

    def _run(self, images: Tensor) -> Tensor:
        """Logits of images that go through the network together."""
        features = self._feature_map(images).load()
        reset_membranes(self.modules())  # the head may have a neuron
        logits = self.model.forward_head(features)
        reset_membranes(self.modules())
        return logits

    def _feature_map(self, images: Tensor) -> FeatureMap:
        x = self.model.to_time_major(images)
        plan = self.plan(images)
        if self._buffer is None or self._buffer.numel() < plan.map_bytes or self._buffer.device != images.device:
            self._release_memory()  # graphs hold on to the buffer that they were captured with
            self._buffer = torch.empty(plan.map_bytes, dtype=torch.uint8, device=images.device)
        maps = place_maps([planned.out for planned in plan.sections], self._buffer)
        source: Tensor | FeatureMap = x
        for planned, out in zip(plan.sections, maps, strict=True):
            with self.span(planned.section.name):
                for first in range(0, planned.out.height, planned.rows):
                    self._run_tile(planned, source, out, first, min(first + planned.rows, planned.out.height))
            source = out
        return maps[-1]

    def _run_tile(
        self, planned: PlannedSection, source: Tensor | FeatureMap, out: FeatureMap, first: int, last: int
    ) -> None:
        """Computes the output rows from `first` to `last` of a section. Rows at the edges of the tile lack neighbours;
        they are computed too, and left out."""
        section = planned.section
        stride, halo = section.stride, section.halo
        low, high = max(stride * first - halo, 0) // stride * stride, stride * last + halo
        inside = slice(first - low // stride, last - low // stride)

        def load(time: slice) -> Tensor:
            if isinstance(source, FeatureMap):
                return source.load(low, min(high, source.shape.height), time)
            return source[time, ..., low:high, :]

        reset_membranes(section.modules())
        # In sequence the halves need less memory; together, the whole is one operation on a GPU.
        front, back = (section.halves if self.in_sequence else None) or (_unchanged, section.run)
        repeated = isinstance(source, Tensor) and is_repeated(source) and planned.steps < out.shape.time
        static = front(load(slice(0, 1))) if repeated else None
        for t in range(0, out.shape.time, planned.steps):
            step = slice(t, t + planned.steps)
            x = front(load(step)) if static is None else static.expand(planned.steps, -1, -1, -1, -1)
            out.store(back(x)[..., inside, :], first, step)
        reset_membranes(section.modules())

    def extra_repr(self) -> str:
        return f"images={self.images}, tile_mib={self.tile_mib}, steps={STEPS[not self.in_sequence]!r}"


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all captures: libraries keep a workspace for every stream that they have seen."""
    return torch.cuda.Stream(device)


def _unchanged(x: Tensor) -> Tensor:
    return x


def compile_for_inference(
    model: SpikingModel,
    *,
    images_at_once: int | None = None,
    tile_mib: float | None = None,
    steps: str | None = None,
    mixing: str = MIXING[0],
    buffers: str = BUFFERS[0],
    graph: bool = True,
) -> LowMemoryModel:
    """A copy of a classifier, norms folded, that computes the same logits in a fraction of the memory.

    - `model`: A model of this package in evaluation mode.
    - `images_at_once`: Images that pass the network together (default: 1 on a CPU, 16 on a GPU).
    - `tile_mib`: MiB an image for the tiles of rows inside a section (default: an eighth of what the largest
      section takes whole).
    - `steps`: The time steps in "sequence" (default on a CPU) or "together" (on a GPU, where kernels hold them in
      registers).
    - `mixing`: "parallel", or "streaming" for attention row by row where its kind can (LRF-Dyn: in k d numbers).
    - `buffers`: What streaming holds of rows, see `RowStream`.
    - `graph`: Whether on a GPU every shape of input becomes a CUDA graph.

    Returns a module that takes images `[B, C, H, W]` or frames `[T, B, C, H, W]` and returns logits `[B, classes]`.

    Example:

        compiled = compile_for_inference(model.eval(), mixing="streaming")
        logits = compiled(images)
    """
    require(isinstance(model, SpikingModel), f"model: expected a model of this package, got {type(model).__name__}")
    require(model.pipeline_tag == "image-classification", "model: expected a classifier, got a segmentation model")
    device = next(model.parameters()).device.type
    kind = "cuda" if device == "cuda" else "cpu"
    images = IMAGES[kind] if images_at_once is None else images_at_once
    require_integer("images_at_once", images, 1)
    require(
        tile_mib is None or (isinstance(tile_mib, (int, float)) and 0 < tile_mib < math.inf),
        f"tile_mib: expected a positive number, got {tile_mib!r}",
    )
    steps = STEPS[kind == "cuda"] if steps is None else steps
    for name, value, known in (("steps", steps, STEPS), ("mixing", mixing, MIXING), ("buffers", buffers, BUFFERS)):
        if value not in known:
            raise unknown_name(name, value, known)
    folded = fold_batch_norm(model)
    folded = folded.to(memory_format=torch.channels_last).requires_grad_(False)  # type: ignore[call-overload]
    if mixing == "streaming":
        layers = [(parent, name, child) for parent in folded.modules() for name, child in parent.named_children()]
        streamed = [entry for entry in layers if isinstance(entry[2], Attention) and entry[2].streams]
        require(bool(streamed), f"mixing: attention {folded.config.get('attention')!r} has no streaming form")
        for parent, name, child in streamed:
            setattr(parent, name, StreamingAttention(child, buffers))
    batch_is_time = folded.config.get("legacy_neuron_axis", False)
    require(
        not batch_is_time or steps == "together",
        "steps: a model with legacy_neuron_axis=True needs steps='together' (its neurons run over the batch)",
    )
    return LowMemoryModel(folded, None if batch_is_time else images, tile_mib, steps, graph).eval()
