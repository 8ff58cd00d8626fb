from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from lrfdyn.data.hashed_random import CROP, FLIP, GOLDEN, Keys, device_normal, hashed, normal, permutation
from tests.data.make import keys


def splitmix(x: int) -> int:
    """The published finaliser, in whole numbers."""
    word = (1 << 64) - 1
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & word
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & word
    return x ^ (x >> 31)


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=4))
def test_hash_is_the_definition(words: list[int]) -> None:
    state = 0
    for word in words:
        state = splitmix(state ^ splitmix((word + GOLDEN) % 2**64))
    assert int(hashed(*words)[0]) == state


def test_first_number_of_splitmix() -> None:
    """The first output of the published generator with seed 0."""
    assert splitmix(GOLDEN) == 0xE220A8397B1DCDAF


def test_negative_seed() -> None:
    assert hashed(-1) == hashed(2**64 - 1)


def test_any_subset_of_samples_has_the_same_numbers() -> None:
    whole = keys(20).uniform(FLIP, 5)
    some = Keys(0, 0, np.array([3, 17]), np.zeros(2, np.int64)).uniform(FLIP, 5)
    assert (whole[[3, 17]] == some).all()


def test_purpose_epoch_seed_and_repeat_give_other_numbers() -> None:
    base = keys(50).uniform(FLIP, 2)
    repeated = Keys(0, 0, np.arange(50), np.ones(50, np.int64))
    for other in (keys(50).uniform(CROP, 2), keys(50, epoch=1).uniform(FLIP, 2),
                  keys(50, seed=1).uniform(FLIP, 2), repeated.uniform(FLIP, 2)):  # fmt: skip
        assert not (base == other).any()


def test_uniform() -> None:
    u = keys(20_000).uniform(FLIP, 2)
    assert 0 <= u.min() <= u.max() < 1
    assert abs(u.mean() - 0.5) < 0.005
    assert abs(np.corrcoef(u.T)[0, 1]) < 0.02
    counts = np.histogram(u, 16, (0, 1))[0]
    assert (abs(counts / counts.mean() - 1) < 0.08).all()


def test_permutation() -> None:
    first, second = permutation(100, 0, 0), permutation(100, 0, 1)
    assert sorted(first) == sorted(second) == list(range(100))
    assert (first != second).any()
    # A change here would silently change what a resumed run sees.
    assert permutation(10, 42, 3).tolist() == [0, 5, 4, 2, 1, 6, 3, 8, 9, 7]


def test_device_normal_is_the_hash_and_normal() -> None:
    key = -(2**61) - 12345
    noise = device_normal(torch.tensor([key, 7]), 4000)
    bits = splitmix((key + 3 * GOLDEN) % 2**64)
    expected = np.sqrt(-2 * np.log(((bits & 0xFFFFFF) + 1) / 2**24)) * np.cos(2 * np.pi * (bits >> 40) / 2**24)
    assert abs(float(noise[0, 2]) - expected) < 1e-4
    assert abs(float(noise.mean())) < 0.03
    assert abs(float(noise.std()) - 1) < 0.03
    assert torch.isfinite(noise).all()


def test_host_normal() -> None:
    u = keys(20_000).uniform(FLIP, 2)
    noise = normal(u[:, 0], u[:, 1])
    assert abs(noise.mean()) < 0.03
    assert abs(noise.std() - 1) < 0.02
