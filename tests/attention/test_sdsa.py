"""SDSA against its definition."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from lrfdyn.attention import SDSA, AttentionHost, create_attention
from lrfdyn.models.sdt_v1 import ATTENTION_HOST
from lrfdyn.nn.neurons import LIF
from tests.attention.small import mixing_weights


def busy(attn: nn.Module) -> nn.Module:
    """In float64, with batch norms that make about a third of the neurons fire."""
    for module in attn.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.constant_(module.weight, 4.0)
    return attn.double()


def host_with_maxima(ratio: int = 1) -> AttentionHost:
    return replace(ATTENTION_HOST, value_ratio=ratio, window_maxima=True)


def spikes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 2, shape).double()


@pytest.mark.parametrize("ratio", [1, 4])
@pytest.mark.parametrize("time_steps", [1, 3])
def test_one_gate_per_channel(time_steps, ratio):
    torch.manual_seed(0)
    host = replace(ATTENTION_HOST, value_ratio=ratio)
    attn = busy(create_attention("sdsa", 8, 2, (3, 5), host))
    x = spikes(time_steps, 2, 8, 3, 5)
    q, k, v = attn.project(x)
    fired = torch.zeros_like(v)
    for c in range(8 * ratio):
        total = sum(k[:, :, c // ratio, i, j] * v[:, :, c, i, j] for i in range(3) for j in range(5))
        fired[:, :, c] = q[:, :, c // ratio] * LIF(threshold=0.5)(total)[..., None, None]
    assert 0 < fired.mean() < 0.5
    assert torch.equal(attn(x), attn.proj(fired))


@pytest.mark.parametrize("ratio", [1, 2])
def test_window_maxima(ratio):
    """Against windows that are cut out one by one: on the grid of each channel, then over tokens and channels."""
    torch.manual_seed(0)
    heads, height, width = 2, 3, 5
    attn = busy(create_attention("sdsa", 8, heads, (height, width), host_with_maxima(ratio)))
    x = spikes(2, 3, 8, height, width)
    q, k, v = attn.project(x)

    def over(y):
        rows, columns = y.shape[-2:]
        windows = [y[..., max(i - 1, 0) : i + 2, max(j - 1, 0) : j + 2] for i in range(rows) for j in range(columns)]
        return torch.stack([window.amax((-2, -1)) for window in windows], -1).reshape(y.shape)

    def over_tokens(y):
        tokens = y.flatten(3).transpose(2, 3)  # [T, B, N, C]
        return torch.cat([over(head) for head in tokens.chunk(heads, 3)], 3).transpose(2, 3).reshape(y.shape)

    k, q = over(k).repeat_interleave(ratio, 2), q.repeat_interleave(ratio, 2)
    products = over_tokens(k * over(v))
    fired = over_tokens(q * LIF(threshold=0.5)(products.sum((3, 4), keepdim=True)))
    assert (q * LIF(threshold=0.5)((k * v).sum((3, 4), keepdim=True))).mean() < fired.mean() < 1
    assert torch.equal(attn(x), attn.proj(fired))
    named = dict(zip(attn.projections, attn.project(x), strict=True))
    assert attn.operation_counts(named, (height, width))["k * v"].accumulates == products.sum()
    torch.testing.assert_close(mixing_weights(attn, x)[:, 0], products.mean(2).flatten(2).sum(0))


def test_weights_are_those_of_the_gate():
    torch.manual_seed(0)
    attn = busy(create_attention("sdsa", 8, 2, (3, 5), ATTENTION_HOST))
    x = spikes(2, 2, 8, 3, 5)
    weights = mixing_weights(attn, x)
    assert weights.shape == (2, 15, 15)
    assert weights.max() > 0
    assert (weights == weights[:, :1]).all()
    _, k, v = attn.project(x)
    torch.testing.assert_close(weights[:, 7].sum(-1), attn.mix(k, v).mean((2, 3, 4)).sum(0))


def test_state_is_one_number_per_channel_and_the_spikes():
    attn = SDSA(8, 2, (3, 5), ATTENTION_HOST)
    assert [(term.elements, term.bits) for term in attn.state_terms()] == [(8, 32), (240, 1), (120, 1)]
    assert [term.elements for term in attn.state_terms((2, 2))] == [8, 64, 32]
