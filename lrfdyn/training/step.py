"""One training step. On a GPU with fixed shapes it is captured as a CUDA graph, so that the host only says "again"."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lrfdyn.errors import LrfdynError, first_line
from lrfdyn.training.optim import NOT_CAPTURED, without_warning

WARM_UP_STEPS = 3
Part = tuple[Tensor, Tensor]  # images and targets


class TrainStep:
    """`step((images, targets))` runs forward, backward and the optimiser, and returns the loss, still on the device (of
    a graph always the same tensor, which the next step overwrites).

    `amp` is autocast's type (None: off), `clip_norm` the longest gradient, `scaler` a GradScaler for float16. With
    `graph`, the first call on a GPU runs a few throw-away steps, restores what they changed, and captures. Whatever a
    graph cannot hold runs eagerly: other shapes than the first, and what `capture_obstacle` names. `captured` says
    which of the two it was, and `why_not` the reason. A learning rate that changes must be a tensor
    (`capturable_adamw` makes it one). With `accelerator`, model and optimiser are those that it prepared, `amp`,
    `scaler` and `graph` are its affair, and `step(part, part, ...)` accumulates the gradients of parts of a batch."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss: Callable[[Tensor, Tensor], Tensor],
        *,
        amp: torch.dtype | None = None,
        graph: bool = True,
        clip_norm: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
        accelerator: Any = None,
    ) -> None:
        self.model, self.optimizer, self.loss, self.amp = model, optimizer, loss, amp
        self.clip_norm, self.accelerator = clip_norm, accelerator
        self.scaler = scaler if accelerator is None else accelerator.scaler
        self.captured = False
        self.why_not = "" if graph and accelerator is None else "not asked for"
        self._graph: tuple[torch.cuda.CUDAGraph, Part, Tensor] | None = None  # with its inputs and its loss

    def __call__(self, *parts: Part) -> Tensor:
        if self.accelerator is not None:
            return self._accelerated(parts)
        (part,) = parts
        if self._graph is None and not self.why_not:
            self.why_not = capture_obstacle(part[0].device, self.optimizer, self.amp, self.scaler is not None)
            if not self.why_not:
                self._capture(part)
        if self._graph is not None:
            graph, inputs, loss = self._graph
            self.captured = all(a.shape == b.shape and a.dtype == b.dtype for a, b in zip(inputs, part, strict=True))
            if self.captured:
                for held, given in zip(inputs, part, strict=True):
                    held.copy_(given, non_blocking=True)
                graph.replay()
                return loss
        return self._eager(*part)

    def _accelerated(self, parts: Sequence[Part]) -> Tensor:
        self.optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64, device=parts[0][0].device)
        for i, (images, targets) in enumerate(parts):
            # Gradients travel once per step, with the last part.
            with nullcontext() if i + 1 == len(parts) else self.accelerator.no_sync(self.model):
                with self.accelerator.autocast():
                    logits = self.model(images)
                loss = self.loss(logits.to(images.dtype), targets) / len(parts)
                self.accelerator.backward(loss)
            total += loss.detach()
        if self.clip_norm is not None:
            self.accelerator.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        self.optimizer.step()
        return total

    def _eager(self, images: Tensor, targets: Tensor) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        # The cache of cast weights outlives a captured region; casting again costs little.
        with torch.autocast(images.device.type, self.amp, enabled=self.amp is not None, cache_enabled=False):
            loss = self.loss(self.model(images), targets)
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        if self.clip_norm is not None:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            # The norm stays on the device: asking whether it is finite would be waiting for it.
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm, error_if_nonfinite=False)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return loss.detach()

    def _capture(self, part: Part) -> None:
        inputs, device = (part[0].clone(), part[1].clone()), part[0].device
        # On the host: a copy on the device would count in the peak of memory.
        weights = {name: value.detach().to("cpu", copy=True) for name, value in self.model.state_dict().items()}
        moments = {key: value.to("cpu", copy=True) for key, value in self._moments().items()}
        scale = None if self.scaler is None else self.scaler.state_dict()
        drawn = torch.cuda.get_rng_state(device)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), without_warning(NOT_CAPTURED):
            for _ in range(WARM_UP_STEPS):
                self._eager(*inputs)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        # Everything in place as before the warm-up: its memory must stay.
        with torch.no_grad():
            for name, value in self.model.state_dict().items():
                value.copy_(weights[name])
            for key, value in self._moments().items():
                value.copy_(moments[key]) if key in moments else value.zero_()  # those that the warm-up created
        if self.scaler is not None and scale is not None:
            self.scaler.load_state_dict(scale)
        torch.cuda.set_rng_state(drawn, device)
        self.optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                loss = self._eager(*inputs)
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError as error:
            hint = "--run.cuda_graph off runs it without"
            raise LrfdynError(f"cuda_graph: the step cannot be captured ({first_line(error)}); {hint}") from error
        self._graph = graph, inputs, loss

    def _moments(self) -> dict[tuple[Tensor, str], Tensor]:
        states = self.optimizer.state.items()
        return {(p, name): v for p, state in states for name, v in state.items() if isinstance(v, Tensor)}


def capture_obstacle(
    device: torch.device,
    optimizer: Optimizer,
    amp: torch.dtype | None,
    scaled: bool,
    wanted: bool = True,
    parts: int = 1,
) -> str:
    """Why a step on `device` with this optimiser is not captured as a CUDA graph; empty where it is. `scaled`: its
    gradients go through a scaler; `parts`: they are accumulated over so many."""
    # SGD has no option `capturable`: its fused form is the one that takes a tensor as rate.
    ready = [isinstance(g["lr"], Tensor) and g.get("capturable", g.get("fused")) for g in optimizer.param_groups]
    on_host = scaled and not getattr(optimizer, "_step_supports_amp_scaling", False)
    obstacles = {
        "run.cuda_graph is off": not wanted,
        "not on a GPU": device.type != "cuda",
        # Also torchrun's group of one process: its communication watches the device, which a capture forbids.
        "several processes": torch.distributed.is_initialized(),
        "gradients are accumulated": parts > 1,
        "the optimiser is not capturable": not all(ready),
        "float16 needs a gradient scaler": amp == torch.float16 and not scaled,
        f"{type(optimizer).__name__} with a gradient scaler decides on the host": on_host,
    }
    return next((obstacle for obstacle, holds in obstacles.items() if holds), "")


def capturable_adamw(model: nn.Module, lr: float, weight_decay: float = 0.05) -> torch.optim.AdamW:
    """AdamW whose steps can be captured on a GPU: one fused kernel, and a learning rate that is a tensor there."""
    device = next(model.parameters()).device
    gpu = device.type == "cuda"
    rate = torch.tensor(lr, device=device) if gpu else lr
    return torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=weight_decay, fused=gpu, capturable=gpu)
