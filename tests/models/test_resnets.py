"""What SEW-ResNet and MS-ResNet alone have: stages of any number, statistics of the first norm, no attention."""

from __future__ import annotations

import pytest
import torch

import lrfdyn
from tests.models.host_checks import check_feature_maps, small_model

HOSTS = ["sew_resnet", "ms_resnet"]


@pytest.mark.parametrize("host", HOSTS)
def test_fewer_stages(host):
    model = small_model(host, depths=(2, 1), widths=(8, 12))
    assert model.smallest_image == 8
    check_feature_maps(model, (16, 24))
    with torch.device("meta"):
        assert [len(stage) for stage in lrfdyn.create_model(f"{host}18").stages] == [2, 2, 2, 2]


def test_statistics_of_the_first_batch_norm():
    """SEW: of the images, each counted once; of event frames, all of them. MS: of the images at every time step."""
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    film = x.repeat(4, 1, 1, 1, 1)

    def variance(host: str, images: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        model = small_model(host, time_steps=4).double().train()
        model(images)
        return (model.stem.bn.running_var - 0.9) / 0.1  # unbiased, as one update with momentum 0.1 leaves it

    n = 2 * 16 * 16
    biased = variance("sew_resnet", x) * (n - 1) / n
    torch.testing.assert_close(variance("sew_resnet", film), biased * (4 * n) / (4 * n - 1))
    biased = variance("ms_resnet", x) * (4 * n - 1) / (4 * n)
    torch.testing.assert_close(variance("ms_resnet", film), biased * (4 * n) / (4 * n - 1))


@pytest.mark.parametrize("host", HOSTS)
def test_no_attention_to_choose(host):
    with pytest.raises(lrfdyn.LrfdynError, match=f"option of {host}18"):
        lrfdyn.create_model(f"{host}18", attention="ssa")
