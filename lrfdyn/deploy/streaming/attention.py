"""LRF-Dyn row by row: the O(kd) form, with a state that is allocated once and whose size is known beforehand.

Output row i needs the potentials X of the rows i + o, o = 0 and +-d for every dilation d, so it comes out when row
i + reach has arrived, reach being the largest d. What is held of the rows in between is `buffers`:

    "potentials"  k d numbers of dendrites, and X of 2 reach + 1 rows                     every row is scanned once
    "states"      bits of the tokens of 2 reach + 1 rows, and dendrites for every o       once for every o
    "spikes"      bits of the tokens of 2 reach + 1 rows, and dendrites at row i - reach  2 reach + 1 times

All three compute the same function: dendrites and stencils are linear, so the stencils may run over X that is computed
anew from spikes. Beyond the state a row of X and a row of sums exist while a row is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lrfdyn.attention import LRFDyn, StateTerm
from lrfdyn.attention.lrf_dyn import BUFFERS
from lrfdyn.deploy.bits import pack_codes, packed_width, unpack_codes
from lrfdyn.deploy.call_lock import CallLock
from lrfdyn.errors import require, require_integer, require_integers
from lrfdyn.nn.neurons import IntegerSpike
from lrfdyn.nn.sections import row_halo
from lrfdyn.ops.dendrite import dendrite, mode_powers
from lrfdyn.ops.dispatch import use_triton


def spike_levels(attention: LRFDyn) -> int:
    """The largest integer that a spike of q, k or v stands for: 1 for binary spikes."""
    return next((m.levels for m in getattr(attention, "v").modules() if isinstance(m, IntegerSpike)), 1)  # noqa: B009


class RowStream:
    """The mixing of one `LRFDyn` layer, one row of the grid at a time, for T * B frames side by side."""

    def __init__(
        self,
        attention: LRFDyn,
        time_steps: int = 1,
        batch: int = 1,
        grid: tuple[int, int] | None = None,
        buffers: str = BUFFERS[0],
    ) -> None:
        require(isinstance(attention, LRFDyn), f"attention: expected LRFDyn, got {type(attention).__name__}")
        require(not attention.training, "attention: expected evaluation mode (batch statistics need all rows)")
        require_integer("time_steps", time_steps, 1)
        require_integer("batch", batch, 1)
        self.attention, self.buffers = attention, buffers
        grid = attention.grid if grid is None else grid
        require_integers("grid", grid)
        require(len(grid) == 2 and min(grid) >= 1, f"grid: expected height and width of at least 1, got {grid!r}")
        self.height, self.width = grid
        self.terms: list[StateTerm] = attention.state_terms((self.height, self.width), buffers)
        self.shape, frames = (time_steps, batch), time_steps * batch
        self.reach = attention.lrf.reach(self.height)
        dilations = [d for d in attention.lrf.dilations if d < self.height]
        self.offsets = sorted({0, *dilations, *(-d for d in dilations)})
        self.levels = spike_levels(attention)
        self.token_levels = self.levels if attention.token == "value" else self.levels**2

        weight = attention.dendrites.weight
        dtype = torch.promote_types(weight.dtype, torch.float32)
        device, channels = weight.device, attention.value_dim
        states = len(self.offsets) if buffers == "states" else 1
        self.rows = min(2 * self.reach + 1, self.height) if self.reach else 0
        held: Any = {"dtype": dtype, "device": device}
        bits: Any = {"dtype": torch.uint8, "device": device}
        self.state = torch.zeros(states, frames, channels, weight.shape[1], 2, **held)
        self.potentials = self.tokens = self.queries = None
        if self.reach and buffers == "potentials":
            self.potentials = torch.zeros(self.rows, frames, self.width, channels, **held)
        elif self.reach:
            shape = (self.rows, attention.token_bits, frames, self.width, packed_width(channels))
            self.tokens = torch.zeros(shape, **bits)
        if self.reach and attention.token == "qkv":
            rows = min(self.reach + 1, self.height)
            shape = (rows, attention.spike_bits, frames, self.width, packed_width(attention.dim))
            self.queries = torch.zeros(shape, **bits)
        self.arrived = 0

    @property
    def tensors(self) -> list[Tensor]:
        """What is held between rows."""
        return [t for t in (self.state, self.potentials, self.tokens, self.queries) if t is not None]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)

    def reset(self) -> None:
        """Back to the first row; what the buffers hold is overwritten before it is read."""
        self.state.zero_()
        self.arrived = 0

    def push(self, *spikes: Tensor) -> Tensor | None:
        """Takes a row of the projections' spikes, `[T, B, C, W]` each in their order; gives the normalised currents
        `[T, B, C, W]` of the row that is complete now, `reach` rows above, or None."""
        names = self.attention.projections
        require(len(spikes) == len(names), f"spikes: expected rows of {', '.join(names)}, got {len(spikes)}")
        require(self.arrived < self.height, f"spikes: all {self.height} rows have arrived; reset() starts anew")
        for name, row in zip(names, spikes, strict=True):
            wide = self.attention.value_dim if name == "v" else self.attention.dim
            expected = (*self.shape, wide, self.width)
            require(isinstance(row, Tensor), f"{name}: expected a tensor, got {type(row).__name__}")
            require(row.shape == expected, f"{name}: expected a row {list(expected)}, got {list(row.shape)}")
            if row.device.type == "cpu":  # a GPU would have to be waited for
                codes = row * self.levels
                known = ((codes >= 0) & (codes <= self.levels) & ((codes - codes.round()).abs() < 1e-3)).all()
                steps = "0 or 1" if self.levels == 1 else f"multiples of 1/{self.levels} up to 1"
                require(bool(known), f"{name}: expected spikes ({steps}), got numbers from {row.min()} to {row.max()}")
        return self.take(*spikes)

    @torch.no_grad()
    def take(self, *spikes: Tensor) -> Tensor | None:
        """`push` of rows that are known to be right."""
        rows = [row.flatten(0, 1).mT for row in spikes]  # [frames, W, C]
        token = rows[-1]
        if self.attention.token == "qkv":
            token = self._widen(rows[1]) * token
            if self.queries is not None:
                pack_codes(rows[0] * self.levels, self.queries[self.arrived % len(self.queries)])
        if self.tokens is not None:
            pack_codes(token * self.token_levels, self.tokens[self.arrived % self.rows])
        return self._next(token, rows[0])

    @torch.no_grad()
    def drain(self) -> Iterator[Tensor]:
        """The rows that were waiting for rows below the last."""
        require(
            self.height <= self.arrived <= self.height + self.reach,
            f"drain: expected all {self.height} rows before, {self.arrived} have arrived",
        )
        while self.arrived < self.height + self.reach:
            row = self._next(None, None)
            assert row is not None
            yield row

    def _next(self, token: Tensor | None, query: Tensor | None) -> Tensor | None:
        """One row further; `token` and `query` are those of the row that has just arrived."""
        self.arrived += 1
        out = self.arrived - 1 - self.reach
        if self.potentials is not None:
            y = self._from_potentials(token, out)
        elif self.buffers == "states" or not self.reach:
            y = self._from_states(token, out)
        else:
            y = self._from_spikes(out)
        if y is None:
            return None
        if self.queries is not None:
            codes = unpack_codes(self.queries[out % len(self.queries)], self.attention.dim, y.dtype)
            query = codes.div_(self.levels)
        if self.attention.token == "qkv":
            assert query is not None
            y = y * self._widen(query)
        norm = self.attention.norm
        image = y.to(self.attention.dendrites.weight.dtype).mT.unsqueeze(2)  # [frames, C, 1, W]
        return norm(image).squeeze(2).unflatten(0, self.shape)

    def _from_potentials(self, token: Tensor | None, out: int) -> Tensor | None:
        assert self.potentials is not None
        if token is not None:
            self.potentials[(self.arrived - 1) % self.rows] = self._scan(token, self.state[0])
        if out < 0:
            return None
        y = torch.zeros_like(self.potentials[0])
        for offset in self._inside(out):
            self._add_taps(y, self.potentials[(out + offset) % self.rows], offset)
        return y

    def _from_states(self, token: Tensor | None, out: int) -> Tensor | None:
        y = None
        for i, offset in enumerate(self.offsets):
            if not 0 <= out + offset < self.height:
                continue
            x = self._scan(self._token(out + offset) if token is None or self.reach else token, self.state[i])
            if out >= 0:
                y = torch.zeros_like(x) if y is None else y
                self._add_taps(y, x, offset)
        return y

    def _from_spikes(self, out: int) -> Tensor | None:
        if out < 0:
            return None
        # What is kept is the state in front of the first row that this output reads, and then that of the next output.
        y, kept = None, self.state[0]
        state = kept if out >= self.reach else kept.clone()
        for row in range(max(out - self.reach, 0), min(out + self.reach + 1, self.height)):
            x = self._scan(self._token(row), state)
            y = torch.zeros_like(x) if y is None else y
            if row - out in self.offsets:
                self._add_taps(y, x, row - out)
            if row == out - self.reach:
                state = kept.clone()
        return y

    def _inside(self, row: int) -> list[int]:
        return [offset for offset in self.offsets if 0 <= row + offset < self.height]

    def _token(self, row: int) -> Tensor:
        assert self.tokens is not None
        codes = unpack_codes(self.tokens[row % self.rows], self.attention.value_dim, self.state.dtype)
        return codes if self.token_levels == 1 else codes.div_(self.token_levels)

    def _scan(self, u: Tensor, state: Tensor) -> Tensor:
        """Potentials `[frames, W, C]` of a row of tokens; `state` is moved on in place."""
        decay, frequency, weight = self.attention.dendrites.modes(self.width)
        if use_triton(u, decay, frequency, weight, state):
            soma, after = dendrite(
                u.contiguous(), decay, frequency, weight, initial_state=state.contiguous(), output_final_state=True
            )
            assert after is not None
            state.copy_(after)
            return soma
        return _steps(u.to(state.dtype), decay, frequency, weight, state)

    def _add_taps(self, y: Tensor, x: Tensor, row: int) -> None:
        """Adds what the row of potentials `x`, `row` below that of `y`, gives to it."""
        if row == 0:
            y += x
        for weight, d in zip(self.attention.lrf.weight, self.attention.lrf.dilations, strict=True):
            if row not in (-d, 0, d):
                continue
            taps = weight[:, 1 + (row > 0) - (row < 0)].to(x.dtype)
            y.addcmul_(x, taps[:, 1])
            if d < self.width:
                y[:, d:].addcmul_(x[:, :-d], taps[:, 0])
                y[:, :-d].addcmul_(x[:, d:], taps[:, 2])

    def _widen(self, tokens: Tensor) -> Tensor:
        ratio = self.attention.value_dim // self.attention.dim
        return tokens.repeat_interleave(ratio, -1) if ratio > 1 else tokens


def _steps(u: Tensor, decay: Tensor, frequency: Tensor, weight: Tensor, state: Tensor) -> Tensor:
    """`ops.dendrite.dendrite_step` over a row, in place."""
    pole = mode_powers(decay.to(u.dtype), frequency.to(u.dtype), torch.ones(1, device=u.device, dtype=torch.long))[0]
    readout = torch.view_as_complex(2 * weight.to(u.dtype))
    soma, modes = torch.empty_like(u), torch.view_as_complex(state)
    for n in range(u.shape[1]):
        modes.mul_(pole).add_(u[:, n].unsqueeze(-1))
        torch.sum((modes * readout).real, -1, out=soma[:, n])
    return soma


class StreamingAttention(nn.Module):
    """An `LRFDyn` layer that computes its rows one after the other. Same calls and, but for rounding, same outputs.

    The state is allocated at the first call for a shape of input and used again by the next. Calls from several
    threads wait for each other.
    """

    def __init__(self, attention: LRFDyn, buffers: str = BUFFERS[0]) -> None:
        super().__init__()
        require(isinstance(attention, LRFDyn), f"attention: expected LRFDyn, got {type(attention).__name__}")
        attention.state_terms(buffers=buffers)  # an unknown name is told at once
        self.attention, self.kept_rows = attention, buffers
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
            self.stream = RowStream(self.attention, time, batch, (grid[0], grid[1]), self.kept_rows)
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
        """What the firing neuron sends to the last layer, `[T, B, C, H, W]` in channels-last memory."""
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
