"""All hosts: the official code's numbers, gradients, shapes, feature maps, event frames, files."""

from __future__ import annotations

import pickle

import pytest
import torch

import lrfdyn
from lrfdyn.deploy import compile_for_inference
from lrfdyn.models import list_models
from lrfdyn.nn.layers import ConvBN
from tests.golden_rule import check_behaviour, check_layout, load
from tests.models.host_checks import (
    HOSTS,
    check_drop_path,
    check_event_frames,
    check_feature_maps,
    check_first_steps,
    check_one_image,
    check_rule,
    check_step_logits,
    check_trains,
    golden_model,
    randomize,
    small_model,
)

GOLDEN = [*(f"{host}_small" for host in HOSTS), "sdt_v2_small_t1"]
TRANSFORMERS = [host for host in HOSTS if "resnet" not in host]
RESNETS = ["sew_resnet", "ms_resnet"]
STRIDES = {
    "spikformer_imagenet": [2, 4, 8, 16],
    "spikformer_cifar": [1, 1, 2, 4],
    "qkformer_imagenet": [4, 8, 16],
    "qkformer_cifar": [1, 2, 4],
    "sdt_v1": [2, 4, 8, 16],
    "spikformer_dvs": [2, 4, 8, 16],
    "qkformer_dvs": [8, 16],
    "sdt_v1_dvs": [2, 4, 8, 16],
    "sdt_v2": [2, 4, 8, 16],
    "sdt_v3": [2, 4, 8, 16],
    "sew_resnet": [4, 8, 16, 32],
    "ms_resnet": [4, 8, 16, 32],
}
CHANNELS = {  # of the others: 4, 8, 16, 32
    "qkformer_imagenet": [8, 16, 32],
    "qkformer_cifar": [8, 16, 32],
    "qkformer_dvs": [16, 32],
    "sew_resnet": [8, 16, 24, 32],
    "ms_resnet": [8, 16, 24, 32],
}
# Golden fixtures of full sizes that are not called like the model, and what there is none of.
FULL_SIZES = {
    "spikformer_4_384": "spikformer_cifar_4_384_c100",
    "qkformer_4_384": "qkformer_cifar_4_384_c100",
    "spikformer_dvs_2_256": "spikformer_dvs_2_256_c10",
    "qkformer_dvs_2_256": "qkformer_dvs_256_c10",
    "qkformer_gesture_2_256": "qkformer_gesture_256_c11",
    "sdt_v1_dvs_2_256": "sdt_v1_dvs_2_256_c10",
    "sdt_v1_gesture_2_256": "sdt_v1_gesture_2_256_c11",
    "sdt_v2_31m": "sdt_v2_8_384",
    "sdt_v2_55m": "sdt_v2_8_512",
}
# What the variants of a fixture are with us.
VARIANTS = {"legacy": {"legacy_neuron_axis": True}, "gesture": {"window_maxima": False}}
WITHOUT_FIXTURE = {"sdt_v1_2_512", "sew_resnet18", "ms_resnet18", "resnet18_cifar", "vit_4_384"}


def size_of(host: str) -> tuple[int, int]:
    """Of images that a small model trains on."""
    side = {"spikformer_cifar": 16, **dict.fromkeys(RESNETS, 64)}.get(host, 32)
    return side, side


@pytest.mark.parametrize("name", GOLDEN)
def test_rule_draws_the_fixture_s_numbers(name):
    check_rule(load(name))


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize(("name", "variant"), [(name, v) for name in GOLDEN for v in load(name)["variants"]])
def test_numbers_of_the_official_code(name, variant, mode):
    fixture = load(name)
    model = golden_model(fixture, **VARIANTS.get(variant, {}))
    model.step_logits = bool(fixture["config"].get("TET")) and variant == "official"
    check_layout(model, fixture)
    check_behaviour(model, fixture, variant, mode)


@pytest.mark.parametrize("name", [name for name in list_models() if name not in WITHOUT_FIXTURE])
def test_layout_of_the_full_sizes(name):
    with torch.device("meta"):
        model = lrfdyn.create_model(name)
    want = load(f"params_{FULL_SIZES.get(name, name)}")
    check_layout(model, want)
    assert model.config.get("heads") == want["config"].get("num_heads")
    assert model.time_steps == (want["config"]["T"] or 1)
    assert model.input_size[-1] == want["config"]["image_size"]


def test_layout_with_other_classes():
    with torch.device("meta"):
        check_layout(lrfdyn.create_model("spikformer_4_384", num_classes=10), load("params_spikformer_cifar_4_384_c10"))


