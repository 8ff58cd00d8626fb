"""A seeded choice of hostile cases (tests/hostile); `make fuzz` runs ten thousand."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hostile import make_ground, run_case

CASES = {"signals": 1}


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_ground(tmp_path_factory.mktemp("ground"))


@pytest.mark.parametrize("category", CASES)
def test_hostile_cases(category: str, ground: Path) -> None:
    """Every case works or fails with one short line."""
    found = [
        f"{category}:{seed} {text}" for seed in range(CASES[category]) for text in run_case(category, seed, ground)
    ]
    assert not found, "\n".join(found)
