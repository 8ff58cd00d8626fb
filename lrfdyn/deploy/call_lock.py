"""One call at a time, for modules that carry a state from row to row or piece to piece: threads would mix it up."""

from __future__ import annotations

from threading import RLock


class CallLock:
    """A lock for a `with` block, which the thread that has it may take again. A copy of it, also one out of a file, is
    a new lock, so that copies of its owner do not wait for each other."""

    def __init__(self) -> None:
        self._lock = RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[type[CallLock], tuple[()]]:
        return CallLock, ()