@pytest.mark.parametrize("time_steps", [1, 4])
@pytest.mark.parametrize("attention", lrfdyn.ATTENTIONS)
@pytest.mark.parametrize("host", TRANSFORMERS)
def test_every_attention_trains(host, attention, time_steps):
    torch.manual_seed(0)
    check_trains(small_model(host, attention=attention, time_steps=time_steps), size_of(host))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["plain", "channels_last"])
@pytest.mark.parametrize("host", HOSTS)
def test_gradients_of_one_image_at_one_step(host, layout):
    torch.manual_seed(0)
    check_one_image(small_model(host, time_steps=1), size_of(host), layout)


@pytest.mark.parametrize("attention", [None, "lrf_dyn"])
@pytest.mark.parametrize("host", TRANSFORMERS)
def test_odd_sizes_and_other_channels_train(host, attention):
    torch.manual_seed(0)
    kind = {} if attention is None else {"attention": attention}
    size = (37, 37) if host in ("sdt_v2", "sdt_v3") else (37, 21)
    check_trains(small_model(host, in_channels=2, image_size=37, **kind), size)


@pytest.mark.parametrize("time_steps", [1, 4])
@pytest.mark.parametrize("size", [(64, 64), (37, 45)])
@pytest.mark.parametrize("host", RESNETS)
def test_residual_networks_train(host, size, time_steps):
    torch.manual_seed(0)
    check_trains(small_model(host, in_channels=2, time_steps=time_steps), size)


@pytest.mark.parametrize("size", [(64, 32), (33, 47)])
@pytest.mark.parametrize("host", [host for host in HOSTS if host != "spikformer_cifar"])
def test_feature_maps(host, size):
    model = small_model(host, time_steps=2)
    assert [info.stride for info in model.feature_info] == STRIDES[host]
    assert [info.channels for info in model.feature_info] == CHANNELS.get(host, [4, 8, 16, 32])
    check_feature_maps(model, size)


@pytest.mark.parametrize("host", HOSTS)
def test_event_frames(host):
    torch.manual_seed(0)
    check_event_frames(small_model(host, time_steps=3), size_of(host))


@pytest.mark.parametrize("host", HOSTS)
def test_logits_of_every_step(host):
    check_step_logits(small_model(host), size_of(host))


IN_TIME = [("spikformer_cifar", kind) for kind in lrfdyn.ATTENTIONS] + [(host, None) for host in HOSTS]


@pytest.mark.parametrize(("host", "attention"), IN_TIME)
def test_first_steps_need_no_later_ones(host, attention):
    torch.manual_seed(0)
    kind = {} if attention is None else {"attention": attention}
    check_first_steps(small_model(host, **kind), size_of(host))


@pytest.mark.parametrize("host", HOSTS)
def test_drop_path(host):
    torch.manual_seed(0)
    check_drop_path(lambda **options: small_model(host, **options), size_of(host))


