"""Several processes: the same numbers as one, and a run that survives the death of one of them."""

from __future__ import annotations

import warnings

import torch

from lrfdyn.training.processes import quiet_layouts
from tests.training.runs import STEPS, assert_same_end, final_state, tiny, torchrun, train, write_recipe

# float64, because a spiking network turns a rounding error at a threshold into a whole spike. No stochastic depth:
# every process draws its own.
EXACT = {"model": {"drop_path": 0.0}, "run": {"precision": "fp64"}}

DRIVER = """
import os, signal, sys
from pathlib import Path
from lrfdyn.training.recipes import load_recipe
from lrfdyn.training.reporter import Reporter
from lrfdyn.training.processes import leave_together
from lrfdyn.training.run import run_training

class Dies(Reporter):
    def step(self, trainer):
        first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if first and trainer.rank == 1 and trainer.done == 10:
            os.kill(os.getpid(), signal.SIGKILL)
    def say(self, message):
        print(message, flush=True)

run_training(load_recipe(Path(sys.argv[1])), Path(sys.argv[2]), recipe="tiny", reporter=Dies())
leave_together()
"""

# Weights, optimiser and moving average in shards, one half in each process, saved in full and restored.
SHARDS = """
import torch, torch.distributed as dist
from lrfdyn.training.processes import leave_together
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from lrfdyn.training import state
from lrfdyn.training.build import build_model
from lrfdyn.training.config import OptimizerConfig
from lrfdyn.training.optim import MovingAverage, build_optimizer
from lrfdyn.training.sync_norm import synchronize_norms
from tests.training.runs import tiny

dist.init_process_group("gloo")
rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))

def build():
    torch.manual_seed(0)
    model = synchronize_norms(build_model(tiny(), 10, 8, 1), torch.device("cpu"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, build_optimizer(model, OptimizerConfig(), 0.01), MovingAverage(model, 0.9)

def train(model, optimizer, average, steps):
    for step in steps:
        torch.manual_seed(2 * step + rank)
        loss = torch.nn.functional.cross_entropy(model(torch.randn(4, 1, 8, 8)), torch.randint(0, 10, (4,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update(100)

first, second = build(), build()
train(*first, range(2))
middle = [{name: value.clone() for name, value in state.training_tensors(*first).items()}]
dist.broadcast_object_list(middle)
train(*first, range(2, 4))
state.restore_training(middle[0], *second)
train(*second, range(2, 4))
ends = state.training_tensors(*first), state.training_tensors(*second)
if rank == 0:
    assert len(ends[0]) > 300 and ends[0].keys() == ends[1].keys()
    assert all(ends[0][name].equal(ends[1][name]) for name in ends[0])
    print("shards agree")
dist.barrier()
leave_together()
"""


def test_two_processes_equal_one_and_a_dead_one_leaves_no_trace(tmp_path):
    recipe = write_recipe(tmp_path / "tiny.yaml", **EXACT)
    one, two, killed = (tmp_path / name for name in ("one", "two", "killed"))
    train(tiny(**EXACT), one)
    torchrun("-m", "lrfdyn", "train", str(recipe), "--out", str(two))
    (expected, expected_meta, _), (tensors, meta, log) = final_state(one), final_state(two)
    assert (meta["processes"], meta["step"]) == (2, STEPS)
    assert tensors.keys() == expected.keys()
    for name, value in tensors.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-7, msg=lambda text, n=name: f"{n}: {text}")
    assert len(meta["random"]) == 2
    assert abs(meta["loss_sum"] - expected_meta["loss_sum"]) < 1e-9
    assert sum(record["kind"] == "epoch" for record in log) == 2

    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER)
    said = torchrun("--max_restarts", "1", str(driver), str(recipe), str(killed))
    assert "resuming at step 8" in said
    assert_same_end(killed, two)


def test_what_torch_says_of_equal_layouts_is_not_passed_on(recwarn):
    with quiet_layouts():
        warnings.warn("Grad strides do not match bucket view strides. This may", UserWarning, stacklevel=1)
        warnings.warn("something else", UserWarning, stacklevel=1)
    assert [str(warning.message) for warning in recwarn] == ["something else"]


def test_shards_are_saved_whole_and_restored(tmp_path):
    driver = tmp_path / "driver.py"
    driver.write_text(SHARDS)
    assert "shards agree" in torchrun(str(driver))
