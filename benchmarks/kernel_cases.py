"""What launches every kernel, on tensors without memory: for looking at launches where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from lrfdyn import create_model
from lrfdyn.ops import causal_spike_attention, dendrite, dispatch, integer_spike, lif, lrf, spike_attention
from lrfdyn.ops.bits import pack_channels, step_bits_of, unpack_channels, with_step_bits
from lrfdyn.ops.bn_lif import Integer, Norm, bn_lif
from lrfdyn.ops.lif import Dynamics
from lrfdyn.ops.spike_conv import spike_conv

HALF, FULL, BYTES = torch.bfloat16, torch.float32, torch.uint8
# Networks at the sizes of the papers: name, attention, images, and the size of those.
MODELS = (
    ("spikformer_4_384", "ssa", 256, 32), ("spikformer_4_384", "lrf_ssa", 256, 32),
    ("spikformer_4_384", "lrf_dyn", 256, 32), ("spikformer_8_512", "lrf_ssa", 64, 224),
    ("spikformer_8_512", "lrf_dyn", 64, 224), ("qkformer_10_512", "ssa", 32, 224), ("sdt_v3_s", "lrf_dyn", 64, 224),
)  # fmt: skip


@contextmanager
def without_memory() -> Iterator[None]:
    """Inside, operations take their kernels, and autocast is to bfloat16, wherever tensors are."""
    with (
        patch.object(dispatch, "_on_kernel_device", lambda tensor: True),
        patch.object(dispatch, "_autocast", lambda kind: HALF),
        torch.device("meta"),
    ):
        yield


def _both_ways(function: Callable[..., Tensor], *inputs: Tensor | None, summed: bool = False) -> None:
    """Forward, and backward from a gradient that is dense or, of a sum, the same for all tokens."""
    leaves = [None if x is None or not x.is_floating_point() else x.detach().requires_grad_() for x in inputs]
    out = function(*(x if leaf is None else leaf for x, leaf in zip(inputs, leaves, strict=True)))
    given = out.sum((0, 3, 4)) if summed else out
    given.backward(torch.empty_like(given))


def _rows(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    """`[..., C, H, W]` in channels-last memory."""
    *outer, channels, height, width = shape
    return torch.empty(*outer, height, width, channels, dtype=dtype).movedim(-1, -3)


def _bn_lif(
    shape: Sequence[int], neuron: Any, dtype: torch.dtype = HALF, training: bool = True, summed: bool = False,
    residual: Tensor | None = None, **options: Any,
) -> None:  # fmt: skip
    one = torch.empty(shape[2])

    def run(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None) -> Tensor:
        norm = Norm(weight, bias, one, one.clone(), training)
        return bn_lif(x, norm, neuron, offset=one, residual=residual, **options)

    _both_ways(run, _rows(*shape, dtype=dtype), one, one, residual, summed=summed)


def _dendrite(tokens: int, directions: Sequence[int] = (), real: bool = False, modes: int = 4) -> None:
    one, pair = torch.empty(*directions, 384, modes), torch.empty(*directions, 384, modes, 2)
    given = (pair, None, pair) if real else (one, one, pair)
    bits = torch.empty(256, tokens, 384, dtype=BYTES)
    _both_ways(lambda u, *m: dendrite(u, *m, packed=bits)[0], torch.empty(1024, tokens, 384, dtype=HALF), *given)


def _attention(d: int, e: int, causal: bool = False, packed: bool = True, dtype: torch.dtype = HALF) -> None:
    q, k, v = (torch.empty(256, 196, 8, size, dtype=dtype).transpose(1, 2) for size in (d, d, e))
    bits = [torch.empty(64, 196, 8, size, dtype=BYTES).transpose(1, 2) for size in (d, d, e)] if packed else None
    if causal:
        _both_ways(lambda *x: causal_spike_attention(*x, 0.125)[0], q, k, v)
    else:
        _both_ways(lambda *x: spike_attention(*x, 0.125, packed=bits), q, k, v)


def _lrf(shape: Sequence[int], dilations: Sequence[int], soma: bool = False) -> None:
    """Of potentials, added to themselves, as LRF-Dyn launches it; or of spikes with their bits, added to nothing, as
    LRF-SSA with a norm does. That without a norm is in the networks."""
    bits = None if soma else _rows(shape[0] // 4, *shape[1:], dtype=BYTES)
    weight = torch.empty(len(dilations), shape[1], 3, 3)
    _both_ways(lambda x, w: lrf(x, w, dilations, x if soma else None, bits), _rows(*shape), weight)


def _convolution_of_bits() -> None:
    """Its gradient takes the spikes out of their bits."""
    x = with_step_bits(_rows(4, 64, 192, 16, 16), _rows(64, 192, 16, 16, dtype=BYTES))
    weight = torch.empty(384, 192, 3, 3, dtype=HALF)
    _both_ways(lambda w: spike_conv(x, w, padding=(1, 1), packed=step_bits_of(x)), weight)


def _lif_with_state() -> None:
    def run(x: Tensor, h: Tensor) -> Tensor:
        spikes, state = lif(x, Dynamics.lif(), h, True)
        return spikes + state

    _both_ways(run, torch.empty(4, 64, 64, 384), torch.empty(64, 64, 384))


def _step_of_a_stream() -> None:
    """Dendrites that take a state and leave one."""
    modes, pairs = torch.empty(384, 4), torch.empty(384, 4, 2)
    state = torch.empty(64, 384, 4, 2)
    with torch.no_grad():
        dendrite(torch.empty(64, 14, 384), modes, modes, pairs, initial_state=state, output_final_state=True)


NEURON, INTEGER = Dynamics.lif(), Integer()
WIDE, NARROW = (4, 64, 384, 8, 8), (4, 64, 96, 32, 32)
# Of every kernel each form at a usual size; the attention in float32 and of wide heads too, which need the most room.
OPERATIONS: dict[str, Callable[[], None]] = {
    "bn_lif": lambda: _bn_lif(WIDE, NEURON),
    "bn_lif, narrow": lambda: _bn_lif(NARROW, NEURON),
    "bn_lif, float32": lambda: _bn_lif(WIDE, NEURON, FULL),
    "bn_lif, evaluation": lambda: _bn_lif(WIDE, NEURON, training=False),
    "bn_lif, eight steps": lambda: _bn_lif((8, *WIDE[1:]), NEURON),
    "bn_lif, residual": lambda: _bn_lif(WIDE, NEURON, residual=_rows(*WIDE)),
    "bn_lif, pool": lambda: _bn_lif(NARROW, NEURON, pool=True),
    "bn_lif, repeated": lambda: _bn_lif((1, *NARROW[1:]), NEURON, repeats=4),
    "bn_lif, integer": lambda: _bn_lif(WIDE, INTEGER),
    "bn_lif, pool first": lambda: _bn_lif(NARROW, NEURON, pool_first=True),
    "bn_lif, pool first, eight steps": lambda: _bn_lif((8, *NARROW[1:]), NEURON, pool_first=True),
    "bn_lif, pool first, repeated": lambda: _bn_lif((1, *NARROW[1:]), NEURON, pool_first=True, repeats=4),
    "bn_lif, no neuron": lambda: _bn_lif(WIDE, None),
    "bn_lif, no neuron, residual": lambda: _bn_lif(WIDE, None, residual=_rows(*WIDE)),
    "bn_lif, no neuron, pool": lambda: _bn_lif(WIDE, None, pool_first=True),
    "bn_lif, no neuron, repeated": lambda: _bn_lif((1, *NARROW[1:]), None, repeats=4),
    "bn_lif, summed": lambda: _bn_lif(WIDE, NEURON, summed=True),
    "lif": lambda: _both_ways(lambda x: lif(x, NEURON)[0], _rows(*WIDE)),
    "lif, states": _lif_with_state,
    "integer_spike": lambda: _both_ways(integer_spike, _rows(*WIDE)),
    "lrf, whole": lambda: _lrf((256, 384, 8, 8), (1, 3, 5)),
    "lrf, four rows": lambda: _lrf((256, 384, 4, 4), (1,), soma=True),
    "lrf, row by row": lambda: _lrf((256, 512, 14, 14), (1, 3, 5)),
    "dendrite": lambda: _dendrite(64),
    "dendrite, one mode": lambda: _dendrite(64, modes=1),
    "dendrite, real modes": lambda: _dendrite(64, real=True),
    "dendrite, two directions": lambda: _dendrite(64, (2,)),
    "dendrite, states": _step_of_a_stream,
    "spike_attention": lambda: _attention(64, 64),
    "spike_attention, wide": lambda: _attention(128, 128),
    "spike_attention, wider": lambda: _attention(256, 64),
    "spike_attention, float32": lambda: _attention(32, 32, packed=False, dtype=FULL),
    "causal_spike_attention": lambda: _attention(64, 64, causal=True),
    "causal_spike_attention, wide": lambda: _attention(64, 128, causal=True),
    "causal_spike_attention, wider": lambda: _attention(128, 64, causal=True),
    "causal_spike_attention, float32": lambda: _attention(32, 32, causal=True, dtype=FULL),
    "pack_channels": lambda: pack_channels(torch.empty(4, 64, 196, 384, dtype=HALF)),
    "unpack_channels": lambda: unpack_channels(torch.empty(4, 64, 196, 48, dtype=BYTES), 384, HALF),
    "spike_conv": _convolution_of_bits,
}  # fmt: skip

# Of these every kernel is launched, and none takes the compiler long.
QUICK = (
    "bn_lif", "bn_lif, pool", "bn_lif, pool first", "bn_lif, no neuron, residual", "bn_lif, summed", "lif",
    "integer_spike", "lrf, four rows", "dendrite, one mode", "spike_attention", "spike_attention, wide",
    "pack_channels", "unpack_channels", "spike_conv",
)  # fmt: skip


def train(name: str, attention: str, images: int, size: int) -> None:
    """Forward and backward pass of a network."""
    model = create_model(name, attention=attention)
    model(torch.empty(images, 3, size, size)).float().sum().backward()


def networks() -> dict[str, Callable[[], None]]:
    return {f"{given[0]} {given[1]}": lambda given=given: train(*given) for given in MODELS}


def launches(case: Callable[[], None], kind: type) -> list[dict[str, Any]]:
    """What a case launches, of kernels of this type (compiled or interpreted): name, grid, and the numbers that the
    kernel is compiled for. Nothing is started."""
    found = []

    def record(kernel: Any, *_: Any, grid: Any, warmup: bool, **options: Any) -> None:
        numbers = {name: value for name, value in options.items() if type(value) is int}
        found.append({"kernel": kernel.fn.__name__, "grid": list(grid), **numbers})

    with patch.object(kind, "run", record), without_memory():
        case()
    return found
