"""Which form of an operation runs."""

from __future__ import annotations

import importlib.util
import runpy
from threading import Thread

import pytest
import torch
from torch.torch_version import TorchVersion

from lrfdyn.ops import dispatch
from lrfdyn.ops.dispatch import plain_operations, use_triton


def test_plain_operations_hold_for_one_thread(monkeypatch):
    monkeypatch.setattr(dispatch, "_on_kernel_device", lambda tensor: True)
    monkeypatch.setattr(dispatch, "triton_present", lambda: True)
    x = torch.zeros(1)
    seen = []
    assert use_triton(x)
    with plain_operations():
        assert not use_triton(x)
        with plain_operations():
            pass
        assert not use_triton(x)
        other = Thread(target=lambda: seen.append(use_triton(x)))
        other.start()
        other.join()
    assert seen == [True]
    assert use_triton(x)


@pytest.mark.parametrize(
    ("version", "enough"), [("2.6.0+cu124", False), ("2.8.0", False), ("2.9.0", True), ("2.13.0", True)]
)
def test_kernels_need_the_triton_of_a_newer_pytorch(version, enough, monkeypatch):
    monkeypatch.delenv("LRFDYN_TRITON", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "triton")
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    assert runpy.run_path(dispatch.__file__)["triton_present"]() == enough
