"""The benchmark of runtimes on a CPU, on a small model in this process: what it says must be what the model does."""

from __future__ import annotations

import json
import os
import shutil
from argparse import Namespace

import numpy as np
import pytest
import torch

from benchmarks import edge
from lrfdyn import create_model
from lrfdyn.deploy import load_integer
from lrfdyn.deploy.c.native import COMPILERS
from lrfdyn.deploy.c.plan import Planner
from lrfdyn.deploy.export.write import settle_norms
from tests.fuzz_engine import has_openmp

NATIVE = "lrfdyn C"
KEYS = {"model", "attention", "runtime", "threads", "ms", "ram_kib", "file_mib", "top1", "bit_exact"}

pytestmark = pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="there is no C compiler")


@pytest.fixture
def here(monkeypatch):
    """As `in_own_process`, without another process and without a bound to cores."""
    monkeypatch.setattr(edge, "OPTIONS", ("-O0",))
    monkeypatch.setattr(edge, "FACTORS", (0.5, 1.0))
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)

    def measured(name, folder, threads, options, everything):
        return json.loads(json.dumps(edge.measure(name, folder, threads, options.timed, 0.0, everything)))

    monkeypatch.setattr(edge, "in_own_process", measured)


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(0)
    sizes = {"dim": 16, "depth": 1, "heads": 2, "num_classes": 10, "image_size": 8, "in_channels": 1}
    model = create_model("spikformer_4_384", attention="lrf_dyn", **sizes).eval()
    settle_norms(model)
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_rows_firing_and_layers(here, saved, tmp_path):
    threads = [1, 2] if has_openmp() else [1]
    options = Namespace(threads=threads, timed=2, seconds=0.0, rounds=2, data="digits", data_root=None, images=6)
    rows = edge.measure_model(str(saved), [edge.TORCH, NATIVE], tmp_path, options)
    counts = [(row["runtime"], row["threads"]) for row in rows]
    assert counts == [(name, n) for name in (edge.TORCH, NATIVE) for n in threads]
    native, integer = rows[len(threads)], load_integer(tmp_path / "integer.safetensors")
    assert all(set(row) >= KEYS for row in rows)
    assert (native["bit_exact"], rows[-1]["bit_exact"], rows[0]["bit_exact"]) == (True, True, None)
    assert rows[0]["runtime_version"] == torch.__version__
    plan = Planner(integer).plan()
    assert native["ram_kib"] == plan.arena / 1024
    assert rows[-1]["ram_kib"] == (plan.arena + (rows[-1]["threads"] - 1) * plan.thread_bytes) / 1024
    levels, labels = edge.pictures(integer, options, trained=True)
    assert native["top1"] == 100 * float((integer(levels).argmax(1).numpy() == labels).mean())
    assert 0 < native["firing_rate"] < 1

    facts = {"model": "small"}
    found = edge.firing(tmp_path, facts, 2, 0.0)
    rates = [record["firing_rate"] for record in found]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > rates[-1]
    assert found[edge.FACTORS.index(1.0)]["firing_rate"] == native["firing_rate"]
    assert all(record["bit_exact"] and record["ms"] > 0 for record in found)

    parts = edge.layers(tmp_path, facts, 2, 0.0)
    assert [part["operation"] for part in parts] == [call.operation.name for call in plan.calls]
    assert sum(part["share"] for part in parts) == pytest.approx(1)
    assert all(part["ms"] > 0 for part in parts)


def test_other_logits_are_seen(tmp_path):
    logits = np.arange(6, dtype=np.int32).reshape(2, 3)
    np.save(tmp_path / f"{NATIVE} 1.npy", logits)
    assert edge.compare(tmp_path, NATIVE, 1, logits) is True
    assert edge.compare(tmp_path, NATIVE, 1, logits + 1) is False
    assert edge.compare(tmp_path, edge.TORCH, 1, logits) is None
    np.save(tmp_path / f"{edge.TORCH} 1.npy", logits.astype(np.float32))
    np.save(tmp_path / "onnxruntime float32 2.npy", np.nextafter(logits[:1].astype(np.float32), 9))
    assert edge.compare(tmp_path, "onnxruntime float32", 2, logits) is False


def test_the_least_time_of_every_image_counts(monkeypatch):
    """Two images of 1 and 3 ms, of which each is slower in one of the two rounds."""
    durations = iter([1e-3, 9e-3, 5e-3, 3e-3])
    clock = [0.0]
    monkeypatch.setattr(edge.time, "perf_counter", lambda: clock[0])

    def call(_image):
        clock[0] += next(durations)
        return _image

    least, median = edge.per_image(call, np.zeros((2, 1)), 0.0)
    assert (least, median) == (pytest.approx(2), pytest.approx(4))


def test_memory_that_work_takes_is_seen():
    taken = edge.peak_kib(lambda: bytes(bytearray(b"1") * 2**25))
    assert taken is None or taken >= 2**15


def test_records_of_other_models_are_kept(tmp_path):
    path = tmp_path / "edge.json"

    def row(model, ms):
        return {"model": model, "attention": "ssa", "image_size": 8, "ms": ms, "machine": {}}

    edge.save([row("a", 1), row("b", 2)], path)
    edge.save([row("b", 3), row("b", 4)], path)
    assert [(r["model"], r["ms"]) for r in json.loads(path.read_text())] == [("a", 1), ("b", 3), ("b", 4)]
