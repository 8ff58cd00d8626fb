"""Folding batch norms changes no number beyond rounding."""

from __future__ import annotations

import pytest
import torch

from lrfdyn import LrfdynError, create_model
from lrfdyn.convert.fold import fold_batch_norm


@pytest.mark.parametrize(
    ("attention", "chosen"), [*((kind, {}) for kind in ("ssa", "lrf_ssa", "lrf_dyn")), ("lrf_dyn", {"directions": 2})]
)
@pytest.mark.parametrize("name", ["spikformer_4_384", "qkformer_4_384"])
def test_folded_model_gives_the_same_logits(name, attention, chosen):
    torch.manual_seed(0)
    options = {"dim": 32, "depth": 3, "heads": 2, "image_size": 16, "num_classes": 5, "time_steps": 2}
    model = create_model(name, attention=attention, **options, **chosen).double()
    images = torch.randn(4, 3, 16, 16, dtype=torch.float64)
    for _ in range(3):  # running statistics that differ from 0 and 1
        model(images)
    model.eval()
    folded = fold_batch_norm(model)
    torch.testing.assert_close(folded(images), model(images), rtol=1e-9, atol=1e-9)
    assert not any(isinstance(m, torch.nn.BatchNorm2d) for m in folded.modules())


def test_training_mode_cannot_be_folded():
    model = create_model("spikformer_4_384", dim=16, depth=1, heads=1)
    with pytest.raises(LrfdynError, match="evaluation mode"):
        fold_batch_norm(model)
