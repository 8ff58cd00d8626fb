"""Processes and devices: Accelerate finds out from the environment how many there are and how they talk."""

from __future__ import annotations

import os
import random
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from uuid import uuid4

import numpy as np
import torch
import torch.distributed as dist

from lrfdyn.errors import LrfdynError, require
from lrfdyn.training.config import RunConfig

PRECISIONS = {"fp32": "no", "fp64": "no", "bf16": "bf16", "fp16": "fp16"}


def build_accelerator(run: RunConfig) -> Any:
    try:
        from accelerate import Accelerator, DistributedDataParallelKwargs
        from accelerate.state import AcceleratorState, PartialState
    except ImportError:
        raise LrfdynError("train: training needs Accelerate; pip install 'lrfdyn[train]'") from None
    on_gpu = torch.cuda.is_available() and run.device != "cpu"
    require(run.device != "cuda" or on_gpu, "run.device: expected a GPU for cuda, and there is none")
    require(run.precision != "fp16" or on_gpu, "run.precision: fp16 needs a GPU; take bf16 or fp32")
    # Accelerate keeps its settings for the life of the interpreter; a second run in it may want others.
    AcceleratorState._reset_state(PartialState().num_processes == 1 if PartialState._shared_state else False)
    # Synchronised norms have the same statistics everywhere, so that there is nothing to send before a step.
    distributed = DistributedDataParallelKwargs(
        broadcast_buffers=not run.sync_batchnorm, gradient_as_bucket_view=True
    )  # fmt: skip
    join_processes("cuda:nccl,cpu:gloo" if on_gpu else "gloo")
    accelerator = Accelerator(mixed_precision=PRECISIONS[run.precision], cpu=not on_gpu, kwargs_handlers=[distributed])
    sharding = getattr(accelerator.state, "fsdp_plugin", None)
    if sharding is not None:
        keep_numbers(sharding, run)
    return accelerator


def keep_numbers(sharding: Any, run: RunConfig) -> None:
    """Changes what Accelerate does when it shards, so that a run's numbers are those of one that is not sharded."""
    version = sharding.fsdp_version
    require(version == 2, f"accelerate: expected --fsdp_version 2 beside --use_fsdp, got {version}")
    require(run.sync_batchnorm, "run.sync_batchnorm: expected true beside --use_fsdp, which sends no statistics around")
    # It would hold all weights in half precision, norms included. Autocast halves where it does so elsewhere.
    sharding.mixed_precision_policy = None
    # It would send the first process's weights to the others, and stumbles over the statistics of norms. All processes
    # make the same weights anyway.
    sharding.cpu_ram_efficient_loading = False


def agent_store() -> dist.Store | None:
    """That of torchrun, which lives as long as the launch, its restarts included; None where there is none to share."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(address, port, is_master=False, timeout=timedelta(minutes=30))  # as torch waits for processes


def launch_name() -> str:
    """The same in all restarts of one launch by torchrun, and in no other launch; empty where none can be told."""
    store = agent_store()
    return "" if store is None else store.compare_set("lrfdyn/launch", "", uuid4().hex).decode()


def join_processes(backend: str) -> None:
    """torchrun's store outlives a restart and still holds the addresses of the dead processes, so the new ones meet
    under a name of their own. It cannot be the number of the restart: nodes count their own failures only."""
    store = None if dist.is_initialized() else agent_store()
    if store is None:
        return
    rank, processes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    fresh = dist.PrefixStore(fresh_prefix(store, rank, processes), store)
    dist.init_process_group(backend, store=fresh, rank=rank, world_size=processes)


def fresh_prefix(store: dist.Store, rank: int, processes: int) -> str:
    """A prefix of the store's keys that the processes have in common and that none before them had: the first process
    draws it. Of what is in the store, only an answer to a request that was just drawn is known to come from the
    living."""
    drawn = uuid4().hex
    if rank > 0:
        store.set(f"lrfdyn/request/{rank}", drawn)
        prefix = store.get(f"lrfdyn/answer/{drawn}").decode()
        store.set(f"lrfdyn/received/{prefix}/{rank}", "")
        return prefix
    others = set(range(1, processes))
    while others:
        for other in others:
            request = store.get(
                f"lrfdyn/request/{other}"
            ).decode()  # perhaps of a dead process; then the living one asks later
            store.set(f"lrfdyn/answer/{request}", drawn)
        others = {other for other in others if not store.check([f"lrfdyn/received/{drawn}/{other}"])}
        time.sleep(0.02)
    return drawn


def leave_together(code: int = 0) -> None:
    """Ends this process of several, after its work is done, without the interpreter's clean-up: there the threads of
    torch's communication abort now and then ("terminate called without an active exception"), and torchrun takes that
    for a failed run."""
    sys.stdout.flush()
    sys.stderr.flush()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        os._exit(code)


def seed_generators(seed: int, rank: int) -> None:
    mixed = seed * 1_000_003 + rank
    torch.manual_seed(mixed)
    random.seed(mixed)
    np.random.seed(mixed % 2**32)


def gather(value: Any, processes: int) -> list[Any]:
    """`value` of every process, in order."""
    if processes == 1:
        return [value]
    values: list[Any] = [None] * processes
    dist.all_gather_object(values, value)
    return values


@contextmanager
def quiet_layouts() -> Iterator[None]:
    """Without torch's warning that gradients are laid out otherwise than their weights: those of 1x1 kernels are said
    to be channels-last, which is the same memory."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*[Gg]rad strides do not match")
        yield
