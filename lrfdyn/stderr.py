"""The error stream of the process, for libraries that write to it past Python."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def discard_stderr() -> Iterator[None]:
    """Discards what is written to the error stream inside the context, by libraries in C too (a profiler's start and
    stop, parts that a processor lacks)."""
    kept = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
