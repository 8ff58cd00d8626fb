"""Batches that worker processes make, in the order in which they are wanted, and copies to the device."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lrfdyn.errors import LrfdynError

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_workers: WeakSet[Any] = WeakSet()


def to_device(array: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """A copy that the host does not wait for (which it would for memory that is not pinned)."""
    tensor = torch.as_tensor(array)
    if device.type != "cuda":
        return tensor.to(device)
    return (tensor if tensor.is_pinned() else tensor.pin_memory()).to(device, non_blocking=True)


def load_in_order(load: Callable[..., Any], items: Sequence[Any], workers: int, device: torch.device) -> Iterator[Any]:
    """`load(item)`, a whole batch, for every item, by `workers` processes, at most one a core; 0: this one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    batches: DataLoader[Any] = DataLoader(
        items,  # type: ignore[arg-type]
        batch_size=None,
        collate_fn=partial(_load, load),
        num_workers=min(workers, len(items), cores),
        pin_memory=device.type == "cuda",
        worker_init_fn=_start_worker,
        generator=torch.Generator(),  # it would draw from the global one, which belongs to the model
    )
    others = set(multiprocessing.active_children())
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until the workers have their own way with them
    try:
        iterator = iter(batches)
        _workers.update(set(multiprocessing.active_children()) - others)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    for batch in iterator:
        if isinstance(batch, LrfdynError):
            raise batch
        yield batch


def load_parts(load: Callable[..., Any], count: int, together: int, workers: int | None) -> Iterator[Any]:
    """`load(numbers)` for the numbers 0..count - 1 in parts of at most `together`, by `workers` processes (None: one a
    core)."""
    parts = np.split(np.arange(count), range(together, count, together))
    workers = (os.cpu_count() or 1) if workers is None else workers
    return load_in_order(load, parts, workers if len(parts) > 1 else 0, torch.device("cpu"))


def _load(load: Callable[..., Any], item: Any) -> Any:
    """An error of a worker process would be told with its traceback; a returned one is raised by the run."""
    try:
        return load(item)
    except LrfdynError as error:
        return error


@atexit.register
def _end_workers() -> None:
    """Where an error ends the program in an epoch: the workers leave the first request to end to the run."""
    for worker in list(_workers):
        while worker.is_alive():
            worker.terminate()
            worker.join(0.1)


def _start_worker(worker: int) -> None:
    """A worker ends with the run, however that ends: one with a large result would wait for a reader without end, and
    keep the locks that the run had."""
    # The parent is the run, or the server that forks for it and ends with it.
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    _leave_signals_to_the_run()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _leave_signals_to_the_run() -> None:
    """Ctrl-C, and a scheduler that wants the machine back, signal all processes at once. The run needs its data to
    come to a checkpoint, and ends its workers itself; they end too where it is gone."""

    def first(*_: Any) -> None:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # again: from the run, which insists

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, first)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
