"""LRF-Dyn row by row: the O(kd) form, with a state that is allocated once and whose size is known beforehand.

Output row i needs the potentials X of the rows i + o, o = 0 and +-d for every dilation d, so it comes out when row
i + reach has arrived, reach being the largest d. What is held of the rows in between is `buffers`:

    "potentials"  k d numbers of dendrites, and X of 2 reach + 1 rows                     every row is scanned once
    "states"      bits of the tokens of 2 reach + 1 rows, and dendrites for every o       once for every o
    "spikes"      bits of the tokens of 2 reach + 1 rows, and dendrites at row i - reach  2 reach + 1 times

All three compute the same function: dendrites and stencils are linear, so the stencils may run over X that is computed
anew from spikes. Beyond the state a row of X and a row of sums exist while a row is computed.

With two directions the first row needs the last token. Rows come out when all have arrived, and the bits of the tokens
of all H rows are held for the way back, with every `buffers`. The dendrites of the way back add to it:

    "potentials"  k d numbers, and X of all H rows                                        every row is scanned once
    "states"      dendrites below every row, H k d numbers                                once, and once for every o
    "spikes"      k d numbers, which start at the last row again for every output row i   min(H, H - i + reach) rows
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lrfdyn.attention.base import Attention, Grid, require_grid
from lrfdyn.errors import require, require_integer, shown
from lrfdyn.ops.bits import pack_integers, packed_width, unpack_integers
from lrfdyn.ops.dendrite import dendrite
from lrfdyn.ops.dendrite.modes import mode_numbers, mode_powers
from lrfdyn.ops.dispatch import use_triton

if TYPE_CHECKING:
    from lrfdyn.attention.lrf_dyn import LRFDyn

# What is held of the rows that the stencils still reach, the least first.
BUFFERS = ("spikes", "states", "potentials")
MOST_BITS = 24  # of a token: integers that float32 holds


def _ordinary_zeros(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that any later call may write to: what is made under `torch.inference_mode` is for that mode alone."""
    with torch.inference_mode(False):
        return torch.zeros(shape, dtype=dtype, device=device)


