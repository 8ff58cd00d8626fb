"""Models whose weights are stored in a smaller type than they have."""

from __future__ import annotations

import json

import pytest
import torch

import lrfdyn
from lrfdyn.errors import LrfdynError
from lrfdyn.io.hub import CARD_FILE, CONFIG_FILE, WEIGHTS_FILE
from lrfdyn.io.weights import load_tensors
from lrfdyn.models import Spikformer
from tests.models.host_checks import randomize


def test_stored_weights_are_the_rounded_ones(tmp_path):
    model = randomize(Spikformer(dim=16, depth=1, heads=2, image_size=16, in_channels=1, attention="lrf_dyn")).eval()
    model.save_pretrained(tmp_path, dtype=torch.bfloat16, description="Of a test.")
    loaded = lrfdyn.from_pretrained(tmp_path)
    rounded = {
        name: value.bfloat16().float() if value.is_floating_point() else value
        for name, value in model.state_dict().items()
    }
    assert any(not torch.equal(value, rounded[name]) for name, value in model.state_dict().items())
    model.load_state_dict(rounded)
    for name, value in loaded.state_dict().items():
        assert value.dtype == rounded[name].dtype
        assert torch.equal(value, rounded[name]), name
    images = torch.randn(2, 1, 16, 16)
    assert torch.equal(loaded(images), model(images))
    loaded.save_pretrained(tmp_path / "again")  # it is as it was, and so keeps its description
    assert "Of a test." in (tmp_path / "again" / CARD_FILE).read_text()


def test_types_that_weights_cannot_have(tmp_path):
    model = Spikformer(dim=8, depth=1, heads=1, image_size=16)
    with pytest.raises(LrfdynError, match=r"^dtype: expected one of float32, .*, got torch\.int8"):
        model.save_pretrained(tmp_path, dtype=torch.int8)
    with torch.no_grad():
        model.head.weight[0, 0] = 1e6
    with pytest.raises(LrfdynError, match=r"^dtype: torch\.float16 cannot hold head\.weight"):
        model.save_pretrained(tmp_path, dtype=torch.float16)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / CONFIG_FILE).read_text()) | {"dtype": "int8"}
    tensors, _ = load_tensors(tmp_path / WEIGHTS_FILE)
    lrfdyn.io.save_tensors(tmp_path / WEIGHTS_FILE, tensors, config)
    (tmp_path / CONFIG_FILE).write_text(json.dumps(config))
    with pytest.raises(LrfdynError, match=r"dtype: expected one of float32, .*, got 'int8'"):
        lrfdyn.from_pretrained(tmp_path)
