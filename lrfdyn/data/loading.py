"""Batches that worker processes make, in the order in which they are wanted."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def load_in_order(loader: Dataset, wanted: Sequence[Any], workers: int, device: torch.device) -> Iterator[Any]:
    """`loader[item]` for every item of `wanted`; an element is a whole batch. 0 workers: this process."""
    batches = DataLoader(
        loader,
        batch_size=None,
        sampler=wanted,  # type: ignore[arg-type]
        num_workers=min(workers, len(wanted)),
        pin_memory=device.type == "cuda",
        collate_fn=_as_it_is,
        worker_init_fn=_leave_signals_to_the_run,
        generator=torch.Generator(),  # it would draw from the global one, which belongs to the model
    )
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until the workers have their own way with them
    try:
        iterator = iter(batches)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    yield from iterator


def _as_it_is(batch: Any) -> Any:
    return batch


def _leave_signals_to_the_run(worker: int) -> None:
    """Ctrl-C, and a scheduler that wants the machine back, signal all processes at once. The run needs its data to
    come to a checkpoint, and ends its workers itself; they end too where it is gone."""

    def first(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # again: from the run, which insists

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, first)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
