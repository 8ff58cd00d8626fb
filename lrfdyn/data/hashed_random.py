"""Random numbers without a state: a number is a hash of what it is for, so any of them can be had in any order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# What a number is for. The values are part of the definition of every run: append, never renumber.
ORDER, CROP, FLIP, RAND_AUGMENT, ERASE, ERASE_NOISE, MIX, SHARD_ORDER, PHOTOMETRIC, EVENT_OPERATION = range(10)

GOLDEN = 0x9E3779B97F4A7C15
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # splitmix64 (Steele, Lea and Flood, 2014)
SIGNED = np.array((GOLDEN, *MULTIPLIERS), np.uint64).view(np.int64).tolist()  # the same bits, for torch
WORD = (1 << 64) - 1


def _finish(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(MULTIPLIERS[0])
    x = (x ^ (x >> np.uint64(27))) * np.uint64(MULTIPLIERS[1])
    return x ^ (x >> np.uint64(31))


def hashed(*words: int | np.ndarray) -> np.ndarray:
    """64 random bits for every combination of `words`, which broadcast; at least one-dimensional."""
    state = np.zeros(1, np.uint64)
    for word in words:
        # Arrays, because numpy warns of an overflow in scalars, and wrapping is what is wanted.
        value = np.array([word & WORD], np.uint64) if isinstance(word, int) else word.astype(np.uint64)
        state = _finish(state ^ _finish(value + np.uint64(GOLDEN)))
    return state


def normal(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Standard normal numbers of two uniform ones (Box and Muller)."""
    return np.sqrt(-2 * np.log1p(-first)) * np.cos(2 * np.pi * second)


def permutation(size: int, seed: int, epoch: int, purpose: int = ORDER) -> np.ndarray:
    return np.argsort(hashed(seed, epoch, purpose, np.arange(size)), kind="stable")


@dataclass(frozen=True)
class Keys:
    """The samples of a batch, as far as their random numbers are concerned."""

    seed: int
    epoch: int
    samples: np.ndarray
    repeats: np.ndarray

    def bits(self, purpose: int, *words: np.ndarray) -> np.ndarray:
        """64 random bits a sample, `[samples, 1]`; `[samples, n]` with `words` `[n]`."""
        return hashed(self.seed, self.epoch, purpose, self.samples[:, None], self.repeats[:, None], *words)

    def uniform(self, purpose: int, count: int) -> np.ndarray:
        """`[samples, count]` in [0, 1), in steps of 2^-53."""
        return (self.bits(purpose, np.arange(count)) >> np.uint64(11)) * 2.0**-53


def _shifted(x: Tensor, places: int) -> Tensor:
    """A shift that fills with zeros; torch's own repeats the sign."""
    return (x >> places) & ((1 << (64 - places)) - 1)


def device_normal(keys: Tensor, count: int) -> Tensor:
    """`[n, count]` standard normal float32 of `[n]` int64 keys, made where the keys are."""
    x = keys[:, None] + torch.arange(1, count + 1, device=keys.device) * SIGNED[0]
    x = (x ^ _shifted(x, 30)) * SIGNED[1]
    x = (x ^ _shifted(x, 27)) * SIGNED[2]
    x = x ^ _shifted(x, 31)
    low, high = (x & 0xFFFFFF), _shifted(x, 40)
    radius = torch.sqrt(-2 * torch.log((low + 1).float() * 2.0**-24))
    return radius * torch.cos(high.float() * (2 * torch.pi * 2.0**-24))
