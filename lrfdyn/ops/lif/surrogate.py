"""Surrogate derivatives of the Heaviside step, by name: what stands in for dS/dU at the threshold."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lrfdyn.errors import unknown_name


def sigmoid(x: Tensor, alpha: float) -> Tensor:
    p = torch.sigmoid(alpha * x)
    return alpha * p * (1 - p)


def atan(x: Tensor, alpha: float) -> Tensor:
    return (alpha / 2) / (1 + (math.pi / 2 * alpha * x).square())


def rectangle(x: Tensor, alpha: float) -> Tensor:
    """Height alpha inside a window of width 1/alpha."""
    return alpha * (x.abs() < 0.5 / alpha).to(x.dtype)


SURROGATES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "sigmoid": sigmoid,
    "atan": atan,
    "rectangle": rectangle,
}


def surrogate_derivative(name: str, x: Tensor, alpha: float) -> Tensor:
    """dS/dU at the distance `x = U - V_th` from the threshold."""
    if name not in SURROGATES:
        raise unknown_name("surrogate", name, SURROGATES)
    return SURROGATES[name](x, alpha)


def surrogate_backward(name: str, grad: Tensor, x: Tensor, alpha: float) -> Tensor:
    """`grad` times the derivative at `x`, in a fresh tensor; `x` may be overwritten."""
    if name == "sigmoid":
        p = x.mul_(alpha).sigmoid_()
        return torch.ops.aten.sigmoid_backward(grad, p).mul_(alpha)
    return surrogate_derivative(name, x, alpha).mul_(grad)
