"""What every host must do, whatever its architecture: checks that the hosts' tests call."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lrfdyn.attention import Attention
from lrfdyn.models import SDTV1, SDTV2, SDTV3, MSResNet, QKFormer, SEWResNet, Spikformer
from lrfdyn.models.base import SpikingModel
from lrfdyn.models.sdt_v2 import RepConvBN
from lrfdyn.models.transformer import CIFAR_POOLING
from lrfdyn.nn.layers import ConvBN, DropPath
from tests.golden_rule import images, official_state

Build = Callable[..., SpikingModel]

TRANSFORMER = {"dim": 32, "depth": 2, "heads": 4, "mlp_ratio": 2, "image_size": 32, "num_classes": 5, "time_steps": 2}
METAFORMER = {"widths": (8, 16, 24, 32), "depths": (1, 1, 1, 2, 1), "heads": 4, "image_size": 32, "num_classes": 5}
RESNET = {"depths": (1, 1, 1, 2), "widths": (8, 16, 24, 32), "num_classes": 5, "time_steps": 2}
CIFAR_STEM = {"pooling": CIFAR_POOLING, "qkv_bias": True}
# By the name of the golden fixtures' family: the class, and the options of a small model.
HOSTS: dict[str, tuple[type[SpikingModel], dict[str, Any]]] = {
    "spikformer_imagenet": (Spikformer, TRANSFORMER),
    "spikformer_cifar": (Spikformer, {**TRANSFORMER, **CIFAR_STEM, "image_size": 16}),
    "qkformer_imagenet": (QKFormer, {**TRANSFORMER, "depth": 5}),
    "qkformer_cifar": (QKFormer, {**TRANSFORMER, "depth": 5, "form": "cifar"}),
    "sdt_v1": (SDTV1, TRANSFORMER),
    "spikformer_dvs": (Spikformer, {**TRANSFORMER, "in_channels": 2, "attention_scale": 0.25}),
    "qkformer_dvs": (QKFormer, {**TRANSFORMER, "in_channels": 2, "form": "dvs"}),
    "sdt_v1_dvs": (SDTV1, {**TRANSFORMER, "in_channels": 2, "window_maxima": True}),
    "sdt_v2": (SDTV2, METAFORMER),
    "sdt_v3": (SDTV3, METAFORMER),
    "sew_resnet": (SEWResNet, RESNET),
    "ms_resnet": (MSResNet, RESNET),
}
# Keys of a fixture's configuration, and the option of ours for each; the widths of a MetaFormer have a key of a width.
OPTIONS = {
    "embed_dim": "dim",
    "depth": "depth",
    "num_heads": "heads",
    "mlp_ratio": "mlp_ratio",
    "T": "time_steps",
    "image_size": "image_size",
    "num_classes": "num_classes",
    "in_channels": "in_channels",
    "blocks_per_stage": "depths",
}


def small_model(host: str, **options: Any) -> Any:
    make, preset = HOSTS[host]
    return make(**{**preset, **options})


def golden_model(fixture: dict[str, Any], **options: Any) -> Any:
    """The model that a golden fixture describes."""
    make, form = HOSTS[fixture["family"]]
    given = fixture["config"]
    stated = {ours: given[theirs] for theirs, ours in OPTIONS.items() if given.get(theirs) is not None}
    if isinstance(stated.get("dim"), list):
        stated["widths"] = stated.pop("dim")
    known = {key: value for key, value in stated.items() if key in make.options()}
    if "pooling_stat" in given:
        known["pooling"] = tuple(digit == "1" for digit in given["pooling_stat"])
    if form.get("form") == "dvs":
        known["depth"] = 2  # whatever the official code is told
    extra = {key: form[key] for key in (*CIFAR_STEM, "form", "attention_scale", "window_maxima") if key in form}
    return make(**{**extra, **known, **options})


def check_rule(fixture: dict[str, Any]) -> None:
    """The rule draws the numbers that the fixture was made with."""
    sanity, state = fixture["sanity"], official_state(fixture)
    assert images(fixture).sum().item() == pytest.approx(sanity["image_sum"], abs=1e-9)
    assert state[sanity["matrix_key"]].flatten()[:3].tolist() == sanity["matrix_first3"]
    total = sum(v.abs().sum().item() for v in state.values() if v.is_floating_point())
    assert total == pytest.approx(sanity["abs_sum_of_all_float_entries"], rel=1e-12)


def randomize(model: SpikingModel) -> SpikingModel:
    """Batch norms with random statistics and a gain that keeps the neurons busy, as a trained network has."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None
            nn.init.normal_(module.running_mean, std=0.05)
            nn.init.normal_(module.weight, mean=2.5, std=0.2)
            nn.init.normal_(module.bias, std=0.5)
    return model


