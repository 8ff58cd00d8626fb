"""Small attentions in two kinds of host, which spike in training and in evaluation."""

from __future__ import annotations

import itertools

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
NORM = {"dilations": (1, 3), "norm": True, "scale_lrf": True}
KINDS = [
    *((kind, {}) for kind in FIVE),
    ("lrf_dyn", {"token": "qkv"}),
    ("lrf_dyn", {"directions": 2}),
    ("lrf_dyn", {"coupling": "same"}),
    ("lrf_ssa", NORM),
]


def kind_id(value):
    return "norm" if value is NORM else "-".join(map(str, value.values())) if isinstance(value, dict) else value


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


# --- mixing matrices


def mixing_weights(attention, x, block=2**24):
    """What a layer says of itself as one matrix `[B or 1, N, N]`, added up over the time steps."""
    with torch.no_grad():
        spikes = dict(zip(attention.projections, attention.project(x), strict=True))
        blocks = list(attention.mixing_weights(spikes, tuple(x.shape[3:]), block))
    assert [i for queries, _ in blocks for i in queries] == list(range(x.shape[3] * x.shape[4]))
    return torch.cat([weights for _, weights in blocks], 1)


@torch.no_grad()
def dense_weights(attention, x):
    """The same from whole matrices per channel `[T, B, C, N, N]`, for every time step."""
    kind, grid = type(attention).__name__, tuple(x.shape[3:])
    channels, heads = attention.value_dim, attention.heads
    local = stencil_matrix(attention.lrf, grid) if hasattr(attention, "lrf") else 0.0
    if norm := getattr(getattr(attention, "lrf", None), "norm", None):
        local = local * (norm.weight / torch.sqrt(norm.running_var + norm.eps))[:, None, None]
    local = local * getattr(attention, "lrf_scale", 1.0)
    if kind == "LRFDyn":
        kernel = attention.dendrites.kernel(grid)
        there, back = kernel if kernel.dim() == 3 else (kernel, 0 * kernel)
        lag = torch.arange(len(there)).unsqueeze(1) - torch.arange(len(there))
        dendrites = torch.where(lag >= 0, there.T[:, lag.clamp(min=0)], 0.0)
        dendrites = dendrites + torch.where(lag <= 0, back.T[:, (-lag).clamp(min=0)], 0.0)
        return (dendrites + local @ dendrites).abs().mean(0).expand(*x.shape[:2], -1, -1)
    q, k, v = (s.flatten(3) for s in attention.project(x))
    if kind == "SDSA":
        given = k.repeat_interleave(channels // attention.dim, 2) * v
        return given.abs().mean(2).unsqueeze(2).expand(-1, -1, given.shape[3], -1)
    pairs = zip(q.chunk(heads, 2), k.chunk(heads, 2), strict=True)
    scores = torch.stack([torch.einsum("tbcn,tbcm->tbnm", *pair) for pair in pairs], 2)
    if kind == "VSA":
        scores = (scores * (attention.dim // heads) ** -0.5).softmax(-1)
    else:
        scores = attention.scale * (scores.tril() if kind == "CausalSSA" else scores)
    return (scores.repeat_interleave(channels // heads, 2) + local).abs().mean(2)


def stencil_matrix(lrf, grid):
    """Local receptive fields as `[C, N, N]`: row = output token, column = input token."""
    n = grid[0] * grid[1]
    weight = lrf.weight.detach()
    matrix = weight.new_zeros(weight.shape[1], n, n)
    for stencil, d in zip(weight, lrf.dilations, strict=True):
        for i, j, a, b in itertools.product(range(grid[0]), range(grid[1]), range(3), range(3)):
            y, x = i + (a - 1) * d, j + (b - 1) * d
            if 0 <= y < grid[0] and 0 <= x < grid[1]:
                matrix[:, i * grid[1] + j, y * grid[1] + x] += stencil[:, a, b]
    return matrix
