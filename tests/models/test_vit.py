"""The vision transformer without spikes: a ViT of PyTorch's own layers in numbers, and what spikes are expected by."""

from __future__ import annotations

import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lrfdyn
from lrfdyn import LrfdynError, analysis, create_model, swap_attention
from lrfdyn.cli import main
from lrfdyn.deploy import compile_for_inference, quantize
from lrfdyn.models import Spikformer, ViT
from lrfdyn.sources import find_source
from lrfdyn.training.recipes import load_recipe
from tests.models.host_checks import (
    check_drop_path,
    check_event_frames,
    check_feature_maps,
    check_step_logits,
    randomize,
)

POOLING = (False, False, True, True)


def small(**options) -> ViT:
    torch.manual_seed(0)
    arguments = {"dim": 32, "depth": 2, "heads": 2, "image_size": 16, "num_classes": 5, "pooling": POOLING}
    return ViT(**{**arguments, **options})


def torch_vit(model: ViT, images: Tensor) -> Tensor:
    """The same network of PyTorch's layers, with the weights of `model`."""

    def conv(layer, x):
        return F.relu(layer.bn(F.conv2d(x, layer.conv.weight, None, padding=1)))

    x = images
    for layer, pool in zip(model.stem.stages, POOLING, strict=True):
        x = conv(layer, x)
        x = F.max_pool2d(x, 3, 2, 1) if pool else x
    x = (x + conv(model.stem.rpe, x)).flatten(2).mT
    for block in model.blocks:
        dim, hidden = x.shape[-1], block.mlp[0].conv.out_channels
        layer = nn.TransformerEncoderLayer(dim, 2, hidden, 0.0, "gelu", batch_first=True, norm_first=True).to(x).eval()
        attn, linears = block.attn, (block.attn.q.conv, block.attn.k.conv, block.attn.v.conv)
        weights = {
            "self_attn.in_proj_weight": torch.cat([one.weight.flatten(1) for one in linears]),
            "self_attn.in_proj_bias": torch.cat([one.bias for one in linears]),
        }
        pairs = {"self_attn.out_proj": attn.proj.conv, "linear1": block.mlp[0].conv, "linear2": block.mlp[2].conv}
        pairs |= {"norm1": block.norm1, "norm2": block.norm2}
        for name, own in pairs.items():
            matrix = own.weight.flatten(1) if own.weight.dim() > 1 else own.weight
            weights |= {f"{name}.weight": matrix, f"{name}.bias": own.bias}
        layer.load_state_dict(weights)
        x = layer(x)
    return model.head(F.layer_norm(x, x.shape[-1:], model.norm.weight, model.norm.bias).mean(1))


def test_numbers_are_those_of_pytorch_s_own_layers():
    model = small()
    randomize(model)
    model = model.double().eval()
    images = torch.randn(3, 3, 16, 16, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(model(images), torch_vit(model, images), atol=1e-9, rtol=0)


def test_size_is_that_of_spikformer():
    with torch.device("meta"):
        ours, spiking = create_model("vit_4_384"), create_model("spikformer_4_384")
    assert ours.grid == spiking.grid
    for key in ("dim", "depth", "heads", "mlp_ratio", "pooling", "image_size", "num_classes"):
        assert ours.config[key] == spiking.config[key]
    counts = [sum(parameter.numel() for parameter in model.parameters()) for model in (ours, spiking)]
    assert abs(counts[0] / counts[1] - 1) < 0.01


def test_trains_and_has_maps_and_takes_frames():
    model = small().double().train()
    logits = model(torch.randn(2, 3, 16, 16, dtype=torch.float64))
    (logits * torch.randn_like(logits)).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        # What is added to all keys changes no softmax.
        assert (parameter.grad.abs().max() > 1e-12) != name.endswith("attn.k.conv.bias"), name
    check_feature_maps(small(pooling=(True,) * 4, image_size=32), (64, 32))
    check_event_frames(small(), (16, 16))
    check_step_logits(small(), (16, 16))
    check_drop_path(lambda **options: small(**{k: v for k, v in options.items() if k != "time_steps"}), (16, 16))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention": "ssa"}, "attention: 'ssa' works on spikes, and this network has none"),
        ({"attention": "lrf_dyn"}, "attention: 'lrf_dyn' works on spikes"),
        ({"time_steps": 4}, "time_steps: a network without spikes shows an image once; expected 1, got 4"),
    ],
)
def test_what_needs_spikes_is_one_line(options, message):
    with pytest.raises(LrfdynError, match=message):
        small(**options)
    if "attention" in options:
        model = small()
        with pytest.raises(LrfdynError, match=message):
            swap_attention(model, options["attention"])
        assert model.config["attention"] == "vsa"


