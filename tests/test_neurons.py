"""Neurons as modules: the right member of the family by default, options passed on, no memory between calls."""

from __future__ import annotations

import pytest
import torch

from lrfdyn.errors import LrfdynError
from lrfdyn.nn.neurons import IF, LIF, MSLIF, IntegerSpike, Neuron, PaperLIF, SpikingNeuron
from lrfdyn.ops.lif import Dynamics, lif_reference
from tests.conftest import assert_same, random, shape_id

ALL = {
    "lif": (LIF, Dynamics(0.5, 0.5, 1.0, 1.0, 0.0, False, "sigmoid", 4.0, True)),
    "if": (IF, Dynamics(1.0, 1.0, 1.0, 1.0, 0.0, False, "atan", 2.0, True)),
    "paper": (PaperLIF, Dynamics(1.0, 1.0, 0.5, 1.0, 0.0, False, "sigmoid", 4.0, True)),
    "ms": (MSLIF, Dynamics(1.0, 1.0, 0.25, 0.5, 0.0, True, "rectangle", 1.0, True)),
}
every = pytest.mark.parametrize("name", ALL)


@every
@pytest.mark.parametrize("shape", [(1, 1, 1), (4, 2, 3, 5, 5)], ids=shape_id)
def test_defaults(name, shape):
    make, dynamics = ALL[name]
    neuron = make()
    assert isinstance(neuron, Neuron)
    assert neuron.dynamics == dynamics
    assert_same(neuron, lambda x: lif_reference(x, dynamics)[0], [1.5 * random(*shape)])


@every
def test_options_reach_the_dynamics(name):
    make, _ = ALL[name]
    other = {"threshold": 0.7, "v_reset": -0.2, "surrogate": "atan", "alpha": 3.0, "detach_reset": False}
    dynamics = make(**other).dynamics
    assert {key: getattr(dynamics, key) for key in other} == other


def test_decay_options():
    lif = LIF(tau=4.0).dynamics
    assert (lif.leak, lif.gain) == (0.75, 0.25)
    assert PaperLIF(decay=0.3).dynamics.decay == 0.3
    assert MSLIF(decay=0.3, strict=False).dynamics == Dynamics.ms_lif(0.3, 0.5, strict=False)
    assert SpikingNeuron(Dynamics(leak=0.9)).dynamics.leak == 0.9


@every
def test_every_call_starts_at_rest(name):
    neuron, x = ALL[name][0](), random(4, 3, 5)
    first = neuron(x)
    neuron(5 * random(4, 3, 5, seed=1))
    assert torch.equal(neuron(x), first)
    assert not neuron.state_dict()


def test_samples_do_not_see_each_other():
    # The neuron walks time, the first axis, and nothing else.
    x, neuron = 1.5 * random(4, 3, 5), LIF()
    assert torch.equal(neuron(x)[:, 1:2], neuron(x[:, 1:2]))
    assert torch.equal(neuron(x)[:2], neuron(x[:2]))


def test_integer_spike():
    x = torch.tensor([[-1.0, 0.5, 1.5, 2.2, 7.0]])
    assert isinstance(IntegerSpike(), Neuron)
    assert IntegerSpike()(x).tolist() == [[0, 0, 0.5, 0.5, 1]]
    assert IntegerSpike(normalize=False)(x).tolist() == [[0, 0, 2, 2, 4]]
    assert IntegerSpike(levels=2)(x).tolist() == [[0, 0, 1, 1, 1]]


def test_printed_form_tells_neurons_apart():
    neurons = [make() for make, _ in ALL.values()] + [LIF(0.5), IntegerSpike(), IntegerSpike(8)]
    assert len({repr(neuron) for neuron in neurons}) == len(neurons)


@pytest.mark.parametrize(
    ("make", "options", "argument"),
    [(LIF, {"tau": 0.5}, "tau"), (IF, {"alpha": -1.0}, "alpha"), (MSLIF, {"surrogate": "step"}, "surrogate")],
)
def test_bad_input_names_the_argument(make, options, argument):
    with pytest.raises(LrfdynError, match=rf"^{argument}: "):
        make(**options)
