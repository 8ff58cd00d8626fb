"""Folding batch norms changes no number beyond rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lrfdyn import LrfdynError, create_model
from lrfdyn.convert.fold import fold_batch_norm

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "ssa": ("ssa", {}),
    "lrf_ssa": ("lrf_ssa", {}),
    "lrf_ssa-norm": ("lrf_ssa", {"norm": True}),
    "lrf_ssa-norm-scale": ("lrf_ssa", {"norm": True, "scale_lrf": True}),
    "lrf_dyn": ("lrf_dyn", {}),
    "lrf_dyn-two": ("lrf_dyn", {"directions": 2}),
    "lrf_dyn-two-same": ("lrf_dyn", {"directions": 2, "coupling": "same"}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["spikformer_4_384", "qkformer_4_384"])
def test_folded_model_gives_the_same_logits(name, kind):
    torch.manual_seed(0)
    attention, own = KINDS[kind]
    options = {"dim": 32, "depth": 3, "heads": 2, "image_size": 16, "num_classes": 5, "time_steps": 2}
    model = create_model(name, attention=attention, **options, **own).double()
    images = torch.randn(4, 3, 16, 16, dtype=torch.float64)
    for _ in range(3):  # running statistics that differ from 0 and 1
        model(images)
    model.eval()
    folded = fold_batch_norm(model)
    torch.testing.assert_close(folded(images), model(images), rtol=1e-9, atol=1e-9)
    assert not any(isinstance(m, torch.nn.BatchNorm2d) for m in folded.modules())


def test_the_norm_of_stencils_goes_into_them_and_a_shift():
    """Currents too, where a spike would hide a difference; the mixing matrix of the analysis stays what it was."""
    torch.manual_seed(0)
    options = {"dim": 16, "depth": 1, "heads": 2, "image_size": 16}
    model = create_model("spikformer_4_384", attention="lrf_ssa", norm=True, **options).double()
    norm = model.blocks[0].attn.lrf.norm
    for value in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
        torch.nn.init.uniform_(value, 0.5, 2.0)
    layer, folded = model.eval().blocks[0].attn, fold_batch_norm(model).blocks[0].attn
    spikes = [(torch.rand(2, 1, 16, 4, 4, dtype=torch.float64) < 0.5).double() for _ in range(3)]
    torch.testing.assert_close(folded.mix(*spikes), layer.mix(*spikes), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(folded.lrf.stencils(), layer.lrf.stencils(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(folded.lrf.weight, layer.lrf.stencils(), rtol=1e-12, atol=1e-12)
    weights = [next(a.mixing_weights(dict(zip("qkv", spikes, strict=True)), (4, 4), 2**20))[1] for a in (layer, folded)]
    torch.testing.assert_close(*weights)


def test_training_mode_cannot_be_folded():
    model = create_model("spikformer_4_384", dim=16, depth=1, heads=1)
    with pytest.raises(LrfdynError, match="evaluation mode"):
        fold_batch_norm(model)
