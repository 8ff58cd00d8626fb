"""The same analysis on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lrfdyn.analysis.analyze import measure_model
from lrfdyn.attention import ATTENTIONS
from tests.models.host_checks import digits_model

pytestmark = pytest.mark.gpu(needed=True)


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_measures_what_the_cpu_does(kind, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)
    built = digits_model(kind)
    for module in built.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.bias, 0.0, 3.0)
    images = torch.randn(4, 1, 8, 8)
    cpu = measure_model(built, images.split(2))
    gpu = measure_model(built.cuda(), images.cuda().split(2))
    # A potential at the threshold may round to the other side: a few spikes may differ.
    assert gpu["firing_rate"] == pytest.approx(cpu["firing_rate"], rel=0.02)
    assert gpu["energy"]["energy_pj"] == pytest.approx(cpu["energy"]["energy_pj"], rel=0.02)
    assert gpu["locality"]["entropy_mean"] == pytest.approx(cpu["locality"]["entropy_mean"], rel=0.02)
    assert gpu["locality"]["short_range_share"] == pytest.approx(cpu["locality"]["short_range_share"], rel=0.02)
    for one, other in zip(gpu["receptive_field"]["share_inside"], cpu["receptive_field"]["share_inside"], strict=True):
        assert one["share"] == pytest.approx(other["share"], abs=0.05)
    assert gpu["peak_inference_bytes"] > 0
    assert gpu["images_per_second"] > 0