def test_attention_weights_are_those_of_the_softmax():
    model, images = small().eval(), torch.randn(2, 3, 16, 16)
    maps = analysis.attention_maps(model, images, [(1, 2)])["maps"]
    seen = {}
    attn = model.blocks[0].attn
    for name in ("q", "k"):
        getattr(attn, name).register_forward_hook(lambda _m, _a, y, name=name: seen.update({name: y[0]}))
    with torch.no_grad():
        model(images)
    q, k = (seen[name].flatten(2).unflatten(1, (2, 16)).mT for name in ("q", "k"))
    wanted = (q @ k.mT / 4).softmax(-1).mean(1)[:, 1 * 4 + 2]
    found = torch.tensor([image[0]["by_layer"][0] for image in maps]).flatten(1)
    torch.testing.assert_close(found, wanted, atol=2e-6, rtol=0)
    local = analysis.locality(model, images)
    assert 0 < local["short_range_share"] < 1
    assert local["queries_without_weight"] == 0


def test_energy_counts_multiplications_and_no_neuron_fires():
    model, images = small().eval(), torch.randn(2, 3, 16, 16)
    assert analysis.firing_rates(model, images) == {"mean": None, "by_layer": {}}
    record = analysis.energy(model, images)
    assert record["accumulates"] == 0
    macs = {layer["name"]: layer["multiply_accumulates"] for layer in record["layers"]}
    tokens, dim = 16, 32
    assert macs["blocks.0.attn.q k^T"] == macs["blocks.1.attn.softmax v"] == tokens**2 * dim
    assert macs["blocks.0.mlp.0.conv"] == 4 * tokens * dim**2
    assert sum(term["bytes"] for term in analysis.attention_state(model)) == 4 * (2 * tokens**2 + 3 * tokens * dim)


def test_low_memory_inference_and_files_give_the_same(tmp_path):
    model, images = small().eval(), torch.randn(2, 3, 16, 16)
    model.save_pretrained(tmp_path)
    with torch.inference_mode():
        logits = model(images)
        torch.testing.assert_close(compile_for_inference(model)(images), logits)
        assert torch.equal(find_source(tmp_path).load()(images), logits)


def test_it_has_no_form_in_integers():
    model = small()
    model(torch.randn(4, 3, 16, 16))  # the norms take statistics
    with pytest.raises(LrfdynError, match="cannot be computed in integers"):
        quantize(model.eval())


def test_commands_know_that_it_takes_one_attention(capsys):
    assert main(["models", "vit_4_384", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["attentions"] == ["vsa"]
    assert main(["models", "*_4_384", "--attention", "ssa", "--json"]) == 0  # the others are counted with it
    listed = {row["name"]: row["attention"] for row in json.loads(capsys.readouterr().out)}
    assert (listed["vit_4_384"], listed["spikformer_4_384"]) == ("vsa", "ssa")
    assert main(["models", "vit_4_384", "--attention", "ssa"]) == 2
    assert "attention: vit_4_384 has vsa alone, got 'ssa'" in capsys.readouterr().err
    assert Spikformer.attentions() == list(lrfdyn.ATTENTIONS)


def test_recipe_differs_from_that_of_spikformer_in_the_model_alone():
    pytest.importorskip("yaml")
    ours, spiking = (load_recipe(f"cifar100_{name}").as_dict() for name in ("vit", "spikformer"))
    assert ours.pop("model") | {"name": "", "attention": None, "time_steps": 4} == spiking.pop("model") | {"name": ""}
    assert ours == spiking
    assert math.isclose(ours["optimizer"]["learning_rate"], 5e-4)
