"""Batch norm whose statistics are those of the whole batch, over all processes, on any device.

PyTorch's own SyncBatchNorm runs on GPUs only; there it is the faster one and is taken.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn


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
    """`nn.BatchNorm2d` over `[B, C, H, W]` of every process, with the statistics of all of them."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.running_mean is None or self.running_var is None:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        momentum = self.momentum if self.momentum is not None else 1 / float(self.num_batches_tracked)
        y, mean, variance, count = _Normalize.apply(x, self.weight, self.bias, self.eps)
        with torch.no_grad():
            self.running_mean.lerp_(mean, momentum)
            self.running_var.lerp_(variance * (count / (count - 1)), momentum)
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