class RowStream:
    """The mixing of one `LRFDyn` layer, one row of the grid at a time, for T * B frames side by side.

    `attention` is a layer in evaluation mode and `grid` the rows and columns of tokens (default: the layer's own).
    `buffers` says what is held of the rows that the stencils still reach. All memory is allocated here. Example:

        stream = layer.row_stream(time_steps=4, batch=1)
        for row in range(height):
            currents = stream.push(v[..., row, :])       # [T, B, C, W] of row - delay, or None
        for currents in stream.drain():                  # the last `delay` rows
            ...

    `delay` is how far the stencils reach down, and all rows but one with two directions.
    """

    def __init__(
        self, attention: LRFDyn, time_steps: int = 1, batch: int = 1, grid: Grid | None = None, buffers: str = "spikes"
    ) -> None:
        known = isinstance(attention, Attention) and attention.streams
        require(known, f"attention: expected a layer that has a streaming form, got {shown(attention)}")
        require(not attention.training, "attention: expected evaluation mode (batch statistics need all rows)")
        require_integer("time_steps", time_steps, 1, most=2**20)
        require_integer("batch", batch, 1, most=2**20)
        grid = attention.grid if grid is None else grid
        require_grid(grid)
        attention.state_terms(grid, buffers)  # an unknown name is told here
        self.attention, self.buffers, (self.height, self.width) = attention, buffers, grid
        self.shape, frames = (time_steps, batch), time_steps * batch
        dilations = [d for d in attention.lrf.dilations if d < self.height]
        self.offsets = sorted({0, *dilations, *(-d for d in dilations)})
        self.reach, self.delay = self.offsets[-1], attention.delay(self.height)
        self.rows = min(self.delay + self.reach + 1, self.height)
        self.levels = {name: attention.spike_levels(name) for name in attention.projections}
        most, self.token_divisor = attention.token_levels()
        token_bits = most.bit_length()
        fits = token_bits <= MOST_BITS
        require(fits, f"attention: expected tokens of at most {MOST_BITS} bits, got integers up to {most}")

        weight, channels = attention.dendrites.weight, attention.value_dim
        dtype = torch.promote_types(weight.dtype, torch.float32)
        numbers = partial(_ordinary_zeros, dtype=dtype, device=weight.device)
        bits = partial(_ordinary_zeros, dtype=torch.uint8, device=weight.device)
        both, modes = attention.dendrites.directions == 2, (frames, channels, weight.shape[-2], 2)
        self.state = numbers(len(self.offsets) if buffers == "states" else 1, *modes)
        self.back = numbers(self.height if buffers == "states" else 1, *modes) if both else None
        self.potentials = self.tokens = self.queries = None
        if self.delay and buffers == "potentials":
            self.potentials = numbers(self.rows, frames, self.width, channels)
        if self.delay and (buffers != "potentials" or both):
            self.tokens = bits(self.rows, token_bits, frames, self.width, packed_width(channels))
        if self.delay and attention.token == "qkv":
            rows = min(self.delay + 1, self.height)
            self.queries = bits(rows, self.levels["q"][0].bit_length(), frames, self.width, packed_width(attention.dim))
        self.arrived = 0

    @property
    def tensors(self) -> list[Tensor]:
        """What is held between rows."""
        return [t for t in (self.state, self.back, self.potentials, self.tokens, self.queries) if t is not None]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)

    def reset(self) -> None:
        """Goes back to the first row; what the buffers hold is overwritten before it is read."""
        self.state.zero_()
        if self.back is not None:
            self.back.zero_()
        self.arrived = 0

    def push(self, *spikes: Tensor) -> Tensor | None:
        """Takes a row of the projections' spikes, `[T, B, C, W]` each in their order, and returns the normalised
        currents `[T, B, C, W]` of the row that is complete now, `delay` rows above, or None."""
        names = self.attention.projections
        require(len(spikes) == len(names), f"spikes: expected rows of {', '.join(names)}, got {len(spikes)}")
        require(self.arrived < self.height, f"spikes: all {self.height} rows have arrived; reset() starts anew")
        for name, row in zip(names, spikes, strict=True):
            expected = (*self.shape, self.attention.value_dim if name == "v" else self.attention.dim, self.width)
            require(isinstance(row, Tensor), f"{name}: expected a tensor, got {type(row).__name__}")
            require(row.shape == expected, f"{name}: expected a row {list(expected)}, got {list(row.shape)}")
            if row.device.type == "cpu":  # a GPU would have to be waited for
                levels, divisor = self.levels[name]
                codes = row * divisor
                known = ((codes >= 0) & (codes <= levels) & ((codes - codes.round()).abs() < 1e-3)).all()
                steps = f"multiples of 1/{divisor} up to 1" if divisor > 1 else f"integers up to {levels}"
                steps = "0 or 1" if levels == 1 else steps
                require(bool(known), f"{name}: expected spikes ({steps}), got numbers from {row.min()} to {row.max()}")
        return self.take(*spikes)

    @torch.no_grad()
    def take(self, *spikes: Tensor) -> Tensor | None:
        """Does the same as `push` for rows that are known to be right."""
        rows = [row.flatten(0, 1).mT for row in spikes]  # [frames, W, C]
        token = self.attention.tokens(rows)
        if self.queries is not None:
            codes = rows[0].to(self.state.dtype) * self.levels["q"][1]
            pack_integers(codes, self.queries[self.arrived % len(self.queries)])
        if self.tokens is not None:
            pack_integers(token.to(self.state.dtype) * self.token_divisor, self.tokens[self.arrived % self.rows])
        return self._next(token, rows[0])

    @torch.no_grad()
    def drain(self) -> Iterator[Tensor]:
        """Yields the currents `[T, B, C, W]` of the rows that were waiting for rows below the last."""
        complete = self.height <= self.arrived <= self.height + self.delay
        require(complete, f"drain: expected all {self.height} rows before, {self.arrived} have arrived")
        while self.arrived < self.height + self.delay:
            yield self._next(None, None)

    def _next(self, token: Tensor | None, query: Any) -> Any:
        """One row further; `token` and `query` are those of the row that has just arrived."""
        self.arrived += 1
        out, y = self.arrived - 1 - self.delay, None
        if self.potentials is not None and token is not None:
            self.potentials[(self.arrived - 1) % self.rows] = self._scan(token, self.state[0])
        if out == 0:
            self._turn_back(token)
        for offset, x in chain(self._rows_around(out, token), self._rows_on_the_way_back(out, token)):
            if out >= 0:
                y = torch.zeros_like(x) if y is None else y
                self._add_taps(y, x, offset)
        if y is None:
            return None
        if self.queries is not None:
            codes = unpack_integers(self.queries[out % len(self.queries)], self.attention.dim, y.dtype)
            query = codes.div_(self.levels["q"][1])
        if self.attention.token == "qkv":
            y = y * self.attention.widen(query)
        image = y.to(self.attention.dendrites.weight.dtype).mT.unsqueeze(2)  # [frames, C, 1, W]
        return self.attention.norm(image).squeeze(2).unflatten(0, self.shape)

    def _rows_around(self, out: int, token: Tensor | None) -> Iterator[tuple[int, Tensor]]:
        """The offsets of the rows that the stencils of row `out` read, and their potentials X; states go on."""
        inside = [offset for offset in self.offsets if 0 <= out + offset < self.height]
        if self.potentials is not None:
            for offset in inside if out >= 0 else ():
                yield offset, self.potentials[(out + offset) % self.rows]
        elif self.buffers == "states" or not self.reach:
            for offset in inside:
                yield offset, self._scan(self._token(out + offset, token), self.state[self.offsets.index(offset)])
        elif out >= 0:
            # What is kept is the state in front of the first row that is read here, then that of the next output.
            kept = self.state[0]
            state = kept if out >= self.reach else kept.clone()
            for row in range(max(out - self.reach, 0), min(out + self.reach + 1, self.height)):
                x = self._scan(self._token(row, token), state)
                if row - out in inside:
                    yield row - out, x
                if row == out - self.reach:
                    state = kept.clone()

    def _turn_back(self, token: Tensor | None) -> None:
        """What is made once of two directions, when all rows have arrived."""
        if self.back is None:
            return
        if self.potentials is not None:
            for row in reversed(range(self.height)):
                self.potentials[row] += self._scan_back(self._token(row, token), self.back[0])
        elif self.buffers == "states":
            for row in reversed(range(1, self.height)):
                self._scan_back(self._token(row, token), self.back[row - 1].copy_(self.back[row]))

    def _rows_on_the_way_back(self, out: int, token: Tensor | None) -> Iterator[tuple[int, Tensor]]:
        """As `_rows_around`, of the dendrites that run from the last token to the first: taps of both are added."""
        if self.back is None or self.potentials is not None or out < 0:
            return
        if self.buffers == "states":
            for offset in self.offsets:
                if 0 <= out + offset < self.height:
                    yield offset, self._scan_back(self._token(out + offset, token), self.back[out + offset].clone())
        else:
            state = self.back[0].zero_()
            for row in reversed(range(max(out - self.reach, 0), self.height)):
                x = self._scan_back(self._token(row, token), state)
                if row - out in self.offsets:
                    yield row - out, x

    def _token(self, row: int, arrived: Tensor | None) -> Tensor:
        """The tokens of a row `[frames, W, C]`; where none are held it is the one that has just arrived."""
        if self.tokens is None:
            assert arrived is not None
            return arrived
        codes = unpack_integers(self.tokens[row % self.rows], self.attention.value_dim, self.state.dtype)
        return codes if self.token_divisor == 1 else codes.div_(self.token_divisor)

    def _scan_back(self, u: Tensor, state: Tensor) -> Tensor:
        """As `_scan`, from the last token to the first with the second set of dendrites."""
        return self._scan(u.flip(1), state, direction=1).flip(1)

    def _scan(self, u: Tensor, state: Tensor, direction: int = 0) -> Tensor:
        """Potentials `[frames, W, C]` of a row of tokens; `state` is moved on in place."""
        decay, frequency, weight = self.attention.dendrites.modes_by_direction(self.width)[direction]
        if use_triton(u, decay, frequency, weight, state):
            how: Any = {"initial_state": state.contiguous(), "output_final_state": True}
            soma, after = dendrite(u.contiguous(), decay, frequency, weight, **how)
            assert after is not None
            state.copy_(after)
            return soma
        # `ops.dendrite.dendrite_step` over the row, in place.
        u = u.to(state.dtype)
        one = torch.ones(1, device=u.device, dtype=torch.long)
        real = frequency is None
        pole = mode_powers(decay.to(u.dtype), None if frequency is None else frequency.to(u.dtype), one)[0]
        readout = mode_numbers(2 * weight.to(u.dtype), real)
        soma, modes = torch.empty_like(u), state.view(*state.shape[:2], -1) if real else torch.view_as_complex(state)
        for n in range(u.shape[1]):
            modes.mul_(pole).add_(u[:, n].unsqueeze(-1))
            torch.sum((modes * readout).real, -1, out=soma[:, n])
        return soma

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
