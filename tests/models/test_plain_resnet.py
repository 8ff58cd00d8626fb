"""The residual network without spikes: PyTorch's own layers in numbers, small images, and as a teacher."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lrfdyn.errors import LrfdynError
from lrfdyn.models import PlainResNet, create_model
from tests.models.host_checks import randomize


def small(**options) -> PlainResNet:
    torch.manual_seed(0)
    return PlainResNet(**{"depths": (1, 2), "widths": (4, 8), "num_classes": 5, **options})


def by_hand(model: PlainResNet, images: Tensor) -> Tensor:
    """The logits by functions of PyTorch."""

    def conv(layer, x: Tensor) -> Tensor:
        y = F.conv2d(x, layer.conv.weight, None, layer.conv.stride, layer.conv.padding)
        bn = layer.bn
        return F.batch_norm(y, bn.running_mean, bn.running_var, bn.weight, bn.bias, False, eps=bn.eps)

    x = conv(model.stem, images)
    for stage in model.stages:
        for block in stage:
            branch = conv(block.conv2, F.relu(conv(block.conv1, F.relu(x))))
            x = branch + (x if isinstance(block.shortcut, torch.nn.Identity) else conv(block.shortcut, x))
    return F.linear(F.relu(x).mean((2, 3)), model.head.weight, model.head.bias)


def test_it_is_the_network_of_plain_functions():
    model = randomize(small()).double().eval()
    images = torch.randn(3, 3, 9, 9, dtype=torch.float64)
    torch.testing.assert_close(model(images), by_hand(model, images))
    assert [tuple(m.shape[2:]) for m in model.feature_maps(images)] == [(4, 9, 9), (8, 5, 5)]


def test_size_and_time_steps():
    with torch.device("meta"):
        model = create_model("resnet18_cifar")
    assert sum(p.numel() for p in model.parameters()) == 11_220_132
    assert model.input_size == (3, 32, 32)
    with pytest.raises(LrfdynError, match="time_steps: a network without spikes shows an image once"):
        small(time_steps=4)
