"""Processes and devices, which Accelerate finds in the environment: how they meet, share statistics and leave, and when
a run is to end before its end."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import Any
from uuid import uuid4

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lrfdyn.errors import needs, require
from lrfdyn.training.config import RunConfig

PARENT = "LRFDYN_PARENT"  # the process that a run must not outlive
TIME_IS_UP = 1  # as a reason, beside the numbers of SIGINT (2) and SIGTERM (15)


def build_accelerator(run: RunConfig) -> Any:
    with needs("train: training needs Accelerate; pip install 'lrfdyn[train]'"):
        from accelerate import Accelerator, DistributedDataParallelKwargs
        from accelerate.state import AcceleratorState, PartialState
    on_gpu = torch.cuda.is_available() and run.device != "cpu"
    require(run.device != "cuda" or on_gpu, "run.device: expected a GPU for cuda, and there is none")
    require(run.precision != "fp16" or on_gpu, "run.precision: fp16 needs a GPU; take bf16 or fp32")
    # Accelerate keeps its settings for the life of the interpreter; a second run in it may want others.
    AcceleratorState._reset_state(PartialState().num_processes == 1 if PartialState._shared_state else False)
    # Synchronised norms have the same statistics everywhere, so that there is nothing to send before a step.
    how = DistributedDataParallelKwargs(broadcast_buffers=not run.sync_batchnorm, gradient_as_bucket_view=True)
    join_processes("cuda:nccl,cpu:gloo" if on_gpu else "gloo")
    mixed = run.precision if run.precision in ("bf16", "fp16") else "no"
    accelerator = Accelerator(mixed_precision=mixed, cpu=not on_gpu, kwargs_handlers=[how])
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
    # It would send the weights around, which all processes make alike, and stumbles over the statistics of norms.
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
    if store is not None:
        rank, processes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        fresh = dist.PrefixStore(fresh_prefix(store, rank, processes), store)
        dist.init_process_group(backend, store=fresh, rank=rank, world_size=processes)


def fresh_prefix(store: dist.Store, rank: int, processes: int) -> str:
    """A prefix of the store's keys, drawn by the first process, that the processes share and that none before them had.
    Only an answer to a request that was just drawn is known to come from the living."""
    drawn = uuid4().hex
    if rank > 0:
        store.set(f"lrfdyn/request/{rank}", drawn)
        prefix = store.get(f"lrfdyn/answer/{drawn}").decode()
        store.set(f"lrfdyn/received/{prefix}/{rank}", "")
        return prefix
    others = set(range(1, processes))
    while others:
        for other in others:  # a request may be a dead process's; then the living one asks later
            request = store.get(f"lrfdyn/request/{other}").decode()
            store.set(f"lrfdyn/answer/{request}", drawn)
        others = {other for other in others if not store.check([f"lrfdyn/received/{drawn}/{other}"])}
        time.sleep(0.02)
    return drawn


def leave_together(code: int = 0) -> None:
    """Ends this process of several, after its work is done, without the interpreter's clean-up: there the threads of
    torch's communication abort now and then, and torchrun takes that for a failed run."""
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
    values = [value] * processes
    if processes > 1:
        dist.all_gather_object(values, value)
    return values


def choose_threads(parameters: int) -> int:
    """How many threads a model of so many parameters trains with on a CPU: one where it is small, since its layers gain
    little from a second, and threads that wait for each other on a busy machine take ten times as long; else one for
    each core that is free."""
    cores, busy = torch.get_num_threads(), os.getloadavg()[0] if hasattr(os, "getloadavg") else 0
    return 1 if parameters < 10**6 else max(1, min(cores, round((os.cpu_count() or 1) - busy)))


class Stopped(Exception):  # noqa: N818 (nothing failed)
    """The run ended early, with a checkpoint. `code` is what the process exits with: 0 for a time that was set."""

    def __init__(self, step: int, steps: int, reason: int) -> None:
        why = "the time is up" if reason == TIME_IS_UP else signal.Signals(reason).name
        super().__init__(f"stopped at step {step} of {steps} ({why}); the same command with --resume auto goes on")
        self.code = 0 if reason == TIME_IS_UP else 128 + reason


