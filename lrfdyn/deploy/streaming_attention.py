"""An attention layer that computes its rows one after the other, in the state that its kind needs for that."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import chain
from threading import RLock
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from lrfdyn.attention import Attention
from lrfdyn.attention.row_stream import BUFFERS, RowStream
from lrfdyn.checks import checked
from lrfdyn.errors import require, unknown_name
from lrfdyn.nn.sections import row_halo

_LOCKS: WeakKeyDictionary[nn.Module, AbstractContextManager[object]] = WeakKeyDictionary()


def call_lock(module: nn.Module) -> AbstractContextManager[object]:
    """The lock of a module that carries a state through a call: threads wait for each other. A copy has its own."""
    return _LOCKS.setdefault(module, RLock())


class StreamingAttention(nn.Module):
    """A layer that streams (`attention.streams`, LRF-Dyn among the kinds here), row by row. It has the same calls as
    the layer and, but for rounding, the same outputs; `buffers` is what it holds of rows, see `RowStream`.

    The state is allocated at the first call for a shape of input and used again by the next. Calls from several
    threads wait for each other. Example:

        layer = StreamingAttention(model.blocks[0].attn)
        y = layer(x)                                     # [T, B, C, H, W]
    """

    @checked
    def __init__(self, attention: Attention, buffers: str = BUFFERS[0]) -> None:
        super().__init__()
        require(attention.streams, f"attention: {attention.kind!r} has no streaming form")
        if buffers not in BUFFERS:
            raise unknown_name("buffers", buffers, BUFFERS)
        self.attention, self.row_buffers = attention, buffers
        self.stream: RowStream | None = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> StreamingAttention:
        self.stream = None  # of the type and device that the weights had
        return super()._apply(fn, recurse)

    @torch.no_grad()
    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """As `Attention.forward`: `x` and the output are `[T, B, C, H, W]`."""
        self.attention.check_input(x)
        with call_lock(self):
            spikes = self.spikes(x)
        proj = self.attention.proj
        return proj(spikes) if residual is None else proj(spikes, residual=residual)

    def spikes(self, x: Tensor) -> Tensor:
        """What the firing neuron sends to the last layer for `x` `[T, B, C, H, W]`: the same shape with the channels
        of v, in channels-last memory."""
        time, batch, _, height, width = x.shape
        stream = self.stream
        if stream is None or (stream.shape, stream.height, stream.width) != ((time, batch), height, width):
            stream = self.stream = None  # the old state goes before the new one comes
            stream = self.stream = self.attention.row_stream(time, batch, (height, width), self.row_buffers)
        stream.reset()
        layers = [getattr(self.attention, name) for name in self.attention.projections]
        halo = max(row_halo(layer) for layer in layers)
        out = x.new_empty(time, batch, height, width, self.attention.value_dim).permute(0, 1, 4, 2, 3)

        def take(row: int) -> Tensor | None:
            first = max(row - halo, 0)
            rows = x[..., first : row + halo + 1, :]
            return stream.take(*(layer(rows)[..., row - first, :] for layer in layers))

        rows = (currents for currents in chain(map(take, range(height)), stream.drain()) if currents is not None)
        for done, currents in enumerate(rows):
            out[..., done, :] = self.attention.fire(currents)
        return out
