"""One training step. On a GPU with fixed shapes it is captured as a CUDA graph, so that the host only says "again"."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

WARM_UP_STEPS = 3


class TrainStep:
    """`step(images, targets)` runs forward, backward and the optimiser, and returns the loss, still on the device.

    `amp` is autocast's type (None: off). With `graph`, the first call on a GPU runs a few throw-away steps, restores
    what they changed, and captures. Whatever a graph cannot hold runs eagerly: other shapes than the first (a smaller
    last batch), several processes, an optimiser that decides on the host. `captured` says which of the two it was, and
    `why_not` the reason. A learning rate that changes must be a tensor (`capturable_adamw` makes it one), or the graph
    would go on with the number it saw.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[[Tensor, Tensor], Tensor],
        *,
        amp: torch.dtype | None = None,
        graph: bool = True,
    ) -> None:
        self.model, self.optimizer, self.loss, self.amp = model, optimizer, loss, amp
        self.captured = False
        self.why_not = "" if graph else "not asked for"
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: tuple[Tensor, Tensor] | None = None
        self._loss: Tensor | None = None

    def __call__(self, images: Tensor, targets: Tensor) -> Tensor:
        if self._graph is None and not self.why_not:
            self.why_not = self._obstacle(images)
            if not self.why_not:
                self._capture(images, targets)
        if self._graph is not None and self._fits(images, targets):
            assert self._inputs is not None
            assert self._loss is not None
            self._inputs[0].copy_(images, non_blocking=True)
            self._inputs[1].copy_(targets, non_blocking=True)
            self._graph.replay()
            self.captured = True
            return self._loss
        self.captured = False
        return self._eager(images, targets)

    def _eager(self, images: Tensor, targets: Tensor) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        device = images.device.type
        # The cache of cast weights outlives a captured region; casting again costs little.
        with torch.autocast(device, self.amp, enabled=self.amp is not None, cache_enabled=False):
            loss = self.loss(self.model(images), targets)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def _obstacle(self, images: Tensor) -> str:
        if not images.is_cuda:
            return "not on a GPU"
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return "several processes"
        if self.amp == torch.float16:
            return "float16 needs a gradient scaler, which decides on the host"
        if not all(group.get("capturable", False) for group in self.optimizer.param_groups):
            return "the optimiser is not capturable"
        return ""

    def _fits(self, images: Tensor, targets: Tensor) -> bool:
        assert self._inputs is not None
        pairs = zip(self._inputs, (images, targets), strict=True)
        return all(a.shape == b.shape and a.dtype == b.dtype for a, b in pairs)

    def _capture(self, images: Tensor, targets: Tensor) -> None:
        self._inputs = (images.clone(), targets.clone())
        # On the host: a copy on the device would count in the peak of memory.
        before = {name: value.detach().to("cpu", copy=True) for name, value in self.model.state_dict().items()}
        moments = {p: {k: _copy(v) for k, v in state.items()} for p, state in self.optimizer.state.items()}
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_STEPS):
                self._eager(*self._inputs)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self._restore(before, moments)
        self.optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._loss = self._eager(*self._inputs)
        self._graph = graph

    @torch.no_grad()
    def _restore(self, before: dict[str, Tensor], moments: dict[Tensor, dict[str, Any]]) -> None:
        """Weights, statistics and the optimiser's state in place as before the warm-up: their memory must stay."""
        for name, value in self.model.state_dict().items():
            value.copy_(before[name])
        for parameter, state in self.optimizer.state.items():
            for name, value in state.items():
                if isinstance(value, Tensor):
                    # A state that the warm-up created starts at zero.
                    value.copy_(moments[parameter][name]) if parameter in moments else value.zero_()


def _copy(value: Any) -> Any:
    return value.to("cpu", copy=True) if isinstance(value, Tensor) else value


def capturable_adamw(model: nn.Module, lr: float, weight_decay: float = 0.05) -> torch.optim.AdamW:
    """AdamW whose steps can be captured on a GPU: one fused kernel, and a learning rate that is a tensor there."""
    parameters = list(model.parameters())
    if not parameters[0].is_cuda:
        return torch.optim.AdamW(parameters, lr=lr, weight_decay=weight_decay)
    rate = torch.tensor(lr, device=parameters[0].device)
    return torch.optim.AdamW(parameters, lr=rate, weight_decay=weight_decay, fused=True, capturable=True)
