"""Whole models with little memory: sections of the network, a few images, tiles of rows and time steps in turn.

The maps between sections live in one planned buffer, spikes as bits. Inside a section only a tile of rows exists, with
the rows around it that its convolutions read, and on CPUs only one time step of it: neurons carry their membranes on.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from lrfdyn.attention import Attention
from lrfdyn.attention.row_stream import BUFFERS
from lrfdyn.checks import checked
from lrfdyn.convert.fold import fold_batch_norm
from lrfdyn.deploy.feature_maps import FeatureMap, buffer_bytes, place_maps
from lrfdyn.deploy.streaming_attention import StreamingAttention, call_lock
from lrfdyn.deploy.time_stream import replace_neurons
from lrfdyn.errors import require, require_integer, unknown_name
from lrfdyn.models import SpikingModel
from lrfdyn.nn.layers import is_repeated
from lrfdyn.nn.neurons import Neuron, SpikingNeuron
from lrfdyn.nn.sections import Section
from lrfdyn.ops.lif import Dynamics

MIXING = ("parallel", "streaming")
STEPS = ("sequence", "together")
# A tile may take this part of what its section takes whole (of the largest section), but attention stays in one.
TILE_SHARE = 1 / 8


class SteppedNeuron(Neuron):
    """A `SpikingNeuron` on currents `[T, ...]` that goes on from the membrane H `[...]` of the call before, where
    `membranes` has one."""

    def __init__(self, dynamics: Dynamics, membranes: dict[nn.Module, Tensor]) -> None:
        super().__init__()
        self.dynamics, self.membranes = dynamics, membranes

    def forward(self, x: Tensor) -> Tensor:
        d, h, spikes = self.dynamics, self.membranes.get(self), torch.empty_like(x)
        for current, fired in zip(x, spikes, strict=True):
            # In place of H: currents, membrane and spikes are all that exists.
            h = torch.mul(current, d.gain) if h is None else h.mul_(d.leak).add_(current, alpha=d.gain)
            (torch.gt if d.strict else torch.ge)(h, d.threshold, out=fired)
            h.addcmul_(h, fired, value=-1)  # U (1 - S)
            if d.decay != 1:
                h.mul_(d.decay)
            if d.v_reset:
                h.add_(fired, alpha=d.v_reset)
            self.membranes[self] = h
        return spikes


def step_neurons(model: nn.Module) -> dict[nn.Module, Tensor]:
    """Puts `SteppedNeuron` in the place of every neuron with a membrane, and returns what they hold: emptied, they
    start from rest. Streaming layers see all steps and stay."""
    membranes: dict[nn.Module, Tensor] = {}
    modules = model.named_modules(remove_duplicate=False)
    streaming = tuple(f"{path}." for path, module in modules if isinstance(module, StreamingAttention))

    def stepped(_path: str, neuron: SpikingNeuron) -> Neuron | None:
        known = type(neuron).forward is SpikingNeuron.forward
        return SteppedNeuron(neuron.dynamics, membranes) if known else None

    replace_neurons(model, stepped, but=streaming)
    return membranes


@dataclass(frozen=True)
class PlannedSection:
    """A section for one shape of input: `tiles` of `rows` output rows, and `steps` time steps of them at a time."""

    section: Section
    out: FeatureMap
    tiles: int
    rows: int
    steps: int


@dataclass(frozen=True)
class Plan:
    """How the sections are cut, and the bytes of the buffer of all maps between them."""

    sections: tuple[PlannedSection, ...]
    map_bytes: int


class LowMemoryModel(nn.Module):
    """A folded copy of a model that computes the same logits; made by `compile_for_inference`.

    It may be moved, copied and saved like any module, and stays in evaluation mode. Calls from several threads wait for
    each other, since they share the buffer.
    """

    span: Callable[[str], AbstractContextManager[object]] = nullcontext  # what observers put around every section

    def __init__(
        self, model: SpikingModel, images: int | None, tile_mib: float | None, steps: str, graph: bool
    ) -> None:
        super().__init__()
        self.model, self.images, self.tile_mib, self.graph = model, images, tile_mib, graph
        self.in_sequence = steps == "sequence"
        self._membranes = step_neurons(model) if self.in_sequence else {}
        self._release_memory()

    def _release_memory(self) -> None:
        """Lets go of the buffer of the maps and of all graphs."""
        self._buffer: Tensor | None = None
        self._captured: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        # Of the graphs, which run one after the other; a pool without graphs cannot be taken up again.
        self._pool: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_buffer": None, "_captured": {}, "_pool": None}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LowMemoryModel:
        self._release_memory()  # graphs read the weights where they were
        return super()._apply(fn, recurse)

    def train(self, mode: bool = True) -> LowMemoryModel:
        return super().train(False)

    def plan(self, images: Tensor) -> Plan:
        """How images `[B, C, H, W]` or `[T, B, C, H, W]` like these would be computed."""
        at_once = self._chunks(images)[0].shape[-4]
        time = images.shape[0] if images.dim() == 5 else self.model.time_steps
        sections = list(self.model.sections())
        grids = [images.shape[-2:]]
        for section in sections:
            grids.append(torch.Size(-(-side // section.stride) for side in grids[-1]))
        if self.tile_mib is None:
            whole = [s.numbers_per_pixel(time) * grid.numel() for s, grid in zip(sections, grids, strict=False)]
            untiled = [size for section, size in zip(sections, whole, strict=True) if not section.tiled]
            numbers = max(int(TILE_SHARE * max(whole)), *untiled, 0)
        else:
            numbers = int(self.tile_mib * 2**20) // images.dtype.itemsize
        planned, most = [], 0  # the largest sum of spikes so far
        for section, grid, out_grid in zip(sections, grids, grids[1:], strict=False):
            rows, steps = self._rows_and_steps(section, time, grid, numbers)
            most = 1 if section.holds == "bits" else most + section.adds
            out = FeatureMap(section.holds, (time, at_once, section.channels, *out_grid), images.dtype, most)
            tiles = -(-out.height // rows)
            planned.append(PlannedSection(section, out, tiles, -(-out.height // tiles), steps))
        return Plan(tuple(planned), buffer_bytes([each.out for each in planned]))

    def _rows_and_steps(self, section: Section, time: int, grid: torch.Size, numbers: int) -> tuple[int, int]:
        """How many output rows and time steps at a time stay within so many `numbers`."""
        height, width = grid
        in_turn = self.in_sequence and not any(isinstance(m, StreamingAttention) for m in section.modules())
        # Fewer steps at a time cost nothing but calls; tiles of rows cost their halo. The other way round without one.
        choices = [n for n in range(time, 0, -1) if time % n == 0] if in_turn else [time]
        fitting = {n: numbers // (section.numbers_per_pixel(n) * width) for n in choices}
        steps = next((n for n in choices if fitting[n] >= height), choices[-1])
        if not section.tiled:
            return height, steps
        if not section.halo:
            steps = time
        rows = min(fitting[steps], height)
        return max(rows - 2 * section.halo if rows < height else rows, section.stride) // section.stride, steps

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """Logits `[B, classes]` of images `[B, C, H, W]` or frames `[T, B, C, H, W]`."""
        with call_lock(self):  # the clones are ordinary tensors, which may be changed in place and trained on
            logits = [self._logits(chunk).clone() for chunk in self._chunks(images)]
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    @torch.no_grad()
    def forward_features(self, images: Tensor) -> Tensor:
        """The last feature map, `[T, B, C, H, W]`."""
        with call_lock(self), torch.inference_mode():
            maps = [self._feature_map(chunk).load().clone() for chunk in self._chunks(images)]
        return torch.cat(maps, 1)

    def _chunks(self, images: Tensor) -> tuple[Tensor, ...]:
        require(isinstance(images, Tensor), f"images: expected a tensor, got {type(images).__name__}")
        require(images.dim() in (4, 5), f"images: expected [B, C, H, W] or [T, B, C, H, W], got {list(images.shape)}")
        require(0 not in images.shape, f"images: expected no empty dimension, got {list(images.shape)}")
        return images.split(self.images or images.shape[-4], images.dim() - 4)

    @torch.inference_mode()
    def _logits(self, images: Tensor) -> Tensor:
        if not (self.graph and images.is_cuda):
            return self._run(images)
        kind = images.device.type
        key = (images.shape, images.dtype, torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind))
        if key not in self._captured:
            self._captured[key] = self._capture(images)
        graph, given, logits, _ = self._captured[key]
        given.copy_(images, non_blocking=True)
        graph.replay()
        return logits

    def _capture(self, images: Tensor) -> tuple[Any, ...]:
        """A CUDA graph, its images and logits, and the states of streaming layers, which have new ones for the next
        shape of input: all that it reads and writes outside its own memory, but for weights and maps."""
        given = images.clone()
        stream, current = _capture_stream(images.device), torch.cuda.current_stream(images.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(2):  # kernels are compiled and chosen outside the graph
                self._run(given)
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream):
            logits = self._run(given)
        return graph, given, logits, [m.stream for m in self.modules() if isinstance(m, StreamingAttention)]

    def _run(self, images: Tensor) -> Tensor:
        """Logits of images that go through the network together."""
        logits = self.model.forward_head(self._feature_map(images).load())
        self._membranes.clear()  # the head may have a neuron
        return logits

    def _feature_map(self, images: Tensor) -> FeatureMap:
        plan = self.plan(images)
        if self._buffer is None or self._buffer.numel() < plan.map_bytes or self._buffer.device != images.device:
            self._release_memory()  # graphs hold on to the buffer that they were captured with
            self._buffer = torch.empty(plan.map_bytes, dtype=torch.uint8, device=images.device)
        place_maps([planned.out for planned in plan.sections], self._buffer)
        source: Any = self.model.to_time_major(images)
        for planned in plan.sections:
            with self.span(planned.section.name):
                for first in range(0, planned.out.height, planned.rows):
                    self._run_tile(planned, source, first)
            source = planned.out
        return source

    def _run_tile(self, planned: PlannedSection, source: Tensor | FeatureMap, first: int) -> None:
        """Computes the output rows from `first` on of a section. Rows at the edges of the tile lack neighbours; they
        are computed too, and left out."""
        section, out, last = planned.section, planned.out, min(first + planned.rows, planned.out.height)
        stride, halo = section.stride, section.halo
        low, high = max(stride * first - halo, 0) // stride * stride, stride * last + halo
        inside = slice(first - low // stride, last - low // stride)

        def load(time: slice) -> Tensor:
            return source[time, ..., low:high, :] if isinstance(source, Tensor) else source.load(low, high, time)

        self._membranes.clear()
        # In sequence the halves need less memory; together, the whole is one operation on a GPU.
        front, back = (section.halves if self.in_sequence else None) or (nn.Identity(), section.run)
        repeated = isinstance(source, Tensor) and is_repeated(source) and planned.steps < out.time
        static = front(load(slice(0, 1))) if repeated else None
        for t in range(0, out.time, planned.steps):
            step = slice(t, t + planned.steps)
            x = front(load(step)) if static is None else static.expand(planned.steps, -1, -1, -1, -1)
            out.store(back(x)[..., inside, :], first, step)
        self._membranes.clear()


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all captures: libraries keep a workspace for every stream that they have seen."""
    return torch.cuda.Stream(device)


