"""What SDT-V3 alone has: integer spikes, which equal binary steps."""

from __future__ import annotations

import pytest
import torch

from lrfdyn.nn.layers import ConvBN, MembraneConv
from lrfdyn.nn.neurons import IntegerSpike
from tests.conftest import binary_steps
from tests.models.host_checks import check_trains, randomize, small_model


def test_gated_tokens_train_with_wide_values():
    torch.manual_seed(0)
    check_trains(small_model("sdt_v3", attention="lrf_dyn", attention_options={"token": "qkv"}), (32, 32))


def test_neurons_of_lrf_dyn_are_the_ordinary_ones():
    model = small_model("sdt_v3", attention="lrf_dyn", levels=3)
    neurons = [m for m in model.modules() if isinstance(m, IntegerSpike)]
    assert {n.levels for n in neurons} == {3}
    assert [n.normalize for n in neurons].count(False) == 1
    assert model.neuron in neurons
    assert not model.neuron.normalize


def test_frames_are_independent_and_their_logits_averaged():
    torch.manual_seed(0)
    model = randomize(small_model("sdt_v3")).double().eval()
    frames = torch.randn(3, 2, 3, 32, 32, dtype=torch.float64)
    with torch.no_grad():
        one_by_one = torch.stack([model(frame) for frame in frames])
        torch.testing.assert_close(model(frames), one_by_one.mean(0), rtol=0, atol=1e-10)


@pytest.mark.parametrize("levels", [1, 3, 4])
def test_an_integer_spike_is_that_many_binary_steps(levels):
    """Every convolution behind an integer neuron, fed with binary steps and averaged, gives what the network has."""
    torch.manual_seed(0)
    model = randomize(small_model("sdt_v3", levels=levels)).double().eval()
    seen: dict[MembraneConv, list[torch.Tensor]] = {}
    for module in model.modules():
        if isinstance(module, MembraneConv):
            module.neuron.register_forward_hook(lambda _m, _args, out, layer=module: seen.update({layer: [out]}))
            module.register_forward_hook(lambda layer, _args, out: seen[layer].append(out))
    with torch.no_grad():
        model(torch.randn(2, 3, 32, 32, dtype=torch.float64))
        assert seen
        for layer, (spikes, output) in seen.items():
            steps = binary_steps(spikes, levels)
            assert set(steps.unique().tolist()) == {0, 1}
            averaged = torch.stack([ConvBN.forward(layer, step) for step in steps]).mean(0)
            torch.testing.assert_close(averaged, output, rtol=0, atol=1e-12)
