"""Networks in sections: functions of a feature map that inference in little memory computes on tiles of its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Run = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Section:
    """A part of a network from one feature map to the next.

    `run` takes `[T, B, C, H, W]` and gives `[T, B, channels, H / stride, W / stride]`. Row r of its output depends on
    the input rows from `stride` r - `halo` to `stride` r + `halo` at most; a section that is not `tiled` needs all
    rows. The output `holds` "bits" (spikes), "integers" (sums of spikes, at most by `adds` larger than those of the
    input) or "numbers" (potentials). `layers` are the modules that take part. `halves` are `run` in two parts, up to
    the currents of its first neuron and from there on: a static image passes the first part once for all time steps.
    """

    name: str
    run: Run
    layers: tuple[nn.Module, ...]
    channels: int
    holds: str
    halo: int = 0
    stride: int = 1
    tiled: bool = True
    halves: tuple[Run, Run] | None = None
    adds: int = 1

    def modules(self) -> Iterator[nn.Module]:
        """All modules in the layers of this section."""
        for layer in self.layers:
            yield from layer.modules()

    def numbers_per_pixel(self, steps: int) -> int:
        """About how many numbers exist at one time for every input pixel, with `steps` time steps together."""
        convs = [m for m in self.modules() if isinstance(m, nn.Conv2d)]
        if not self.tiled:  # attention: inputs, projections, what is mixed and its currents, in twice their channels
            return 8 * steps * max((m.out_channels for m in convs), default=self.channels)
        sizes = ((m.in_channels, m.out_channels / m.stride[0] ** 2) for m in convs)
        # Input, currents and spikes of a layer; the membrane has one time step.
        return max(int(steps * (a + 2 * b) + b) for a, b in sizes)


def residual_section(name: str, branch: nn.Module, channels: int) -> Section:
    """The section `x + branch(x)` of potentials, where `branch` is a chain of convolutions."""
    return Section(name, lambda x: x + branch(x), (branch,), channels, "numbers", halo=row_halo(branch))


def sections_of(name: str, layers: Iterable[Any]) -> Iterator[Section]:
    """The sections of layers that follow each other, and are called `name`.0, `name`.1, ..."""
    for i, layer in enumerate(layers):
        yield from layer.sections(f"{name}.{i}")


def row_halo(module: nn.Module) -> int:
    """How many rows above and below a row a chain of convolutions without stride reads."""
    kernels = [m.kernel_size[0] for m in module.modules() if isinstance(m, nn.Conv2d)]
    return sum(int(size) // 2 for size in kernels)


def lean_max_pool(x: Tensor) -> Tensor:
    """`layers.max_pool` of rows and then of columns: without indices, which take twice the memory of the output."""
    for axis in (3, 4):
        size = x.shape[axis]
        even, odd = (x.movedim(axis, 0)[first::2] for first in (0, 1))
        out = even.clone()
        torch.maximum(out[: size // 2], odd, out=out[: size // 2])
        later = odd[: len(out) - 1]
        torch.maximum(out[1:], later, out=out[1:])
        x = out.movedim(0, axis)
    return x
