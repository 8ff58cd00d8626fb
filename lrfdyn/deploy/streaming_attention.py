"""An attention layer that computes its rows one after the other, in the state that its kind needs for that."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lrfdyn.attention import Attention
from lrfdyn.attention.row_stream import BUFFERS, RowStream
from lrfdyn.deploy.call_lock import CallLock
from lrfdyn.errors import LrfdynError, require, unknown_name
from lrfdyn.nn.sections import row_halo


class StreamingAttention(nn.Module):
    """A layer that streams (`attention.streams`, LRF-Dyn among the kinds here), row by row. It has the same calls as
    the layer and, but for rounding, the same outputs; `buffers` is what it holds of rows, see `RowStream`.

    The state is allocated at the first call for a shape of input and used again by the next. Calls from several
    threads wait for each other. Example:

        layer = StreamingAttention(model.blocks[0].attn)
        y = layer(x)                                     # [T, B, C, H, W]
    """

    def __init__(self, attention: Attention, buffers: str = BUFFERS[0]) -> None:
        super().__init__()
        require(isinstance(attention, Attention), f"attention: expected an attention, got {type(attention).__name__}")
        if not attention.streams:
            raise LrfdynError(f"attention: {attention.kind!r} has no streaming form")
        if buffers not in BUFFERS:
            raise unknown_name("buffers", buffers, BUFFERS)
        self.attention, self.row_buffers = attention, buffers
        self.stream: RowStream | None = None
        self._lock = CallLock()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> StreamingAttention:
        self.stream = None  # of the type and device that the weights had
        return super()._apply(fn, recurse)

    def _stream(self, x: Tensor) -> RowStream:
        time, batch, _, *grid = x.shape
        kept = self.stream
        if kept is None or kept.shape != (time, batch) or [kept.height, kept.width] != grid:
            self.stream = None  # the old state goes before the new one comes
            self.stream = self.attention.row_stream(time, batch, (grid[0], grid[1]), self.row_buffers)
        assert self.stream is not None
        self.stream.reset()
        return self.stream

    @torch.no_grad()
    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """As `Attention.forward`: `x` and the output are `[T, B, C, H, W]`."""
        channels = self.attention.dim
        require(x.dim() == 5 and x.shape[2] == channels, f"x: expected [T, B, {channels}, H, W], got {list(x.shape)}")
        with self._lock:
            spikes = self.spikes(x)
        proj = self.attention.proj
        return proj(spikes) if residual is None else proj(spikes, residual=residual)

    def spikes(self, x: Tensor) -> Tensor:
        """What the firing neuron sends to the last layer for `x` `[T, B, C, H, W]`: the same shape with the channels
        of v, in channels-last memory."""
        stream, height = self._stream(x), x.shape[3]
        layers = [getattr(self.attention, name) for name in self.attention.projections]
        halo = max(row_halo(layer) for layer in layers)
        time, batch, _, _, width = x.shape
        out = x.new_empty(time, batch, height, width, self.attention.value_dim).permute(0, 1, 4, 2, 3)
        done = 0
        for row in range(height):
            first = max(row - halo, 0)
            rows = x[..., first : row + halo + 1, :]
            currents = stream.take(*(layer(rows)[..., row - first, :] for layer in layers))
            if currents is not None:
                out[..., done, :] = self.attention.fire(currents)
                done += 1
        for currents in stream.drain():
            out[..., done, :] = self.attention.fire(currents)
            done += 1
        return out
