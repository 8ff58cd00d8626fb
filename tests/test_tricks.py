"""Tricks of the training step can be turned off one by one, and change no gradient."""

from __future__ import annotations

import copy
from unittest.mock import Mock

import pytest
import torch

from benchmarks import tricks
from lrfdyn import create_model
from lrfdyn.ops import bits, dispatch
from tests.ops.kernels import DEVICE, rand

pytestmark = pytest.mark.gpu
SMALL = {"dim": 32, "depth": 1, "heads": 2, "image_size": 16, "num_classes": 5, "time_steps": 3}


@pytest.mark.parametrize("trick", tricks.TRICKS)
def test_a_trick_that_is_turned_off_changes_no_gradient(trick, monkeypatch):
    monkeypatch.setattr(dispatch, "_on_kernel_device", lambda tensor: True)
    torch.manual_seed(0)
    model = create_model("spikformer_4_384", attention="ssa", **SMALL).to(DEVICE)
    other, x = copy.deepcopy(model), rand(2, 3, 16, 16)
    model(x).square().sum().backward()
    modules, (name, instead) = tricks.TRICKS[trick]
    called = Mock(side_effect=instead)
    monkeypatch.setitem(tricks.TRICKS, trick, (modules, (name, called)))
    with tricks.without(trick):
        other(x).square().sum().backward()
    assert called.called
    for (what, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), what


def test_memory_is_counted_without_a_gpu():
    peaks = [tricks.measure_memory("spikformer_4_384", "ssa", trick, 1)["peak_mib"] for trick in (tricks.ALL, "bits")]
    # Of one image, spikes of 16 bits in four steps take more than bytes.
    assert peaks[1] > peaks[0] + 1


def test_without_bits_there_are_none():
    spikes, packed = torch.ones(4, 2, 8), torch.full((2, 8), 15, dtype=torch.uint8)
    assert bits.step_bits_of(bits.with_step_bits(spikes.clone(), packed)) is not None
    with tricks.without("bits"):
        assert bits.step_bits_of(bits.with_step_bits(spikes, packed)) is None
