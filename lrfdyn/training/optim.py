"""Optimisers, the learning rate's course, and the moving average of the weights."""

from __future__ import annotations

import itertools
import math
import warnings
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from lrfdyn.training.config import OptimizerConfig, ScheduleConfig

# That a step which could be captured was not: a few come before the capture.
NOT_CAPTURED = ".*without CUDA graph capture.*"
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # the polynomial of Jordan et al. (2024), five times
AS_LONG_AS_ADAMW = 0.2  # root mean square of an update of AdamW (Liu et al., 2025)


def adam_directions(optimizer: Optimizer, group: dict[str, Any], parameters: list[Any]) -> tuple[list[Tensor], Any]:
    """One step of Adam's moments of `parameters`: by how much each would move at a rate of 1, and the rate, a number or
    a tensor beside the weights. With `capturable` the count of steps is on the device, as the rate must be, and nothing
    is decided on the host: a CUDA graph can hold the step."""
    for parameter in parameters:
        if not optimizer.state[parameter]:
            count = torch.tensor(0.0, device=parameter.device if group["capturable"] else None)
            moments = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": count, **moments}
    states, grads = [optimizer.state[p] for p in parameters], [p.grad for p in parameters]
    counts, means, squares = ([s[key] for s in states] for key in ("step", "exp_avg", "exp_avg_sq"))
    torch._foreach_add_(counts, 1)
    (beta1, beta2), like = group["betas"], means[0]
    n: Any = counts[0].double() if group["capturable"] else counts[0].item()
    # The corrections of both moments and the rate: numbers, or tensors beside the weights.
    numbers = 1 - beta1**n, (1 - beta2**n) ** 0.5, group["lr"]
    first, second, rate = (x.to(like.device, like.dtype) if isinstance(x, Tensor) else x for x in numbers)
    torch._foreach_lerp_(means, grads, 1 - beta1)
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
    scale = torch._foreach_sqrt(squares)
    torch._foreach_div_(scale, second)
    torch._foreach_add_(scale, group["eps"])
    steps = torch._foreach_div(means, scale)
    torch._foreach_div_(steps, first)
    return list(steps), rate


class Lamb(Optimizer):
    """LAMB (You et al., 2020): Adam's direction, scaled per tensor to the norm of the weights. `trust_clip`: the scale
    is at most 1, as in LAMBC."""

    def __init__(
        self, params: Any, lr: float, betas: tuple[float, float], eps: float, trust_clip: bool, capturable: bool = False
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "trust_clip": trust_clip, "capturable": capturable}
        super().__init__(params, {**options, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if parameters:
                self._update(group, parameters)

    def _update(self, group: dict[str, Any], parameters: list[Any]) -> None:
        steps, rate = adam_directions(self, group, parameters)
        if group["weight_decay"]:
            torch._foreach_add_(steps, parameters, alpha=group["weight_decay"])
            # Tensors without decay (norms, biases) take Adam's step as it is, as in the usual implementations.
            for parameter, step in zip(parameters, steps, strict=True):
                weights, length = parameter.norm(), step.norm()
                trust = torch.where((weights > 0) & (length > 0), weights / length, 1.0)
                step.mul_(trust.clamp(max=1.0) if group["trust_clip"] else trust)
        torch._foreach_mul_(steps, rate)
        torch._foreach_sub_(parameters, steps)


class Muon(Optimizer):
    """Muon (Jordan et al., 2024) for the groups that have `matrices`, AdamW for the others. The gradient's momentum,
    as a matrix with a row for each output, is replaced by one with the same singular vectors and singular values near
    1, as long as an update of AdamW. torch.optim.Muon takes matrices only, one at a time, with a rate on the host; here
    those of one shape go together, and a CUDA graph can hold the step."""

    def __init__(
        self, params: Any, lr: float, betas: tuple[float, float], eps: float, momentum: float, capturable: bool = False
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "momentum": momentum, "capturable": capturable}
        super().__init__(params, {**options, "weight_decay": 0.0, "matrices": False})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if parameters:
                matrices = group["matrices"]
                steps, rate = (matrix_directions if matrices else adam_directions)(self, group, parameters)
                torch._foreach_mul_(parameters, 1 - rate * group["weight_decay"])
                torch._foreach_mul_(steps, rate)
                torch._foreach_sub_(parameters, steps)


def matrix_directions(optimizer: Optimizer, group: dict[str, Any], parameters: list[Any]) -> tuple[list[Tensor], Any]:
    """As `adam_directions`, of Muon: the momentum looks ahead as Nesterov's does."""
    for parameter in parameters:
        if not optimizer.state[parameter]:
            optimizer.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)}
    means, grads = [optimizer.state[p]["momentum_buffer"] for p in parameters], [p.grad for p in parameters]
    torch._foreach_lerp_(means, grads, 1 - group["momentum"])
    steps = list(torch._foreach_lerp(grads, means, group["momentum"]))
    # What is higher than wide is laid down, and comes together with those that are as wide.
    upright = [step.shape[0] > step[0].numel() for step in steps]
    wide = [step.flatten(1).mT if high else step.flatten(1) for step, high in zip(steps, upright, strict=True)]
    for shape in dict.fromkeys(matrix.shape for matrix in wide):
        chosen = [i for i, matrix in enumerate(wide) if matrix.shape == shape]
        stack = torch.stack([wide[i] for i in chosen])
        if isinstance(stack, DTensor):
            stack = stack.full_tensor()  # gathered once: the products of shards would be, each time
        stack = orthogonalize(stack) * (AS_LONG_AS_ADAMW * math.sqrt(shape[1]))
        for i, step in zip(chosen, stack, strict=True):
            steps[i] = in_shards_of(parameters[i], (step.mT if upright[i] else step).reshape(steps[i].shape))
    rate, like = group["lr"], parameters[0]
    return steps, rate.to(like.device, like.dtype) if isinstance(rate, Tensor) else rate


