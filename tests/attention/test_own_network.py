"""An attention layer in a network that is none of our hosts."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lrfdyn
from lrfdyn.attention import lif_host

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "own_network.py"


@pytest.mark.parametrize("kind", list(lrfdyn.ATTENTIONS))
def test_without_a_host_it_is_that_of_spikformer(kind):
    layers = []
    for host in (None, lif_host()):
        torch.manual_seed(0)
        layers.append(lrfdyn.create_attention(kind, 16, 4, (4, 4), host).eval())
    own, spikformers = layers
    x = (torch.rand(2, 3, 16, 4, 4) < 0.5).float()
    assert repr(own) == repr(spikformers)
    assert torch.equal(own(x), spikformers(x))
    assert torch.equal(pickle.loads(pickle.dumps(own))(x), own(x))


@pytest.mark.parametrize("kind", ["ssa", "lrf_dyn"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"grid": 8}, "grid: expected a sequence of 2 integers, got 8"),
        ({"grid": (8,)}, r"grid: expected a sequence of 2 integers, got \(8,\)"),
        ({"grid": (0, 8)}, r"grid: expected the rows and columns of tokens, two integers, got \(0, 8\)"),
        ({"dim": 16.0}, "dim: expected an integer, got 16.0"),
        ({"dim": -4}, "dim: expected an integer >= 1, got -4"),
    ],
)
def test_bad_arguments(kind, arguments, message):
    with pytest.raises(lrfdyn.LrfdynError, match=message):
        lrfdyn.create_attention(kind, **{"dim": 16, "heads": 4, "grid": (4, 4), **arguments})


def test_example_learns_from_recordings():
    command = [sys.executable, str(EXAMPLE), "--steps", "40"]
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLE.parent.parent)}
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert result.returncode == 0, result.stderr
    accuracy = re.search(r"accuracy on 128 new recordings: ([\d.]+)%", result.stdout)
    assert accuracy is not None
    assert float(accuracy[1]) > 80  # chance: 25
    assert "dendrites, k d: 1024 bytes" in result.stdout