class Stop:
    """When a run is to end early: after so many `minutes`, inside `listening` at a signal (Ctrl-C, or what a scheduler
    sends before it takes the machine away), or when the process is gone that the variable PARENT of the environment
    names. `reason` is 0 as long as it is to go on."""

    def __init__(self, minutes: float | None = None) -> None:
        require(minutes is None or minutes > 0, f"minutes: expected a positive number, got {minutes}")
        self.signal = 0
        self.parent = os.environ.get(PARENT)
        self.deadline = float("inf") if minutes is None else time.monotonic() + 60 * minutes

    @property
    def reason(self) -> int:
        if not self.signal and self.parent is not None and os.getppid() != int(self.parent):
            return signal.SIGTERM
        return self.signal or (TIME_IS_UP if time.monotonic() >= self.deadline else 0)

    @contextmanager
    def listening(self) -> Iterator[None]:
        def note(number: int, frame: FrameType | None) -> None:
            if self.signal == number == signal.SIGINT:
                raise KeyboardInterrupt  # asked twice: at once
            self.signal = number
            if number == signal.SIGINT and os.environ.get("RANK", "0") == "0":
                os.write(2, b"\nfinishing the step; press Ctrl-C again to stop now\n")  # whatever is being printed

        before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class _Normalize(torch.autograd.Function):
    """Normalises `[N, C, ...]` by the mean and variance over all processes. The gradients of scale and shift are this
    process's part: they are summed with all others."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        ctx.dtype = x.dtype
        x = x.to(weight.dtype)  # under autocast the input is half precise, and sums over a batch are not
        axes = [0, *range(2, x.dim())]
        sums = torch.cat((x.sum(axes), x.new_tensor([x.numel() / x.shape[1]])))
        dist.all_reduce(sums)
        count = sums[-1]
        mean = sums[:-1] / count
        centred = x - _as(mean, x)
        # A second round of communication, because E[x^2] - E[x]^2 cancels.
        squares = centred.square().sum(axes)
        dist.all_reduce(squares)
        variance = squares / count
        scale = (variance + eps).rsqrt()
        normal = centred * _as(scale, x)
        ctx.save_for_backward(normal, weight, scale, count)
        ctx.mark_non_differentiable(mean, variance, count)
        return (normal * _as(weight, x) + _as(bias, x)).to(ctx.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor, None]:  # type: ignore[override]
        normal, weight, scale, count = ctx.saved_tensors
        grad = grad.to(normal.dtype)
        axes = [0, *range(2, grad.dim())]
        bias_grad = grad.sum(axes)
        weight_grad = (grad * normal).sum(axes)
        sums = torch.stack((bias_grad, weight_grad))
        dist.all_reduce(sums)
        shift, along = (_as(part / count, grad) for part in sums)
        x_grad = _as(weight * scale, grad) * (grad - shift - normal * along)
        return x_grad.to(ctx.dtype), weight_grad, bias_grad, None


def _as(vector: Tensor, like: Tensor) -> Tensor:
    return vector.reshape(-1, *[1] * (like.dim() - 2))


class SyncBatchNorm2d(nn.BatchNorm2d):
    """`nn.BatchNorm2d` over `[B, C, H, W]` of every process, with the statistics of all of them, on any device. Torch's
    own is for GPUs only; there it is the faster one and is taken."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        y, mean, variance, count = _Normalize.apply(x, self.weight, self.bias, self.eps)
        statistics: Any = self.running_mean, self.running_var, self.num_batches_tracked
        with torch.no_grad():
            statistics[2].add_(1)
            momentum = self.momentum if self.momentum is not None else 1 / float(statistics[2])
            statistics[0].lerp_(mean, momentum)
            statistics[1].lerp_(variance * (count / (count - 1)), momentum)
        return y


def synchronize_norms(model: nn.Module, device: torch.device) -> None:
    """Every batch norm takes the statistics of all processes. Names and values stay, so checkpoints fit both."""
    if device.type == "cuda":
        nn.SyncBatchNorm.convert_sync_batchnorm(model)
        return
    for parent in list(model.modules()):
        for name, norm in parent.named_children():
            if type(norm) is nn.BatchNorm2d:
                synced = SyncBatchNorm2d(norm.num_features, norm.eps, norm.momentum)
                synced._parameters, synced._buffers = norm._parameters, norm._buffers
                setattr(parent, name, synced.train(norm.training))