def wake_attention(model: SpikingModel) -> None:
    """Most q, k and v spike, so that few tokens are enough to make the neuron behind the attention fire."""
    for module in model.modules():
        if isinstance(module, Attention):
            for name in module.projections:
                *_, norm = (m for m in getattr(module, name).modules() if isinstance(m, nn.BatchNorm2d))
                nn.init.normal_(norm.bias, mean=2.0, std=0.5)


def cancelled(model: SpikingModel) -> set[nn.Parameter | None]:
    """Biases directly in front of a batch norm, which subtracts them again with the mean of the batch."""
    found = {module.conv.bias for module in model.modules() if isinstance(module, ConvBN)}
    return found | {module.conv.bn2.bias for module in model.modules() if isinstance(module, RepConvBN)}


def check_trains(model: SpikingModel, size: tuple[int, int]) -> None:
    """Forward and backward: logits of the right shape, and a finite gradient, not 0, for every parameter."""
    randomize(model)
    wake_attention(model)
    model.double().train()
    logits = model(torch.randn(2, model.in_channels, *size, dtype=torch.float64))
    assert logits.shape == (2, model.config["num_classes"])
    (logits * torch.randn_like(logits)).sum().backward()
    largest = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        largest[name] = parameter.grad.abs().max().item()
    most = max(largest.values())
    without = cancelled(model)
    for name, parameter in model.named_parameters():
        if parameter in without:
            assert largest[name] < 1e-12 * most, f"{name}: {largest[name]:.3g}"
        else:  # a scale in front of a batch norm has little more than this, as it counts only by the norm's eps
            assert largest[name] > 1e-14 * most, f"{name}: {largest[name]:.3g}"


def check_one_image(model: SpikingModel, size: tuple[int, int], layout: torch.memory_format) -> None:
    """Every gradient of a single image is that of batch norms that are written out."""
    wake_attention(randomize(model))
    model.double().train().to(memory_format=layout)
    weights = torch.randn(1, model.config["num_classes"], dtype=torch.float64)
    image = torch.randn(1, model.in_channels, *size, dtype=torch.float64).contiguous(memory_format=layout)

    def gradients() -> dict[str, torch.Tensor]:
        copied = copy.deepcopy(model)
        (copied(image) * weights).sum().backward()
        return {name: parameter.grad for name, parameter in copied.named_parameters() if parameter.grad is not None}

    found = gradients()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "batch_norm", batch_norm_definition)
        expected = gradients()
    assert found.keys() == expected.keys()
    most = max(gradient.abs().max().item() for gradient in expected.values())
    for name, gradient in expected.items():
        error = (found[name] - gradient).abs().max().item()
        assert error < 1e-8 * gradient.abs().max().item() + 1e-9 * most, f"{name}: {error:.3g}"


def batch_norm_definition(
    x: torch.Tensor, running_mean: torch.Tensor, running_var: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor,
    training: bool, momentum: float, eps: float,
) -> torch.Tensor:  # fmt: skip
    """Of `[N, C, H, W]` in training."""
    assert training
    mean, var = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), unbiased=False, keepdim=True)
    count = x[:, 0].numel()
    with torch.no_grad():
        running_mean.lerp_(mean.flatten(), momentum)
        running_var.lerp_(var.flatten() * count / (count - 1), momentum)
    return (x - mean) * torch.rsqrt(var + eps) * weight.reshape(-1, 1, 1) + bias.reshape(-1, 1, 1)


