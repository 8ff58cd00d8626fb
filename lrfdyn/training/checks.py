"""Ranges that numbers of a configuration have."""

from __future__ import annotations

import math
from typing import Any

from lrfdyn.errors import require


def positive(section: str, config: Any, *keys: str) -> None:
    for key in keys:
        value = getattr(config, key)
        require(value is None or 0 < value < math.inf, f"{section}.{key}: expected a positive number, got {value}")


def not_negative(section: str, config: Any, *keys: str) -> None:
    for key in keys:
        value = getattr(config, key)
        require(0 <= value < math.inf, f"{section}.{key}: expected a number >= 0, got {value}")


def share(section: str, config: Any, *keys: str) -> None:
    for key in keys:
        value = getattr(config, key)
        require(value is None or 0 <= value < 1, f"{section}.{key}: expected a number in [0, 1), got {value}")
