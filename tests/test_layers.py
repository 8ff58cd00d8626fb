"""The layers that hosts share."""

from __future__ import annotations

import torch

from lrfdyn.nn.layers import DropPath


def test_drop_path_drops_samples_at_all_time_steps_and_keeps_the_mean():
    torch.manual_seed(0)
    layer = DropPath(0.2)
    branch = layer(torch.ones(3, 4000, 2, 2, dtype=torch.float64))
    assert set(branch.unique().tolist()) == {0.0, 1 / 0.8}
    assert (branch == branch[:1, :, :1, :1]).all()
    assert abs(float(branch.mean()) - 1) < 0.03
    assert (layer.eval()(branch) == branch).all()