def in_shards_of(like: Tensor, whole: Tensor) -> Tensor:
    """`whole`, which every process has, in the shards of `like`; as it is where that is in none."""
    if not isinstance(like, DTensor):
        return whole
    everywhere = [Replicate()] * like.device_mesh.ndim
    return DTensor.from_local(whole, like.device_mesh, everywhere).redistribute(placements=like.placements)


def orthogonalize(stack: Tensor) -> Tensor:
    """For each matrix of `stack` `[n, rows, columns]`, none of which is higher than wide, one with the same singular
    vectors and with singular values near 1, by the iteration of Newton and Schulz: in bfloat16, which is enough for it,
    unless they are float64."""
    x = stack if stack.dtype == torch.float64 else stack.bfloat16()
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    a, b, c = NEWTON_SCHULZ
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.to(stack.dtype)


def matrices(model: nn.Module) -> set[Tensor]:
    """What Muon trains: the weights of linear layers and convolutions, not of grouped ones, and not the head's."""
    layers = [(name, m) for name, m in model.named_modules() if isinstance(m, (nn.Conv1d, nn.Conv2d, nn.Linear))]
    inner = [layer for name, layer in layers if name.partition(".")[0] != "head"]
    return {layer.weight for layer in inner if getattr(layer, "groups", 1) == 1}


