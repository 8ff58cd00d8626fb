"""The hosts as graphs: `torch.export` for deployment, `torch.compile` for training."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import lrfdyn
from lrfdyn.attention import Attention
from lrfdyn.attention.lrf_dyn import Dendrites
from lrfdyn.models.base import SpikingModel
from lrfdyn.models.sdt_v3 import SDTV3
from lrfdyn.models.spikformer import Spikformer
from lrfdyn.models.transformer import CIFAR_POOLING
from tests.conftest import assert_close, random
from tests.models.host_checks import randomize, wake_attention


def build(host: str, attention: str, **options: int) -> SpikingModel:
    torch.manual_seed(0)
    common = {"heads": 2, "mlp_ratio": 1, "num_classes": 3, "attention": attention}
    if host == "spikformer":
        preset = {"dim": 16, "depth": 1, "time_steps": 2, "image_size": 16, "pooling": CIFAR_POOLING}
        model: SpikingModel = Spikformer(**{**common, **preset, **options})
    else:
        preset = {"widths": (4, 4, 8, 8), "depths": (1,) * 5, "image_size": 32}
        model = SDTV3(**{**common, **preset, **options})
    wake_attention(randomize(model))
    for norm in (module for module in model.modules() if isinstance(module, nn.BatchNorm2d)):
        norm.momentum = 1.0
    with torch.no_grad():
        model(images(model, 4))  # the statistics of real activity, so that evaluation spikes too
    return model


def images(model: SpikingModel, batch: int) -> Tensor:
    return random(batch, *model.input_size, dtype=next(model.parameters()).dtype)


def check_export(module: nn.Module, x: Tensor, axis: int = 0) -> None:
    """Exported with one image less along `axis`, the program gives the output of all."""
    shapes = ({axis: torch.export.Dim("batch")},)
    sample = x.narrow(axis, 1, x.shape[axis] - 1).clone()
    program = torch.export.export(module.eval(), (sample,), dynamic_shapes=shapes, strict=False)
    with torch.no_grad():
        y = module(x)
        assert y.std() > 1e-3
        torch.testing.assert_close(program.module()(x), y, rtol=0, atol=1e-5)


def check_compile(module: nn.Module, x: Tensor) -> None:
    """Without a break in the graph, compiled is the same as not: output, gradients and statistics."""
    torch._dynamo.reset()
    other = copy.deepcopy(module.double())
    outputs = [module(x), torch.compile(other, backend="aot_eager", fullgraph=True)(x)]
    assert outputs[0].std() > 1e-3
    for y in outputs:
        (y * random(*y.shape, seed=1)).sum().backward()
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-9)
    for (name, p), q in zip(module.named_parameters(), other.parameters(), strict=True):
        assert_close(q.grad, p.grad, 1e-9, f"gradient of {name}")
    for (name, p), q in zip(module.named_buffers(), other.buffers(), strict=True):
        assert_close(q, p, 1e-9, name)


@pytest.mark.parametrize("attention", lrfdyn.ATTENTIONS)
def test_exported_spikformer(attention):
    model = build("spikformer", attention)
    check_export(model, images(model, 3))


@pytest.mark.parametrize("attention", lrfdyn.ATTENTIONS)
def test_exported_stage_of_sdt_v3(attention):
    stage = build("sdt_v3", attention).stages[-1]
    check_export(stage, random(1, 3, 8, 2, 2, dtype=torch.float32), axis=1)


def test_exported_sdt_v3():
    model = build("sdt_v3", "lrf_dyn")
    check_export(model, images(model, 3))


def test_exported_dendrites_over_many_tokens():
    """They run as a Fourier transform."""
    (layer,) = (m for m in build("spikformer", "lrf_dyn").modules() if isinstance(m, Dendrites))
    check_export(layer, random(2, 3, 16, 9, 9, dtype=torch.float32), axis=1)


@pytest.mark.parametrize("attention", lrfdyn.ATTENTIONS)
def test_compiled_attention(attention):
    (layer,) = (m for m in build("spikformer", attention).modules() if isinstance(m, Attention))
    check_compile(layer, (random(2, 2, layer.dim, 4, 4) > 0).double())


@pytest.mark.parametrize("training", [False, True])
def test_compiled_spikformer(training):
    model = build("spikformer", "lrf_dyn").double().train(training)
    check_compile(model, images(model, 2))


def test_compiled_stage_of_sdt_v3():
    check_compile(build("sdt_v3", "lrf_dyn").stages[-1], random(1, 2, 8, 2, 2))
