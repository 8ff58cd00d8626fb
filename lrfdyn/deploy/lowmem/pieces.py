"""A network as a chain of pieces: functions of a feature map that can be computed on tiles of its rows.

Between two pieces a map is held as bits (spikes), as 8-bit integers (sums of spikes) or as numbers (potentials).
Inside a piece everything is a tensor `[T, B, C, H, W]` as the layers know it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lrfdyn.attention import Attention
from lrfdyn.deploy.lowmem.stepped_neurons import SteppedNeuron
from lrfdyn.deploy.streaming_attention import StreamingAttention, row_halo
from lrfdyn.models.base import SpikingModel
from lrfdyn.models.metaformer import ConvBlock, MetaFormer
from lrfdyn.models.qkformer import PooledConv, QKFormer
from lrfdyn.models.sdt_v1 import SDTV1
from lrfdyn.models.spikformer import Spikformer
from lrfdyn.nn.layers import ConvBN, MembraneBlock, SpikingConv

Run = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Piece:
    """`run` makes output rows from input rows: row r from the rows `stride` r - `halo` to `stride` r + `halo` at most.
    Without `tiled` it needs all rows. `layers` are the modules that take part."""

    name: str
    run: Run
    layers: tuple[nn.Module, ...]
    channels: int
    holds: str  # "bits", "integers" or "numbers"
    halo: int = 0
    stride: int = 1
    tiled: bool = True
    # The part of `run` in front of its first neuron and the part from there on: a static image passes the first once.
    static: tuple[Run, Run] | None = None

    def modules(self) -> Iterator[nn.Module]:
        for layer in self.layers:
            yield from layer.modules()

    def numbers_per_pixel(self, steps: int) -> int:
        """About how many numbers exist at one time for every input pixel, with so many time steps together."""
        convs = [m for m in self.modules() if isinstance(m, nn.Conv2d)]
        if not self.tiled:  # attention: inputs, projections, what is mixed and its currents, in twice their channels
            return 8 * steps * max((m.out_channels for m in convs), default=self.channels)
        inputs, outputs = zip(*((m.in_channels, m.out_channels / m.stride[0] ** 2) for m in convs), strict=True)
        # Input, currents and spikes of a layer; the membrane has one time step.
        return max(int(steps * (a + 2 * b) + b) for a, b in zip(inputs, outputs, strict=True))


def pieces(model: SpikingModel) -> list[Piece]:
    """The chain of a host up to its last feature map; hosts without attention are one piece."""
    if isinstance(model, (Spikformer, SDTV1)):
        return [*_stem(model.stem), *_blocks("blocks", model.blocks)]
    if isinstance(model, QKFormer):
        return list(_qkformer(model))
    if isinstance(model, MetaFormer):
        return list(_metaformer(model))

    def features(x: Tensor) -> Tensor:
        return model.forward_stages(x, only_last=True)[-1]

    stride = model.feature_info[-1].stride
    return [Piece("features", features, (model,), model.num_features, "numbers", stride=stride, tiled=False)]


def _stem(stem: Any) -> Iterator[Piece]:
    """Spikformer's and SDT-V1's."""
    stages, rpe = list(stem.stages), stem.rpe
    for i, (stage, pool) in enumerate(zip(stages, stem.pooling, strict=True)):
        spiking = isinstance(stage, SpikingConv)
        halo, stride = (2, 2) if pool else (1, 1)
        fire = _fire_and_pool(stage, pool) if spiking else None
        yield Piece(
            f"stem.stages.{i}", _conv_and_pool(stage, pool), (stage,), stage.conv.out_channels,
            "bits" if spiking else "numbers", halo, stride, static=_split(stage, fire),
        )  # fmt: skip
    spiking = isinstance(rpe, SpikingConv)
    yield Piece("stem.rpe", _add(rpe), (rpe,), rpe.conv.out_channels, "integers" if spiking else "numbers", halo=1)


def _conv_and_pool(stage: nn.Module, pool: bool) -> Run:
    if isinstance(stage, SpikingConv):
        if isinstance(stage.neuron, SteppedNeuron):
            fire = _fire_and_pool(stage, pool)
            return lambda x: fire(ConvBN.forward(stage, x))
        return lambda x: stage(x, pool=pool)  # one operation on a GPU
    return lambda x: lean_max_pool(stage(x)) if pool else stage(x)


def _fire_and_pool(stage: SpikingConv, pool: bool) -> Run:
    return lambda x: lean_max_pool(stage.neuron(x)) if pool else stage.neuron(x)


def lean_max_pool(x: Tensor) -> Tensor:
    """`layers.max_pool` of rows, then of columns: without the indices of the maxima, which take twice the output."""
    for axis in (3, 4):
        size = x.shape[axis]
        even, odd = (x.movedim(axis, 0)[first::2] for first in (0, 1))
        out = even.clone()
        torch.maximum(out[: size // 2], odd, out=out[: size // 2])
        later = odd[: len(out) - 1]
        torch.maximum(out[1:], later, out=out[1:])
        x = out.movedim(0, axis)
    return x


def _split(stage: ConvBN, fire: Run | None) -> tuple[Run, Run] | None:
    return None if fire is None else (lambda x: ConvBN.forward(stage, x), fire)


def _add(branch: nn.Module) -> Run:
    """x + branch(x), as one operation where the branch takes a residual."""
    if isinstance(branch, SpikingConv):
        return lambda x: branch(x, residual=x)
    return lambda x: x + branch(x)


def _blocks(name: str, blocks: Iterable[nn.Module]) -> Iterator[Piece]:
    for i, block in enumerate(blocks):
        yield from _block(f"{name}.{i}", block)


def _block(name: str, block: Any) -> Iterator[Piece]:
    """Attention and MLP, of spikes (Spikformer, QKFormer) or of potentials (the others)."""
    attn, mlp = block.attn, block.mlp
    width = mlp.fc2.conv.out_channels
    mixes = isinstance(attn, (Attention, StreamingAttention))  # token attention does not
    if isinstance(block, MembraneBlock):
        neuron = block.neuron
        if hasattr(block, "separable"):
            separable: Any = block.separable
            yield Piece(f"{name}.separable", _add(separable), (separable,), width, "numbers", halo=row_halo(separable))
        yield Piece(
            f"{name}.attn", lambda x: x + attn(neuron(x)), (neuron, attn), width, "numbers",
            tiled=not mixes,
        )  # fmt: skip
        yield Piece(f"{name}.mlp", lambda x: x + mlp(x), (mlp,), width, "numbers")
        return
    yield Piece(f"{name}.attn", lambda x: attn(x, residual=x), (attn,), width, "integers", tiled=not mixes)
    yield Piece(f"{name}.mlp", lambda x: mlp(x, residual=x), (mlp,), width, "integers")


def _qkformer(model: QKFormer) -> Iterator[Piece]:
    stem = model.stem
    halo, stride = (2, 2) if stem.pool else (1, 1)
    fire = stem.neuron
    static = (lambda x: lean_max_pool(ConvBN.forward(stem, x)) if stem.pool else ConvBN.forward(stem, x), fire)
    yield Piece("stem", stem, (stem,), stem.conv.out_channels, "bits", halo, stride, static=static)
    stages: Any = model.stages
    for i, stage in enumerate(stages):
        embedding = stage.embedding
        halo, stride = 0, 1
        convs: list[PooledConv] = list(embedding.convs)
        for conv in convs:
            halo += stride * (2 if conv.pool else 1)
            stride *= 2 if conv.pool else 1
        width = convs[-1].conv.out_channels
        yield Piece(f"stages.{i}.embedding", embedding, (embedding,), width, "integers", halo, stride)
        yield from _blocks(f"stages.{i}.blocks", stage.blocks)


def _metaformer(model: MetaFormer) -> Iterator[Piece]:
    stages: Any = model.stages
    for i, stage in enumerate(stages):
        down: ConvBN = stage.down
        width, stride = down.conv.out_channels, int(down.conv.stride[0])
        yield Piece(f"stages.{i}.down", down, (down,), width, "numbers", row_halo(down), stride)
        for j, block in enumerate(stage.blocks):
            name = f"stages.{i}.blocks.{j}"
            if isinstance(block, ConvBlock):
                yield from _conv_block(name, block, width)
            else:
                yield from _block(name, block)


def _conv_block(name: str, block: ConvBlock, width: int) -> Iterator[Piece]:
    separable, conv1, conv2 = block.separable, block.conv1, block.conv2
    yield Piece(f"{name}.separable", _add(separable), (separable,), width, "numbers", halo=row_halo(separable))
    halo = row_halo(conv1) + row_halo(conv2)
    yield Piece(f"{name}.convs", lambda x: x + conv2(conv1(x)), (conv1, conv2), width, "numbers", halo=halo)
