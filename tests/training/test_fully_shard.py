"""`fully_shard` around a network of one's own, without a trainer: two processes have the gradients of one."""

from __future__ import annotations

import os
from importlib.util import find_spec

from tests.training.runs import torchrun

# Norms in evaluation: in training every process has those of its own images.
DRIVER = """
import copy, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from lrfdyn import create_attention
from lrfdyn.nn.layers import SpikingConv
from lrfdyn.nn.neurons import LIF
from lrfdyn.ops import dispatch

class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = SpikingConv(2, 8, LIF(), 3)
        options = {"dim": 8, "heads": 2, "grid": (3, 4), "dilations": (1,)}
        self.mixers = nn.ModuleList(create_attention(kind, **options) for kind in ("lrf_dyn", "lrf_ssa"))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.stem(x)
        for mixer in self.mixers:
            x = x + mixer(x)
        return self.head(x.mean((0, 3, 4)))

def gradients(network, x):
    (network(x) - 0.4).square().mean().backward()
    return {name: weight.grad for name, weight in network.named_parameters()}

def check(kernels, rank):
    dispatch._on_kernel_device = lambda tensor: kernels
    torch.manual_seed(0)
    network = Network().eval()
    for norm in (m for m in network.modules() if isinstance(m, nn.BatchNorm2d)):
        nn.init.normal_(norm.bias, mean=2.0, std=0.5)
    images = torch.randn(2, 4, 2, 3, 4)
    expected = gradients(copy.deepcopy(network), images)
    for part in (network.stem, *network.mixers, network):
        fully_shard(part)
    assert sum(isinstance(module, FSDPModule) for module in network.modules()) == 4
    for name, gradient in gradients(network, images[:, 2 * rank : 2 * rank + 2]).items():
        assert expected[name].any(), name
        torch.testing.assert_close(gradient.full_tensor(), expected[name], rtol=1e-4, atol=1e-6)

dist.init_process_group("gloo")
for form in sys.argv[1:]:
    check(form == "kernels", dist.get_rank())
    dist.barrier()
    if dist.get_rank() == 0:
        print(f"{form} agree", flush=True)
dist.destroy_process_group()
"""


def test_a_sharded_network_has_the_gradients_of_a_whole_one(tmp_path):
    driver, forms = tmp_path / "driver.py", ["definitions", "kernels"]
    driver.write_text(DRIVER)
    if os.environ.get("TRITON_INTERPRET") != "1" or find_spec("triton") is None:
        forms.remove("kernels")
    said = torchrun(str(driver), *forms)
    assert all(f"{form} agree" in said for form in forms)
