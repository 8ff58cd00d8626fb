"""Settings of the whole suite, and the comparison that most tests are made of."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from hypothesis import settings
from torch import Tensor

# The same examples on every machine and in every run; one core, so that sums keep their order.
settings.register_profile("lrfdyn", derandomize=True, deadline=None, max_examples=25, database=None)
settings.load_profile("lrfdyn")
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that tests start
# Kernels run in Triton's interpreter where there is no GPU; it must be known before triton is first imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu(needed=True)` are skipped without a GPU; those marked `gpu` run anywhere, and on it if it is
    there."""
    if not torch.cuda.is_available():
        for item in items:
            if any(mark.kwargs.get("needed") for mark in item.iter_markers("gpu")):
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    """The last line of `make test-gpu`: what ran, and on what."""
    yield
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if session.config.option.markexpr == "gpu" and reporter is not None:
        counts = {kind: len(reporter.stats.get(kind, ())) for kind in ("passed", "failed", "error", "skipped")}
        said = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "Triton's interpreter, no GPU"
        reporter.write_line(f"GPU tests: {said}; torch {torch.__version__}, on {device}")


LAYOUTS = ("contiguous", "permuted", "strided", "channels_last", "offset")


def arrange(x: Tensor, layout: str) -> Tensor:
    """The values of `x` in another memory layout."""
    if layout == "permuted":
        order = tuple(reversed(range(x.dim())))
        return x.permute(order).contiguous().permute(order)
    if layout == "strided" and x.dim() >= 1:
        return x.repeat_interleave(2, -1)[..., ::2]
    if layout == "channels_last" and x.dim() >= 3:
        return x.movedim(-3, -1).contiguous().movedim(-1, -3)
    if layout == "offset":  # a slice of a flat buffer, as optimisers keep parameters
        return torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)
    return x.contiguous()


def binary_steps(spikes: Tensor, levels: int) -> Tensor:
    """The binary steps `[levels, ...]` whose mean is the normalised integer spike `spikes` `[...]`."""
    steps = torch.arange(levels, device=spikes.device).reshape(-1, *[1] * spikes.dim())
    return ((spikes * levels).round().unsqueeze(0) > steps).to(spikes.dtype)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def shape_id(shape: Sequence[int], letters: str = "") -> str:
    """`B2-N17-C3`, or `2x17x3` without letters."""
    if letters:
        return "-".join(f"{letter}{size}" for letter, size in zip(letters, shape, strict=True))
    return "x".join(map(str, shape))


def run(function: Callable, inputs: Sequence[Tensor | None]) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs of `function` and the gradients of all inputs, with a random gradient into every output."""
    leaves = [None if x is None else x.detach().requires_grad_() for x in inputs]
    outputs = function(*leaves)
    outputs = [outputs] if isinstance(outputs, Tensor) else [y for y in outputs if y is not None]
    loss = sum((y * random(*y.shape, seed=1000 + i, dtype=y.dtype)).sum() for i, y in enumerate(outputs))
    return [y.detach() for y in outputs], list(torch.autograd.grad(loss, [x for x in leaves if x is not None]))


def assert_close(actual: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    """The largest error against the largest entry: a bound that does not tighten where terms cancel."""
    assert actual.shape == expected.shape, what
    if not expected.numel():
        return
    error = (actual - expected).abs().max() / expected.abs().max().clamp(min=1)
    assert error <= tolerance, f"{what}: relative error {error:.3g}"


def assert_same(
    function: Callable, definition: Callable, inputs: Sequence[Tensor | None], tolerance: float = 1e-9
) -> None:
    """`function` equals `definition` in every output and in the gradient of every input."""
    outputs, gradients = run(function, inputs)
    expected_outputs, expected_gradients = run(definition, inputs)
    assert len(outputs) == len(expected_outputs)
    for i, pair in enumerate(zip(outputs, expected_outputs, strict=True)):
        assert_close(*pair, tolerance, f"output {i}")
    for i, pair in enumerate(zip(gradients, expected_gradients, strict=True)):
        assert_close(*pair, tolerance, f"gradient of input {i}")
