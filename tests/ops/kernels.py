"""What the tests of kernels share: the device they run on, and comparisons by relative norm.

Without a GPU they run in Triton's interpreter on small shapes; with one, on real shapes and in all types too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from lrfdyn.ops import dispatch

if not dispatch.triton_present():
    pytest.skip("the kernels need triton, and PyTorch 2.9", allow_module_level=True)

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
torch.backends.cudnn.allow_tf32 = False  # both sides of a comparison in full float32
if not GPU and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the kernels need a GPU or Triton's interpreter", allow_module_level=True)

DTYPES = [torch.float32, torch.bfloat16, torch.float16] if GPU else [torch.float32, torch.bfloat16]
# Rounding of the stored result, and of sums in float32.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 6e-3, torch.float16: 1e-3}
# A spike may differ only where the potential is within rounding of the threshold: at most this share of all spikes.
FLIPPED = 1e-4


def with_kernels(operation: Callable[..., Any]) -> Callable[..., Any]:
    """`operation` as it runs on a GPU, wherever its tensors are."""

    def call(*inputs: Any, **options: Any) -> Any:
        with patch.object(dispatch, "_on_kernel_device", lambda tensor: True):
            return operation(*inputs, **options)

    return call


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def spikes(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, rate: float = 0.3) -> Tensor:
    return (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < rate).to(DEVICE, dtype)


def close(actual: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    assert actual.shape == expected.shape, what
    assert torch.isfinite(actual).all(), what
    error = (actual.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-6)
    assert error <= tolerance, f"{what}: relative error {error:.3g}"


def compare(
    kernel: Callable[..., Tensor],
    definition: Callable[..., Tensor],
    inputs: Sequence[Tensor | None],
    tolerance: float,
    binary: bool = False,
) -> Tensor:
    """Value and every gradient of `kernel` against `definition` in double precision. Spikes (`binary`) are compared
    by the share that differs. Returns the kernel's output."""
    ours = [None if x is None else x.detach().requires_grad_() for x in inputs]
    theirs = [None if x is None else x.detach().double().requires_grad_() for x in inputs]
    out, expected = kernel(*ours), definition(*theirs)
    if binary:
        assert out.shape == expected.shape
        assert ((out.double() - expected).abs() > 1e-3).double().mean() <= FLIPPED
        if out.numel() > 10**6:  # a few neurons in a million flip, and behind a pool their gradient goes elsewhere
            tolerance = max(tolerance, 5e-3)
    else:
        close(out, expected, tolerance, "output")
    grad = rand(*out.shape, seed=99, dtype=out.dtype)
    got = torch.autograd.grad(out, [x for x in ours if x is not None], grad)
    want = torch.autograd.grad(expected, [x for x in theirs if x is not None], grad.double())
    for i, pair in enumerate(zip(got, want, strict=True)):
        close(*pair, tolerance, f"gradient of input {i}")
    return out.detach()


def same_bits_twice(run: Callable[[], Sequence[Tensor]]) -> None:
    for first, second in zip(run(), run(), strict=True):
        assert torch.equal(first, second)


# --- inputs of operations


def leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()


def currents(*shape: int) -> Tensor:
    """`[T, B, C, H, W]` in channels-last memory."""
    time, batch, channels, height, width = shape
    return leaf(2 * rand(time, batch, height, width, channels).permute(0, 1, 4, 2, 3))


def modes(*shape: int) -> tuple[Tensor, Tensor, Tensor]:
    return leaf(0.02 + rand(*shape, seed=5).abs()), leaf(rand(*shape, seed=6)), leaf(rand(*shape, 2, seed=7))


def tokens(*shape: int, seed: int = 0) -> Tensor:
    """Spikes `[batch, heads, N, d]` as projections write them."""
    return leaf(spikes(*shape, seed=seed).transpose(1, 2))


def real_modes(channels: int, pairs: int) -> tuple[Tensor, None, Tensor]:
    return leaf(0.02 + rand(channels, pairs, 2, seed=5).abs()), None, leaf(rand(channels, pairs, 2, seed=7))
