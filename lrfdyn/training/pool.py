"""Independent runs side by side, one process and one thread each, with live news and a clean end on Ctrl-C."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from lrfdyn.errors import LrfdynError

# (index of the job, "news" | "done" | "error", what the job said)
Event = tuple[int, str, Any]
Job = Callable[..., Any]


def _worker(function: Job, jobs: Any, events: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that open files are cleaned up
    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()
    for index, arguments in iter(jobs.get, None):

        def news(item: Any, index: int = index) -> None:
            if parent is not None and not parent.is_alive():
                sys.exit(1)  # nobody waits for the result any more
            events.put((index, "news", item))

        try:
            events.put((index, "done", function(*arguments, news=news)))
        except LrfdynError as error:
            events.put((index, "error", str(error)))
        except Exception as error:
            events.put((index, "error", f"worker: {type(error).__name__}: {error}"))


def run_jobs(function: Job, arguments: Sequence[tuple[Any, ...]], workers: int) -> Iterator[Event]:
    """Calls `function(*arguments[i], news=callback)` for every i and yields what happens. Jobs are run with one thread
    whatever the number of workers, so that their results do not depend on it."""
    # Without this glibc gives large tensors back to the system after every operation and faults them in again.
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(2**30))
    os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(2**31))
    context = multiprocessing.get_context("spawn")
    jobs, events = context.Queue(), context.Queue()
    for item in [*enumerate(arguments), *[None] * workers]:
        jobs.put(item)
    processes = [context.Process(target=_worker, args=(function, jobs, events), daemon=True) for _ in range(workers)]
    for process in processes:
        process.start()
    open_jobs = len(arguments)
    try:
        while open_jobs:
            try:
                event: Event = events.get(timeout=0.5)
            except queue.Empty:
                dead = [p for p in processes if p.exitcode not in (None, 0)]
                if dead:
                    raise LrfdynError(f"workers: a worker process died (exit code {dead[0].exitcode})") from None
                continue
            if event[1] == "error":
                raise LrfdynError(event[2])
            open_jobs -= event[1] == "done"
            yield event
    finally:
        for process in processes:
            if open_jobs:
                process.terminate()
            process.join()
