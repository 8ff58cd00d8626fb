"""Which form of an operation runs."""

from __future__ import annotations

from threading import Thread

import torch

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
