"""What is exported is the model itself, for every host and attention."""

from __future__ import annotations

import math

import pytest
import torch

from lrfdyn.attention.lrf_dyn import COUPLINGS, Dendrites
from lrfdyn.deploy.export.exportable import RowDendrites, UnrolledNeuron, exportable_model
from lrfdyn.errors import LrfdynError
from lrfdyn.ops.dendrite import dendrite
from lrfdyn.ops.lif import Dynamics, lif_reference
from tests.conftest import assert_close, random
from tests.deploy.small import HOSTS, KINDS, side, small

CASES = [
    (host, kind) for host in HOSTS for kind in ((None,) if host.endswith("resnet") else KINDS)
]  # the residual networks have no attention


@pytest.mark.parametrize(("host", "kind"), CASES)
def test_form_is_the_model(host, kind):
    model = small(host, kind).double()
    form = exportable_model(model, side(host, model))
    images = random(4, model.in_channels, *side(host, model))
    with torch.no_grad():
        expected = model(images)
        assert expected.std(0).max() > 1e-3
        assert_close(form(images), expected, 1e-9, "logits")
    left = [type(m).__name__ for m in form.modules() if isinstance(m, (Dendrites, torch.nn.BatchNorm2d))]
    assert left == (["BatchNorm2d"] * len(left) if kind == "vsa" else [])  # behind the softmax there is no convolution
    assert any(isinstance(m, Dendrites) for m in model.modules()) == (kind or "").startswith("lrf_dyn")


@pytest.mark.parametrize("host", HOSTS)
def test_form_takes_films(host):
    model = small(host, time_steps=3).double()
    film = random(2, 3, model.in_channels, *side(host, model))
    with torch.no_grad():
        found = exportable_model(model, side(host, model))(film)
        assert_close(found, model(film.transpose(0, 1)), 1e-9, "logits")
        assert (found - exportable_model(model, side(host, model))(film[:, 0])).abs().max() > 1e-3  # not one frame


@pytest.mark.parametrize(("host", "token"), [("spikformer", "qkv"), ("sdt_v3", "value")])
def test_form_of_two_directions_is_the_model(host, token):
    model = small(host, "lrf_dyn", attention_options={"token": token, "directions": 2}).double()
    images = random(4, model.in_channels, *side(host, model))
    with torch.no_grad():
        assert_close(exportable_model(model, side(host, model))(images), model(images), 1e-9, "logits")


@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("grid", [(1, 1), (1, 5), (2, 3), (3, 2), (4, 4), (5, 7), (6, 1), (14, 14)], ids=str)
@pytest.mark.parametrize("coupling", COUPLINGS)
def test_dendrites_in_rows(coupling, grid, directions):
    torch.manual_seed(0)
    layer = Dendrites(3, 6, 5, directions, coupling).double()
    u = random(2, 3, 3, *grid)
    expected, _ = dendrite(u.flatten(0, 1).flatten(2).mT, *layer.modes(grid[1]), form="step")
    with torch.no_grad():
        rows = RowDendrites(layer, grid)
        found = rows(u)
    assert_close(found.flatten(0, 1).flatten(2).mT, expected.detach(), 1e-9, "potentials")
    assert len(rows.strides) == math.ceil(math.log2(max(grid[0] - 1, 1)))  # and no matrix that nothing is carried with


@pytest.mark.parametrize(
    "dynamics",
    [
        Dynamics.lif(),
        Dynamics.lif(tau=3.0, threshold=0.5),
        Dynamics.lif(v_reset=0.2),
        Dynamics.paper_lif(),
        Dynamics.integrate_and_fire(v_reset=-0.1),
        Dynamics.ms_lif(),
    ],
    ids=["lif", "tau3", "reset", "paper", "if", "ms"],
)
@pytest.mark.parametrize("steps", [1, 5])
def test_unrolled_neuron(dynamics, steps):
    x = 2 * random(steps, 50)
    expected = lif_reference(x, dynamics)[0]
    assert 0 < expected.mean() < 1
    assert torch.equal(UnrolledNeuron(dynamics)(x), expected)
    repeated = x[:1].expand(4, -1)
    assert torch.equal(UnrolledNeuron(dynamics)(repeated), lif_reference(repeated, dynamics)[0])


def test_neurons_over_the_batch_are_refused():
    model = small("qkformer", "ssa", legacy_neuron_axis=True)
    with pytest.raises(LrfdynError, match="BatchAsTimeLIF, which mixes the images of a batch"):
        exportable_model(model, (16, 16))
