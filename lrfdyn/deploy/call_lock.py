"""One call at a time, for modules that carry a state from row to row or piece to piece: threads would mix it up."""

from __future__ import annotations

from threading import RLock


class CallLock:
    """Copies of its owner, also those in files, get a lock of their own."""

    def __init__(self) -> None:
        self._lock = RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[type[CallLock], tuple[()]]:
        return CallLock, ()
