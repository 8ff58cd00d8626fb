"""Spikformer against the official code's numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lrfdyn
from lrfdyn.models.spikformer import Spikformer
from lrfdyn.models.transformer import CIFAR_POOLING, IMAGENET_POOLING
from tests.golden_rule import check_behaviour, check_layout, load
from tests.models.host_checks import check_rule, check_trains


def build(fixture: dict) -> Spikformer:
    config = fixture["config"]
    cifar = fixture["family"] == "spikformer_cifar"
    return Spikformer(
        dim=config["embed_dim"],
        depth=config["depth"],
        heads=config["num_heads"],
        mlp_ratio=config["mlp_ratio"],
        pooling=CIFAR_POOLING if cifar else IMAGENET_POOLING,
        qkv_bias=cifar,
        image_size=config["image_size"],
        num_classes=config["num_classes"],
        time_steps=config["T"],
    )


def small(form: str, **options: Any) -> Spikformer:
    forms = {
        "imagenet": {"pooling": IMAGENET_POOLING, "image_size": 32},
        "cifar": {"pooling": CIFAR_POOLING, "qkv_bias": True, "image_size": 16},
    }
    preset = {"dim": 32, "depth": 2, "heads": 4, "mlp_ratio": 2, "num_classes": 5}
    return Spikformer(**{**preset, **forms[form], **options})


SMALL = ["spikformer_imagenet_small", "spikformer_cifar_small"]


@pytest.mark.parametrize("name", SMALL)
def test_rule_draws_the_fixture_s_numbers(name):
    check_rule(load(name))


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("name", SMALL)
def test_numbers_of_the_official_code(name, mode):
    fixture = load(name)
    check_layout(build(fixture), fixture)
    check_behaviour(lambda: build(fixture), fixture, "official", mode)


@pytest.mark.parametrize(
    ("fixture", "model", "options"),
    [
        ("params_spikformer_8_384", "spikformer_8_384", {}),
        ("params_spikformer_8_512", "spikformer_8_512", {}),
        ("params_spikformer_8_768", "spikformer_8_768", {}),
        ("params_spikformer_cifar_4_384_c100", "spikformer_4_384", {}),
        ("params_spikformer_cifar_4_384_c10", "spikformer_4_384", {"num_classes": 10}),
    ],
)
def test_layout_of_the_full_sizes(fixture, model, options):
    with torch.device("meta"):
        built = lrfdyn.create_model(model, **options)
    want = load(fixture)
    check_layout(built, want)
    assert built.config["heads"] == want["config"]["num_heads"]
    assert built.config["time_steps"] == want["config"]["T"]


@pytest.mark.parametrize("time_steps", [1, 4])
@pytest.mark.parametrize("form", ["imagenet", "cifar"])
@pytest.mark.parametrize("attention", lrfdyn.ATTENTIONS)
def test_every_attention_trains(attention, form, time_steps):
    torch.manual_seed(0)
    model = small(form, attention=attention, time_steps=time_steps)
    check_trains(model, model.input_size[1:])
