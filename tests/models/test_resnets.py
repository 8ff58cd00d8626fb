"""SEW-ResNet and MS-ResNet against the official code's numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lrfdyn
from lrfdyn.models import MSResNet, SEWResNet
from lrfdyn.models.resnet import SpikingResNet
from tests.golden_rule import check_behaviour, check_layout, load
from tests.models.host_checks import (
    check_drop_path,
    check_event_frames,
    check_feature_maps,
    check_rule,
    check_trains,
)

HOSTS: dict[str, type[SpikingResNet]] = {"sew_resnet": SEWResNet, "ms_resnet": MSResNet}


def build(fixture: dict[str, Any]) -> SpikingResNet:
    config = fixture["config"]
    options = {"depths": config["blocks_per_stage"], "num_classes": config["num_classes"], "time_steps": config["T"]}
    return HOSTS[fixture["family"]](**options)


def small(host: str, **options: Any) -> SpikingResNet:
    preset = {"depths": (1, 1, 1, 2), "widths": (8, 16, 24, 32), "num_classes": 5, "time_steps": 2}
    return HOSTS[host](**{**preset, **options})


@pytest.mark.parametrize("host", HOSTS)
def test_rule_draws_the_fixture_s_numbers(host):
    check_rule(load(f"{host}_small"))


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("host", HOSTS)
def test_numbers_of_the_official_code(host, mode):
    fixture = load(f"{host}_small")
    check_layout(build(fixture), fixture)
    check_behaviour(lambda: build(fixture), fixture, "official", mode)


@pytest.mark.parametrize("host", HOSTS)
def test_layout_of_the_full_sizes(host):
    with torch.device("meta"):
        built = lrfdyn.create_model(f"{host}34")
        smaller = lrfdyn.create_model(f"{host}18")
    want = load(f"params_{host}34")
    check_layout(built, want)
    assert built.config["time_steps"] == want["config"]["T"]
    assert [len(stage) for stage in smaller.stages] == [2, 2, 2, 2]


@pytest.mark.parametrize("time_steps", [1, 4])
@pytest.mark.parametrize("size", [(64, 64), (37, 45)])
@pytest.mark.parametrize("host", HOSTS)
def test_trains(host, size, time_steps):
    torch.manual_seed(0)
    check_trains(small(host, in_channels=2, time_steps=time_steps), size)


@pytest.mark.parametrize("size", [(64, 64), (33, 47)])
@pytest.mark.parametrize("host", HOSTS)
def test_feature_maps(host, size):
    model = small(host)
    assert [info.stride for info in model.feature_info] == [4, 8, 16, 32]
    assert [info.channels for info in model.feature_info] == [8, 16, 24, 32]
    check_feature_maps(model, size)


@pytest.mark.parametrize("host", HOSTS)
def test_fewer_stages(host):
    model = small(host, depths=(2, 1), widths=(8, 12))
    assert model.smallest_image == 8
    check_feature_maps(model, (16, 24))


@pytest.mark.parametrize("host", HOSTS)
def test_event_frames(host):
    torch.manual_seed(0)
    check_event_frames(small(host, time_steps=3), (64, 64))


def test_statistics_of_the_first_batch_norm():
    """SEW: of the images, each counted once; of event frames, all of them. MS: of the images at every time step."""
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    film = x.repeat(4, 1, 1, 1, 1)

    def variance(host: str, images: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        model = small(host, time_steps=4).double().train()
        model(images)
        return (model.stem.bn.running_var - 0.9) / 0.1  # unbiased, as one update with momentum 0.1 leaves it

    n = 2 * 16 * 16
    biased = variance("sew_resnet", x) * (n - 1) / n
    torch.testing.assert_close(variance("sew_resnet", film), biased * (4 * n) / (4 * n - 1))
    biased = variance("ms_resnet", x) * (4 * n - 1) / (4 * n)
    torch.testing.assert_close(variance("ms_resnet", film), biased * (4 * n) / (4 * n - 1))


@pytest.mark.parametrize("host", HOSTS)
def test_drop_path(host):
    torch.manual_seed(0)
    check_drop_path(lambda **options: small(host, **options), (64, 64))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depths": (1, 1, 1)}, "depths: expected 4 integers"),
        ({"depths": (1, 1, 0, 1)}, "depths: expected 4 integers"),
        ({"widths": (8, 0, 8, 8)}, "widths: expected integers >= 1"),
        ({"drop_path": 1.0}, "drop_path: expected a rate"),
        ({"time_steps": 0}, "time_steps: expected an integer >= 1"),
    ],
)
@pytest.mark.parametrize("host", HOSTS)
def test_errors_name_the_argument(host, options, message):
    with pytest.raises(lrfdyn.LrfdynError, match=message):
        small(host, **options)


@pytest.mark.parametrize("host", HOSTS)
def test_no_attention_to_choose(host):
    with pytest.raises(lrfdyn.LrfdynError, match=f"option of {host}18"):
        lrfdyn.create_model(f"{host}18", attention="ssa")


@pytest.mark.parametrize("host", HOSTS)
def test_images_below_the_smallest_are_refused(host):
    with pytest.raises(lrfdyn.LrfdynError, match="at least 32 pixels"):
        small(host)(torch.zeros(1, 3, 32, 31))
