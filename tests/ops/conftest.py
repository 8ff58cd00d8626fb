"""Settings of the tests of operations."""

from __future__ import annotations

import pytest
import torch

from lrfdyn.ops import dispatch


@pytest.fixture
def kernels_everywhere(monkeypatch):
    """Kernels run in Triton's interpreter where there is no GPU."""
    monkeypatch.setattr(dispatch, "_on_kernel_device", lambda tensor: True)
    torch._dynamo.reset()
