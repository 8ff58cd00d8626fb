"""The bits that spikes come with: who has them, who has not, and that nobody but the next layer can tell."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from lrfdyn.nn.layers import SpikingConv
from lrfdyn.nn.neurons import LIF
from lrfdyn.ops import dispatch
from lrfdyn.ops.bits import split_spikes, step_bits_of, with_step_bits
from lrfdyn.ops.bits_triton import unpack_steps
from lrfdyn.ops.dispatch import plain_operations
from lrfdyn.ops.lif import Dynamics, lif
from tests.ops.kernels import close, rand

pytestmark = pytest.mark.gpu
STEPS = 3


@pytest.fixture(autouse=True)
def kernels_everywhere(monkeypatch):
    """Kernels run in Triton's interpreter where there is no GPU."""
    monkeypatch.setattr(dispatch, "_on_kernel_device", lambda tensor: True)


def currents(seed=0):
    return 2 * rand(STEPS, 2, 4, 4, 8, seed=seed).permute(0, 1, 4, 2, 3)


def fired():
    """Spikes `[T, B, C, H, W]` with their bits."""
    spikes = lif(currents(), Dynamics.lif(threshold=0.3))[0]
    assert holds_bits_of(spikes, spikes)
    return spikes


def holds_bits_of(x, spikes):
    bits = step_bits_of(x)
    return bits is not None and torch.equal(unpack_steps(bits, STEPS, spikes.dtype), spikes)


def stored(spikes):
    file = io.BytesIO()
    torch.save(spikes, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


COMPUTED = {
    "sum": lambda x: x + x,
    "product": lambda x: x * 1,
    "other type": lambda x: x.to(torch.float64),
    "clone": torch.clone,
    "detach": torch.detach,
    "view": lambda x: x.view_as(x),
    "part": lambda x: x[:, :1],
    "transposed": lambda x: x.transpose(1, 2),
    "joined": lambda x: torch.cat((x, x)),
    "empty like it": torch.empty_like,
}
COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "torch.save": stored,
}


@pytest.mark.parametrize("result", COMPUTED)
def test_what_is_computed_from_spikes_is_an_ordinary_tensor(result):
    spikes = fired()
    y = COMPUTED[result](spikes)
    assert type(spikes) is type(y) is torch.Tensor
    assert not y.__dict__
    assert step_bits_of(y) is None
    assert holds_bits_of(spikes, spikes)


def test_what_returns_the_spikes_themselves_returns_them_with_bits():
    spikes = fired()
    assert spikes.to(spikes.dtype) is spikes
    assert nn.Identity()(spikes) is spikes
    assert holds_bits_of(spikes, spikes)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("how", COPIES)
def test_a_copy_has_the_spikes_and_no_bits(how, mode):
    """In whatever order spikes are copied and changed: of a copy nobody knows whose changes its bits are of."""
    spikes = fired()
    with mode():
        copied = COPIES[how](spikes)
        assert type(copied) is torch.Tensor
        assert torch.equal(copied, spikes)
        assert step_bits_of(copied) is None
        spikes.zero_()
        changed = COPIES[how](spikes)
        copied.zero_()
    assert [step_bits_of(x) for x in (spikes, changed, copied)] == [None] * 3


CHANGES = {
    "in place": lambda x: x.mul_(0),
    "through a view": lambda x: x[0].zero_(),
    "of the detached": lambda x: x.detach().zero_(),
    "by the last channels": lambda x: x[:, :, 4:].fill_(1),
    "copied into": lambda x: x.copy_(torch.ones_like(x)),
    "another memory": lambda x: x.set_(torch.ones_like(x)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_spikes_have_no_bits(change):
    spikes = fired()
    with torch.no_grad():
        CHANGES[change](spikes)
    assert step_bits_of(spikes) is None


def masked(module, inputs, spikes):
    return spikes * (torch.arange(8, device=spikes.device) < 4).view(8, 1, 1)


def erased(module, inputs, spikes):
    with torch.no_grad():
        spikes[:, :, 4:] = 0


def erased_and_returned(module, inputs, spikes):
    return spikes.mul_((torch.arange(8, device=spikes.device) < 4).view(8, 1, 1))


@pytest.mark.parametrize("hook", [masked, erased, erased_and_returned])
def test_a_hook_may_replace_or_change_spikes(hook):
    """The next layer keeps what it saw: its weight has no gradient where the hook took the spikes away."""
    torch.manual_seed(0)
    net, x = nn.Sequential(LIF(threshold=0.3), SpikingConv(8, 4, LIF(), 3)).to(currents().device), currents()
    seen = []
    net[0].register_forward_hook(lambda module, inputs, spikes: seen.append(type(spikes)))
    net[0].register_forward_hook(hook)
    net(x).sum().backward()
    gradient, net[1].conv.weight.grad = net[1].conv.weight.grad, None
    with plain_operations():
        net(x).sum().backward()
    close(gradient, net[1].conv.weight.grad, 1e-5, "gradient of the weight")
    assert not gradient[:, 4:].any()
    assert gradient[:, :4].any()
    assert seen == [torch.Tensor] * 2


def test_parts_of_spikes_have_the_parts_of_their_bits():
    spikes = fired()
    parts = split_spikes(spikes, [3, 5])
    assert all(holds_bits_of(part, part) for part in parts)
    assert torch.equal(torch.cat(parts, 2), spikes)
    with torch.no_grad():
        parts[0].zero_()  # the same memory
    assert [step_bits_of(x) for x in (spikes, *parts)] == [None] * 3
    assert [step_bits_of(x) for x in split_spikes(spikes, [3, 5])] == [None] * 2


def test_tensors_of_inference_mode_take_no_bits():
    """Nobody counts their changes."""
    bits = step_bits_of(fired())
    with torch.inference_mode():
        spikes = with_step_bits(fired_in_inference_mode(), bits)
    assert step_bits_of(spikes) is None


def fired_in_inference_mode():
    spikes = lif(currents(), Dynamics.lif(threshold=0.3))[0]
    assert spikes.is_inference()
    return spikes


@pytest.mark.parametrize("changed", [False, True])
def test_spikes_go_into_a_compiled_layer_as_any_tensor(changed):
    """It does not take the bits of what comes from outside, which may have been changed before the graph runs again."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    neuron, layer = LIF(threshold=0.3).to(currents().device), SpikingConv(8, 4, LIF(), 3).to(currents().device)
    compiled, grads = torch.compile(copy.deepcopy(layer), backend=backend, fullgraph=True), []
    for call in (compiled, layer):
        for seed in range(2):
            spikes = neuron(currents(seed).requires_grad_())
            if changed:
                with torch.no_grad():
                    spikes[:, :, 4:] = 0
            call(spikes).sum().backward()
        grads.append([p.grad for p in call.parameters()])
    for i, pair in enumerate(zip(*grads, strict=True)):
        close(*pair, 1e-5, f"gradient {i}")
    assert len(graphs) == 1
