"""Models as C on emulated boards, of every kind of operation, where the tools for a board are installed."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch

from benchmarks import edge_boards
from benchmarks.edge_boards import BOARDS, Board, measure
from lrfdyn.deploy.c.plan import Planner
from lrfdyn.deploy.c.write import write_c
from lrfdyn.errors import LrfdynError
from tests.deploy.programs import any_model
from tests.deploy.test_c import tiny_model


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


@needs("cortex-m4")
def test_memory_that_is_hardly_enough(monkeypatch, tmp_path):
    """A stack that is measured leaves variables alone, and one without room is an error of the linker."""
    program = Path(copytree(edge_boards.PROGRAM, tmp_path / "boards"))
    monkeypatch.setattr(edge_boards, "PROGRAM", program)
    model, script = tiny_model(), (program / "cortex_m.ld").read_text()
    images, board = pictures(model.shape), quickly_compiled("cortex-m4")
    arena = Planner(model).plan().arena

    def measured(bytes_of_ram: int) -> dict[str, Any]:
        ram = f"0x20000000, LENGTH = {bytes_of_ram}"
        (program / "cortex_m.ld").write_text(script.replace("0x20000000, LENGTH = 4M", ram))
        return measure(model, images, board)

    assert measured(arena + 8192)["bit_exact"]
    with pytest.raises(LrfdynError, match="RAM: less than 4 KiB are left to the stack"):
        measured(arena + 2048)


def test_what_is_not_installed_is_said(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["edge_boards.py", "--boards", "cortex-m4"])
    edge_boards.main()
    assert "cortex-m4: skipped, there is no make and no arm-none-eabi-gcc" in capsys.readouterr().out
