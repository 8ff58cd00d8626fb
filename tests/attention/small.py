"""Small attentions in two kinds of host, which spike in training and in evaluation."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lrfdyn.attention import AttentionHost, create_attention
from lrfdyn.nn.neurons import LIF, IntegerSpike
from tests.conftest import random

DIM, HEADS = 8, 2


class Projection(nn.Module):
    """SN{BN(Conv1x1(x))} over `[T, B, C, H, W]`."""

    def __init__(self, c_in: int, c_out: int, neuron: nn.Module) -> None:
        super().__init__()
        self.conv = nn.Conv2d(c_in, c_out, 1, bias=False)
        self.bn = nn.BatchNorm2d(c_out)
        self.neuron = neuron

    def forward(self, x):
        return self.neuron(self.bn(self.conv(x.flatten(0, 1))).unflatten(0, x.shape[:2]))


def spikformer_like() -> AttentionHost:
    return AttentionHost(
        project=lambda a, b: Projection(a, b, LIF()),
        project_out=lambda a, b: Projection(a, b, LIF()),
        neuron=LIF,
        fire=lambda: LIF(threshold=0.5),
        scale=0.125,
    )


def sdt_v3_like() -> AttentionHost:
    """Integer spikes, and values four times as wide as queries and keys."""
    return AttentionHost(
        project=lambda a, b: Projection(a, b, IntegerSpike()),
        project_out=lambda a, b: Projection(a, b, nn.Identity()),
        neuron=IntegerSpike,
        fire=IntegerSpike,
        scale=0.3,
        value_ratio=4,
    )


HOSTS = {"spikformer": spikformer_like, "sdt_v3": sdt_v3_like}
FIVE = ["ssa", "causal_ssa", "vsa", "lrf_ssa", "lrf_dyn"]
KINDS = [*((kind, {}) for kind in FIVE), ("lrf_dyn", {"token": "qkv"})]


def kind_id(value):
    return "-".join(value.values()) if isinstance(value, dict) else value


hosts = pytest.mark.parametrize("host", HOSTS)
kinds = pytest.mark.parametrize(("kind", "options"), KINDS, ids=kind_id)


def build(kind, host="spikformer", grid=(3, 5), dim=DIM, heads=HEADS, seed=0, **options):
    """An attention in float64 with running statistics from a few passes, so that evaluation spikes too."""
    torch.manual_seed(seed)
    attention = create_attention(kind, dim, heads, grid, HOSTS[host](), **options).double()
    with torch.no_grad():
        for module in attention.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = None
                module.weight.fill_(2.0)
                module.bias.uniform_(0.2, 1.0)
        attention(images(4, 3, dim, grid, seed=seed + 7))
    return attention


def images(time, batch, dim, grid, seed=1):
    return random(time, batch, dim, *grid, seed=seed)
