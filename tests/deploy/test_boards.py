"""Models as C on emulated boards, of every kind of operation, where the tools for a board are installed."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

from benchmarks import edge_boards
from benchmarks.edge_boards import BOARDS, Board, measure
from lrfdyn.deploy.c.write import write_c
from tests.deploy.programs import any_model


def needs(name: str):
    missing = BOARDS[name].missing()
    return pytest.mark.skipif(bool(missing), reason=f"{name}: there is no {' and no '.join(missing)}")


def quickly_compiled(name: str) -> Board:
    return replace(BOARDS[name], options={**BOARDS[name].options, "OPTIMISE": "-O1"})


def pictures(shape) -> torch.Tensor:
    return torch.randint(256, (2, *shape), generator=torch.Generator().manual_seed(2), dtype=torch.uint8)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", [pytest.param(name, marks=needs(name)) for name in ("cortex-m4", "aarch64")])
def test_logits_bit_for_bit(name, seed):
    model = any_model(seed, 4)
    found = measure(model, pictures(model.shape), quickly_compiled(name))
    assert found["bit_exact"]
    assert found["images"] == 2
    assert found["flash_bytes"] > found["weight_bytes"] > 0
    assert found["ram_bytes"] >= found["arena_bytes"] > 0
    if name == "cortex-m4":
        assert 100 < found["stack_bytes"] < 8192
        assert found["instructions"] > 10_000


@needs("cortex-m4")
def test_another_logit_is_seen(monkeypatch):
    monkeypatch.setattr(edge_boards, "write_c", lambda model, *rest: write_c(any_model(2, 4), *rest))
    model = any_model(0, 4)
    assert not measure(model, pictures(model.shape), quickly_compiled("cortex-m4"))["bit_exact"]


def test_what_is_not_installed_is_said(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["edge_boards.py", "--boards", "cortex-m4"])
    edge_boards.main()
    assert "cortex-m4: skipped, there is no make and no arm-none-eabi-gcc" in capsys.readouterr().out