@pytest.mark.parametrize("host", HOSTS)
def test_sections_are_the_network(host):
    torch.manual_seed(0)
    model = randomize(small_model(host)).eval()
    images = torch.randn(2, model.in_channels, *size_of(host))
    with torch.no_grad():
        x = model.to_time_major(images)
        for section in model.sections():
            height = x.shape[3]
            x = section.run(x)
            assert x.shape[2:4] == (section.channels, -(-height // section.stride)), section.name
        assert torch.equal(x, model.forward_features(images))


@pytest.mark.parametrize("host", HOSTS)
def test_pickled(host):
    model = small_model(host).eval()
    images = torch.randn(2, model.in_channels, *size_of(host))
    assert torch.equal(pickle.loads(pickle.dumps(model))(images), model(images))


@pytest.mark.parametrize("host", HOSTS)
def test_images_below_the_smallest_are_refused(host):
    model, smallest = small_model(host), STRIDES[host][-1]
    with pytest.raises(lrfdyn.LrfdynError, match=f"at least {smallest} pixels"):
        model(torch.zeros(1, model.in_channels, 32, smallest - 1))


TRANSFORMER_ERRORS = [
    ({"mlp_ratio": 0}, "mlp_ratio: expected a positive"),
    ({"image_size": 15}, "image_size: expected at least 16"),
    ({"drop_path": 1.0}, "drop_path: expected a rate"),
    ({"heads": 0}, "heads: expected an integer >= 1"),
    ({"attention": "lrf-dyn"}, "did you mean lrf_dyn"),
]
METAFORMER_ERRORS = [
    ({"widths": (8, 16, 24)}, "widths: expected four"),
    ({"widths": (9, 16, 24, 32)}, "widths: expected an even first width"),
    ({"depths": (1, 1, 2, 6)}, "depths: expected five"),
    ({"depths": (1, 1, 0, 6, 2)}, "depths: expected five"),
    ({"heads": 5}, "heads: expected a divisor of the width 24"),
    *TRANSFORMER_ERRORS,
]
STEM_ERRORS = [
    ({"dim": 36}, "dim: expected a multiple of 8"),
    ({"heads": 5}, "heads: expected a divisor of the width 32"),
    ({"depth": 0}, "depth: expected an integer >= 1"),
    ({"pooling": (True, True)}, "pooling: expected four booleans"),
    *TRANSFORMER_ERRORS,
]
RESNET_ERRORS = [
    ({"depths": (1, 1, 1)}, "depths: expected 4 integers"),
    ({"depths": (1, 1, 0, 1)}, "depths: expected 4 integers"),
    ({"widths": (8, 0, 8, 8)}, "widths: expected integers >= 1"),
    ({"drop_path": 1.0}, "drop_path: expected a rate"),
    ({"time_steps": 0}, "time_steps: expected an integer >= 1"),
]
ERRORS = {
    "spikformer_imagenet": [*STEM_ERRORS, ({"attention_scale": 0}, "attention_scale: expected a positive")],
    "sdt_v1": [*STEM_ERRORS, ({"attention": "sdsa2"}, "did you mean sdsa")],
    "qkformer_imagenet": [
        ({"dim": 36}, "dim: expected a multiple of 8"),
        ({"heads": 16}, "heads: expected a divisor of stage 1's width 8"),
        ({"depth": 3}, "depth: expected an integer >= 4"),
        ({"depth": 2, "form": "cifar"}, "depth: expected an integer >= 3"),
        ({"form": "cifar100"}, "did you mean cifar"),
        *TRANSFORMER_ERRORS,
    ],
    "qkformer_dvs": [
        ({"dim": 40}, "dim: expected a multiple of 16"),
        ({"heads": 32}, "heads: expected a divisor of stage 1's width 16"),
        ({"depth": 1}, "depth: expected an integer >= 2"),
    ],
    "sdt_v2": METAFORMER_ERRORS,
    "sdt_v3": [*METAFORMER_ERRORS, ({"levels": 0}, "levels: expected an integer >= 1")],
    "sew_resnet": RESNET_ERRORS,
    "ms_resnet": RESNET_ERRORS,
}


@pytest.mark.parametrize(("host", "options", "message"), [(h, *case) for h, cases in ERRORS.items() for case in cases])
def test_errors_name_the_argument(host, options, message):
    with pytest.raises(lrfdyn.LrfdynError, match=message):
        small_model(host, **options)


@pytest.mark.parametrize(
    ("host", "options", "strides"),
    [
        ("sdt_v2", {"stem_stride": 1}, [1, 2, 4, 8]),
        ("sdt_v3", {"stem_stride": 1}, [1, 2, 4, 8]),
        ("qkformer_cifar", {"form": "tiny_imagenet"}, [2, 4, 8]),
    ],
)
def test_stems_for_small_images(host, options, strides):
    """With the weights of the other stem, whose maps are a part of its own or which sees a part of them."""
    torch.manual_seed(0)
    usual, model = (randomize(small_model(host, **more)).eval() for more in ({}, options))
    model.load_state_dict(usual.state_dict())
    assert [info.stride for info in model.feature_info] == strides
    assert model.grid == (4, 4)
    check_feature_maps(small_model(host, **options, time_steps=2), (33, 47))
    x = torch.randn(1, 2, 3, 32, 32)
    with torch.no_grad():
        if host == "qkformer_cifar":
            halved = torch.nn.functional.max_pool2d(ConvBN.forward(model.stem, x).flatten(0, 1), 3, 2, 1)
            assert torch.equal(model.stem(x), model.stem.neuron(halved.unflatten(0, (1, 2))))
        else:
            first, second = (network.stages[0].down(x) for network in (model, usual))
            assert torch.allclose(first[..., ::2, ::2], second, atol=1e-5)
        for section in model.sections():
            height = x.shape[3]
            x = section.run(x)
            assert x.shape[3] == -(-height // section.stride), section.name
        images = torch.randn(2, 3, 32, 32)
        assert torch.allclose(compile_for_inference(model)(images), model(images), atol=1e-5)
    torch.manual_seed(0)
    check_trains(small_model(host, **options), (33, 47))


def test_strides_of_the_first_convolution():
    with pytest.raises(lrfdyn.LrfdynError, match="stem_stride: expected 1 or 2, got 4"):
        small_model("sdt_v3", stem_stride=4)
