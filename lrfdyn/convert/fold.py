"""Batch norms folded into the weights before them, for inference."""

from __future__ import annotations

import copy

import torch
from torch import nn

from lrfdyn.attention.lrf_dyn import LRFDyn
from lrfdyn.attention.ssa import LocalReceptiveFields
from lrfdyn.checks import checked
from lrfdyn.errors import require
from lrfdyn.models.base import SpikingModel
from lrfdyn.nn.layers import ConvBN
from lrfdyn.nn.neurons import FoldedNorm, scale_and_shift


@torch.no_grad()
def fold_into(conv: nn.Conv2d, *norms: nn.BatchNorm2d) -> nn.Conv2d:
    """Changes `conv` so that it computes what it computed with `norms` behind it, in evaluation mode; returns it."""
    for norm in norms:
        scale, shift = scale_and_shift(norm)
        conv.weight.mul_(scale.reshape(-1, 1, 1, 1))
        conv.bias = nn.Parameter(shift if conv.bias is None else conv.bias * scale + shift)
    return conv


@torch.no_grad()
@checked
def fold_batch_norm(model: SpikingModel) -> SpikingModel:
    """A copy of `model`, which must be in evaluation mode, whose convolutions (stencils and the dendrites' read-out
    too) carry the scales and shifts of the norms behind them: the same function with fewer numbers."""
    require(not model.training, "model: expected evaluation mode (batch statistics cannot be folded)")
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, ConvBN) and type(module.bn) is nn.BatchNorm2d:
            fold_into(module.conv, module.bn)
            module.register_module("bn", FoldedNorm(module.bn))
        elif isinstance(module, LRFDyn | LocalReceptiveFields) and type(module.norm) is nn.BatchNorm2d:
            # Everything between the read-out and the norm is linear, and the gate by q multiplies.
            scale, shift = scale_and_shift(module.norm)
            weight = module.dendrites.weight if isinstance(module, LRFDyn) else module.weight
            weight.mul_(scale.reshape(-1, 1, 1))
            module.register_module("norm", FoldedNorm(module.norm, shift))
    return model