@checked
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
    require(model.pipeline_tag == "image-classification", "model: expected a classifier, got a segmentation model")
    cuda = next(model.parameters()).is_cuda
    images = (16 if cuda else 1) if images_at_once is None else images_at_once  # a GPU needs enough work per launch
    require_integer("images_at_once", images, 1)
    positive = tile_mib is None or tile_mib > 0
    require(positive, f"tile_mib: expected a positive number, got {tile_mib!r}")
    steps = STEPS[cuda] if steps is None else steps
    for name, value, known in (("steps", steps, STEPS), ("mixing", mixing, MIXING), ("buffers", buffers, BUFFERS)):
        if value not in known:
            raise unknown_name(name, value, known)
    folded = fold_batch_norm(model)
    folded = folded.to(memory_format=torch.channels_last).requires_grad_(False)  # type: ignore[call-overload]
    if mixing == "streaming":
        modules = folded.named_modules(remove_duplicate=False)
        layers = {path: layer for path, layer in modules if isinstance(layer, Attention) and layer.streams}
        require(bool(layers), f"mixing: attention {folded.config.get('attention')!r} has no streaming form")
        for path, layer in layers.items():
            folded.set_submodule(path, StreamingAttention(layer, buffers))
    batch_is_time = folded.config.get("legacy_neuron_axis", False)
    fits = not batch_is_time or steps == "together"
    require(fits, "steps: a model with legacy_neuron_axis=True needs steps='together' (its neurons run over the batch)")
    return LowMemoryModel(folded, None if batch_is_time else images, tile_mib, steps, graph).eval()
