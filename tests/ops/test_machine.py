"""What launches take from the machine: the sizes of an H200 there, and sizes that fit elsewhere."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton")

from benchmarks import kernel_cases
from lrfdyn.ops import dispatch, machine, spike_attention, tuning_file
from lrfdyn.ops.lif.triton import _lif
from lrfdyn.ops.machine import H200, Machine

attention = sys.modules[spike_attention.__module__]  # a function has taken the name of its package
GOLDEN = Path(__file__).parents[1] / "golden" / "launches_h200.json"
RTX_3090 = Machine("NVIDIA GeForce RTX 3090", "sm_86", 82, 32, 99 * 1024)
MI300X = Machine("AMD Instinct MI300X", "gfx942", 304, 64, 64 * 1024)


@pytest.fixture(autouse=True)
def nothing_measured(monkeypatch):
    monkeypatch.setenv("LRFDYN_TUNING", "0")
    tuning_file.read.cache_clear()
    yield
    tuning_file.read.cache_clear()


def launches(case, on, monkeypatch):
    monkeypatch.setattr(machine, "NO_GPU", on)
    return kernel_cases.launches(kernel_cases.OPERATIONS[case], type(_lif))


@pytest.mark.parametrize("case", json.loads(GOLDEN.read_text("utf-8")))
def test_launches_on_an_h200_have_the_sizes_that_were_measured_there(case, monkeypatch):
    """The file was written by the launches before sizes depended on the machine."""
    expected, found = json.loads(GOLDEN.read_text("utf-8"))[case], launches(case, H200, monkeypatch)
    assert [launch["kernel"] for launch in found] == [launch["kernel"] for launch in expected]
    for launch, measured in zip(found, expected, strict=True):
        assert measured == {name: launch[name] for name in measured}


@pytest.mark.parametrize("on", [RTX_3090, MI300X], ids=lambda machine: machine.architecture)
def test_other_machines_have_as_many_lanes_and_programs_that_fit_them(on, monkeypatch):
    for case in ("bn_lif", "lif", "dendrite", "lrf, whole", "spike_attention"):
        for here, there in zip(*(launches(case, each, monkeypatch) for each in (on, H200)), strict=True):
            lanes = here["num_warps"] * on.lanes, there["num_warps"] * H200.lanes
            assert lanes[0] == (max(lanes[1], on.lanes)), here["kernel"]
            if there["num_warps"] == 1 and "BC" in here:
                assert here["BC"] == max(there["BC"], on.lanes)  # no lane without a channel
            if here["kernel"] in ("statistics_kernel", "sums_kernel"):
                assert here["grid"][0] * here["grid"][1] <= 8 * on.multiprocessors
    assert (H200.reducers, H200.walkers) == (1056, 3072)
    assert 24 * on.multiprocessors - 256 < on.walkers <= 24 * on.multiprocessors
    assert replace(on, multiprocessors=1).walkers == 256


@pytest.mark.parametrize(
    ("facts", "hip", "expected"),
    [
        ({"major": 8, "minor": 6, "warp_size": 32}, None, ("sm_86", 32)),
        ({"major": 10, "minor": 0}, None, ("sm_100", 32)),
        ({"major": 9, "minor": 4, "gcnArchName": "gfx942:sramecc+:xnack-"}, "6.3", ("gfx942", 64)),
        ({"major": 11, "minor": 0, "gcnArchName": "gfx1100", "warp_size": 32}, "6.3", ("gfx1100", 32)),
    ],
)
def test_facts_of_a_gpu_are_read_from_it(facts, hip, expected, monkeypatch):
    asked = []
    properties = SimpleNamespace(name="a GPU", multi_processor_count=20, **facts)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: asked.append(index) or properties)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(machine, "_shared_memory", lambda index: 1000 * index)
    read = machine._machine.__wrapped__
    assert read(1) == Machine("a GPU", expected[0], 20, expected[1], 1000)
    assert read(None).shared == 3000
    assert asked == [1, 3]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert read(0) is H200


@pytest.mark.parametrize("on", [H200, RTX_3090, MI300X], ids=lambda machine: machine.architecture)
def test_wide_heads_take_the_kernel_where_there_is_room(on, monkeypatch):
    """A compiler that traces the call gets the same answer."""
    monkeypatch.setattr(machine, "NO_GPU", on)
    monkeypatch.setattr(dispatch, "_on_kernel_device", lambda tensor: True)
    q, k, v = (torch.zeros(1, 1, 20, size, dtype=torch.float16) for size in (256, 256, 64))
    assert attention._has_kernel(q, k, v, False) == (on is not RTX_3090)
    assert attention._has_kernel(q, k, v[..., :32], False)
    assert not attention._has_kernel(q, k, q, False)
    torch._dynamo.reset()
    traced = torch.compile(lambda *x: attention._has_kernel(*x, False), fullgraph=True, backend="eager")
    assert traced(q, k, v) == (on is not RTX_3090)
