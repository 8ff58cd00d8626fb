"""The rule that gives weights, images and cotangents of a golden fixture, and the comparison with it."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lrfdyn.models.base import SpikingModel
from lrfdyn.models.official import load_official_state, our_key, rename_official
from lrfdyn.nn.neurons import Neuron

GOLDEN = Path(__file__).parent / "golden"


def load(name: str) -> dict[str, Any]:
    return json.loads((GOLDEN / f"{name}.json").read_text())


def normal(seed: int, shape: Any) -> np.ndarray:
    return np.random.Generator(np.random.PCG64(seed)).standard_normal(tuple(shape))


def value(key: str, shape: list[int], kind: str, seed: int) -> Tensor:
    if kind == "count":
        return torch.zeros(shape, dtype=torch.int64)
    v = normal(zlib.crc32(key.encode()) + 1000003 * seed, shape)
    rules: dict[str, Callable[[], np.ndarray]] = {
        "running_mean": lambda: 0.05 * v,
        "running_var": lambda: 0.5 + 0.2 * np.abs(v),
        "matrix": lambda: v * math.sqrt(2 / math.prod(shape[1:])),
        "scale": lambda: 2.5 + 0.2 * v,
        "bias": lambda: 0.5 * v,
    }
    return torch.from_numpy(np.asarray(rules[kind]()))


def official_state(fixture: dict[str, Any]) -> dict[str, Tensor]:
    return {key: value(key, shape, kind, fixture["seed"]) for key, shape, kind in fixture["state_dict"]}


def images(fixture: dict[str, Any]) -> Tensor:
    """Images `[B, 3, H, W]`, or event frames `[T, B, 2, H, W]`, which the official code takes with the batch first."""
    if "input_shape" in fixture:
        counts = np.floor(np.abs(normal(fixture["seed"] + 7, fixture["input_shape"])) * 2)
        return torch.from_numpy(counts).transpose(0, 1)
    size = fixture["config"]["image_size"]
    return torch.from_numpy(normal(fixture["seed"] + 7, (fixture["batch_size"], 3, size, size)))


def filled(model: SpikingModel, fixture: dict[str, Any]) -> SpikingModel:
    load_official_state(model.double(), official_state(fixture))
    return model


def record_firing(model: SpikingModel) -> dict[str, tuple[float, float]]:
    """A dictionary that a forward pass fills: neuron -> (mean output, share of non-zero outputs), in call order."""
    seen: dict[str, tuple[float, float]] = {}

    def hook(name: str) -> Callable[..., None]:
        def note(_module: Any, _args: Any, out: Tensor) -> None:
            seen[name] = (float(out.detach().mean()), float((out.detach() != 0).double().mean()))

        return note

    for name, module in model.named_modules():
        if isinstance(module, Neuron):
            module.register_forward_hook(hook(name))
    return seen


def check_layout(model: SpikingModel, fixture: dict[str, Any]) -> None:
    """Same entries, same shapes up to singleton axes, same counts once the never-used entries are added."""
    shapes = {key: shape for key, shape, _ in fixture["state_dict"]}
    kept, dropped = rename_official(model, shapes)
    own = {key: list(value.shape) for key, value in model.state_dict().items()}
    assert kept.keys() == own.keys()
    squeezed = {key: [s for s in shape if s != 1] for key, shape in kept.items()}
    assert squeezed == {key: [s for s in shape if s != 1] for key, shape in own.items()}
    unused = sum(math.prod(shapes[key]) for key in dropped)
    if "num_parameters_never_used_in_forward" in fixture:
        assert unused == fixture["num_parameters_never_used_in_forward"]
    assert sum(p.numel() for p in model.parameters()) + unused == fixture["num_parameters"]


def check_behaviour(model: SpikingModel, fixture: dict[str, Any], variant: str, mode: str) -> None:
    """Logits, firing numbers, running statistics and gradient norms within the stated tolerances."""
    want = fixture["variants"][variant][mode]
    model = filled(model, fixture).train(mode == "train")
    firing = record_firing(model)
    logits = model(images(fixture))

    # A first neuron that disagrees tells where the fault is, so firing comes before the logits.
    assert len(firing) == len(want["firing"])
    for (name, (mean, nonzero)), (official, want_mean, want_nonzero) in zip(
        firing.items(), want["firing"], strict=True
    ):
        assert max(abs(mean - want_mean), abs(nonzero - want_nonzero)) <= 1e-12, (name, official)
    expected = torch.tensor(want["logits"], dtype=torch.float64)
    expected = expected.mean(0) if model.step_logits and mode == "eval" else expected  # a test has their mean
    torch.testing.assert_close(logits.detach(), expected, rtol=0, atol=1e-9)
    if mode == "eval":
        return

    state = model.state_dict()
    for stats in want["running_stats_after"].values():
        for statistic in ("running_mean", "running_var"):
            key = our_key(model, stats["running_mean_key"].replace("running_mean", statistic))
            expected = torch.tensor(stats[statistic], dtype=torch.float64)
            torch.testing.assert_close(state[str(key)], expected, rtol=0, atol=1e-10)

    cotangent = torch.from_numpy(normal(fixture["seed"] + 13, logits.shape))
    (logits * cotangent).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    for official, norm in want["grad_norms"]:
        ours = our_key(model, official)
        if ours is None:
            assert norm is None, official
            continue
        gradient = gradients.pop(ours)
        assert gradient is not None, official
        error = abs(gradient.norm().item() - norm)
        assert error <= 1e-7 * norm + 1e-12 * want["grad_norm_max"], (official, gradient.norm().item(), norm)
    assert not gradients, "every parameter of ours is checked"