def check_feature_maps(model: SpikingModel, size: tuple[int, int]) -> None:
    """One map per stage as `feature_info` says; the head on the last one gives the logits."""
    x = torch.randn(2, model.in_channels, *size)
    with torch.no_grad():
        maps = model.eval().feature_maps(x)
        torch.testing.assert_close(model.forward_head(maps[-1]), model(x))
    strides = [info.stride for info in model.feature_info]
    assert strides == sorted(set(strides))
    shapes = [(info.channels, -(-size[0] // info.stride), -(-size[1] // info.stride)) for info in model.feature_info]
    assert [tuple(m.shape) for m in maps] == [(model.time_steps, 2, *shape) for shape in shapes]


def check_step_logits(model: SpikingModel, size: tuple[int, int]) -> None:
    """In training the logits of every step, whose mean is what the model gives otherwise; a test has their mean."""
    model = randomize(model).double()
    frames = torch.randn(3, 2, model.in_channels, *size, dtype=torch.float64)
    with torch.no_grad():
        mean = model.train()(frames)
        model.step_logits = True
        steps = model(frames)
        assert steps.shape == (3, *mean.shape)
        assert not torch.equal(steps[0], steps[1])
        torch.testing.assert_close(steps.mean(0), mean)
        assert model.eval()(frames).shape == mean.shape


def lively(model: SpikingModel, x: torch.Tensor) -> SpikingModel:
    """In evaluation, with the statistics of `x` in its norms, so that neurons of all layers fire for it."""
    randomize(model)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0
    with torch.no_grad():
        model.train()(x)
    return model.eval()


def check_first_steps(model: SpikingModel, size: tuple[int, int]) -> None:
    """The mean of the first k logits of all steps is what the model gives for k steps, of films and of images."""
    film = torch.randn(4, 2, model.in_channels, *size, dtype=torch.float64)
    model = lively(model.double(), film)
    with torch.no_grad():
        model.time_steps = 4
        assert not torch.equal(model.forward_steps(film)[0], model.forward_steps(1 - film)[0])
        for x in (film, film[0]):
            steps = model.forward_steps(x)
            torch.testing.assert_close(steps.mean(0), model(x), rtol=0, atol=1e-12)
            for k in range(1, 4):
                model.time_steps = k
                expected = model(x[:k] if x is film else x)
                torch.testing.assert_close(steps[:k].mean(0), expected, rtol=0, atol=1e-12)
            model.time_steps = 4


def check_event_frames(model: SpikingModel, size: tuple[int, int]) -> None:
    """A static image is the same as a film of it."""
    model = randomize(model).double().eval()
    x = torch.randn(2, model.in_channels, *size, dtype=torch.float64)
    film = x.repeat(model.time_steps, 1, 1, 1, 1)
    with torch.no_grad():
        torch.testing.assert_close(model(film), model(x), rtol=0, atol=1e-10)


def check_drop_path(build: Build, size: tuple[int, int]) -> None:
    """Rates grow from 0 to `drop_path`, training drops branches, evaluation drops none."""
    plain = randomize(build(drop_path=0.0)).double()
    dropping = build(drop_path=0.9999).double()
    dropping.load_state_dict(plain.state_dict())
    rates = [module.rate for module in dropping.modules() if isinstance(module, DropPath)]
    assert rates == sorted(rates)
    assert (rates[0], rates[-1]) == (0, 0.9999)

    x = torch.randn(2, plain.in_channels, *size, dtype=torch.float64)
    with torch.no_grad():
        assert torch.equal(dropping.eval()(x), plain.eval()(x))

        torch.manual_seed(0)  # no branch survives with this seed
        blocks = [m for m in dropping.modules() if isinstance(getattr(m, "drop_path", None), DropPath)]
        seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        hook = blocks[-1].register_forward_hook(lambda _m, args, out: seen.append((args[0], out)))
        logits = copy.deepcopy(dropping).train()(x)
        hook.remove()
        assert not torch.equal(logits, plain.train()(x))
    ((before, after),) = seen
    assert torch.equal(before, after)


def digits_model(attention: str = "lrf_dyn", **options: Any) -> Spikformer:
    """The smallest one that takes the digits."""
    torch.manual_seed(0)
    return Spikformer(
        dim=16,
        depth=1,
        heads=2,
        mlp_ratio=1,
        pooling=(False, False, False, False),
        image_size=8,
        in_channels=1,
        num_classes=10,
        time_steps=2,
        attention=attention,
        **options,
    )
