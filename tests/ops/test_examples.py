"""The examples in the docstrings of the operations run, and print what they say."""

from __future__ import annotations

import doctest
import sys

import pytest
import torch

from lrfdyn.ops import causal_spike_attention, dendrite, integer_spike, lif, lrf, spike_attention
from lrfdyn.ops.bn_lif import bn_lif
from lrfdyn.ops.spike_conv import spike_conv

OPERATIONS = [lif, integer_spike, dendrite, lrf, spike_attention, causal_spike_attention, bn_lif, spike_conv]


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
def test_example(operation):
    names = {**vars(sys.modules[operation.__module__]), "torch": torch}
    (example,) = doctest.DocTestFinder(recurse=False).find(operation, globs=names)
    assert example.examples
    assert doctest.DocTestRunner().run(example).failed == 0