def parameter_groups(model: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """With weight decay and without (norms, biases, what a module has in `without_weight_decay`); the head's apart, and
    so are the matrices of Muon, which decay at the pace of `learning_rate` whatever their own is."""
    spared = {getattr(m, name) for m in model.modules() for name in getattr(m, "without_weight_decay", ())}
    own = matrices(model) if config.name == "muon" else set()
    factors, decays = (1.0, config.head_rate), (config.weight_decay, 0.0)
    groups: dict[Any, list[Tensor]] = {key: [] for key in itertools.product(factors, (False, True))}
    chosen: list[Tensor] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            kept = parameter.dim() <= 1 or parameter in spared
            group = chosen if parameter in own else groups[factors[name.startswith("head.")], kept]
            group.append(parameter)
    faster = (config.muon_rate or config.learning_rate) / config.learning_rate
    muon = {"matrices": True, "weight_decay": config.weight_decay / faster, "rate_factor": faster}
    return [
        {"params": params, "weight_decay": decays[kept], **({} if factor == 1 else {"rate_factor": factor})}
        for (factor, kept), params in groups.items()
        if params
    ] + ([{"params": chosen, **muon}] if chosen else [])


def build_optimizer(model: nn.Module, config: OptimizerConfig, rate: float, capturable: bool = False) -> Optimizer:
    """`capturable`: the steps can be part of a CUDA graph, with learning rates that are tensors on the device."""
    groups = parameter_groups(model, config)
    device = next(model.parameters()).device
    if capturable:
        for group in groups:
            group["lr"] = torch.tensor(rate, device=device)
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=rate, momentum=config.momentum, fused=capturable)
    if config.name == "lamb":
        return Lamb(groups, rate, config.betas, config.eps, config.trust_clip, capturable)
    if config.name == "muon":
        return Muon(groups, rate, config.betas, config.eps, config.momentum, capturable)
    # On a CPU, where nothing is captured, AdamW refuses the word.
    graph = {"fused": True, "capturable": device.type == "cuda"} if capturable else {}
    return torch.optim.AdamW(groups, lr=rate, betas=config.betas, eps=config.eps, **graph)


@contextmanager
def without_warning(message: str) -> Iterator[None]:
    """Python's warnings that match `message` are not shown."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=message)
        yield


def rate_at(schedule: ScheduleConfig, base_rate: float, epoch: float) -> float:
    """The learning rate after `epoch` epochs, a fraction within one."""
    if schedule.rates:
        after = bisect_right(schedule.rates, epoch, key=lambda knot: knot[0])
        (start, share), (end, then) = schedule.rates[after - 1], schedule.rates[min(after, len(schedule.rates) - 1)]
        return base_rate * (share + (then - share) * (epoch - start) / (end - start) if end > start else share)
    if epoch < schedule.warmup_epochs:
        return schedule.warmup_rate + (base_rate - schedule.warmup_rate) * epoch / schedule.warmup_epochs
    if epoch >= schedule.epochs:
        return schedule.minimum_rate
    if schedule.decay == "poly":
        share = ((schedule.epochs - epoch) / (schedule.epochs - schedule.warmup_epochs)) ** schedule.power
    else:
        # timm's cosine runs from the first epoch and is entered where the warm-up ends; MAE's begins there.
        start = schedule.warmup_epochs if schedule.cosine == "after_warmup" else 0
        share = (1 + math.cos(math.pi * (epoch - start) / (schedule.epochs - start))) / 2
    return schedule.minimum_rate + (base_rate - schedule.minimum_rate) * share


def set_rate(optimizer: Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        own = rate * group.get("rate_factor", 1.0)
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(own)
        else:
            group["lr"] = own


class MovingAverage:
    """An exponential moving average of parameters and statistics. It lives beside the model, shard by shard where the
    parameters are sharded, and takes the model's place inside `swapped()`."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay, self.model = decay, model
        self.values = [tensor.detach().clone() for tensor in self.live()]

    @torch.no_grad()
    def live(self) -> list[Tensor]:
        """The model's own tensors; of those that are sharded, this process's part."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        return [t.to_local() if isinstance(t, DTensor) else t for t in tensors]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Behind the `step`-th step of the run. Early in it the decay is less: with the whole of it, 0.9998 would still
        hold nearly half of the untrained network after 4,000 steps."""
        decay = min(self.decay, (1 + step) / (10 + step))
        pairs = list(zip(self.values, self.live(), strict=True))
        floating = [(a, b) for a, b in pairs if a.is_floating_point()]
        torch._foreach_lerp_([a for a, _ in floating], [b for _, b in floating], 1 - decay)
        counts = [(a, b) for a, b in pairs if not a.is_floating_point()]
        if counts:
            torch._foreach_copy_([a for a, _ in counts], [b for _, b in counts])

    @contextmanager
    def swapped(self) -> Iterator[None]:
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # a test leaves some whole for the backward pass that would follow
        for average, value in zip(self.values, self.live(), strict=True):
            kept = value.detach().clone()
            value.copy_(average)
            average.copy_(kept)
