"""The layers that hosts share, where no host's test would notice."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lrfdyn.nn.layers import DropPath, normalize
from lrfdyn.ops.bn_lif import Norm, bn_lif
from tests.conftest import LAYOUTS, arrange, assert_same, random


def test_drop_path_drops_samples_at_all_time_steps_and_keeps_the_mean():
    torch.manual_seed(0)
    layer = DropPath(0.2)
    branch = layer(torch.ones(3, 4000, 2, 2, dtype=torch.float64))
    assert set(branch.unique().tolist()) == {0.0, 1 / 0.8}
    assert (branch == branch[:1, :, :1, :1]).all()
    assert abs(float(branch.mean()) - 1) < 0.03
    assert (layer.eval()(branch) == branch).all()


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("inner", LAYOUTS)
@pytest.mark.parametrize("outer", LAYOUTS)
def test_batch_norm_of_one_image_in_any_memory(inner, outer, training):
    """The stride over a single image says nothing, and the gradient may come in another layout than the image."""
    x, weight, bias = random(1, 1, 6, 4, 3), random(6, seed=1), random(6, seed=2)
    mean, var = random(6, seed=3), random(6, seed=4).square()

    def by_module(x, weight, bias):
        norm = nn.BatchNorm2d(6).double().train(training)
        norm.running_mean, norm.running_var = mean.clone(), var.clone()
        given = {"weight": weight, "bias": bias}
        return normalize(lambda y: torch.func.functional_call(norm, given, y), arrange(x, inner))

    def by_operation(x, weight, bias):
        return bn_lif(arrange(x, inner), Norm(weight, bias, mean.clone(), var.clone(), training), None)

    def definition(x, weight, bias):
        taken = (x.mean((0, 1, 3, 4)), x.var((0, 1, 3, 4), unbiased=False)) if training else (mean, var)
        centre, spread = (value.reshape(-1, 1, 1) for value in taken)
        return (x - centre) * torch.rsqrt(spread + 1e-5) * weight.reshape(-1, 1, 1) + bias.reshape(-1, 1, 1)

    for function in (by_module, by_operation):
        assert_same(lambda *given, f=function: arrange(f(*given), outer), definition, [x, weight, bias])
