"""Several processes: the same numbers as one, and a run that survives the death of one of them, or of a machine."""

from __future__ import annotations

import random
import signal
import socket
import subprocess
import threading
import time
import warnings
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from lrfdyn.training.optim import without_warning
from lrfdyn.training.processes import fresh_prefix, seed_generators
from lrfdyn.training.trainer import OTHER_LAYOUT
from tests.training.runs import assert_same_end, ending, final_state, start, tiny, torchrun, train, write_recipe

# float64, because a spiking network turns a rounding error at a threshold into a whole spike. No stochastic depth:
# every process draws its own.
EXACT = {
    "model": {"drop_path": 0.0},
    "schedule": {"stages": [{"epochs": 1, "time_steps": 2, "tau": 1.5}]},
    "run": {"precision": "fp64", "batch_size": 256, "checkpoint_steps": 3},
}
STEPS = 10  # 2 epochs of 1,437 images in batches of 256

# Kills once what the last argument says: the second process, or one of a node that may die, with the torchrun above it.
DRIVER = """
import os, signal, sys
from pathlib import Path
from lrfdyn.training.recipes import load_recipe
from lrfdyn.training.logs import Reporter
from lrfdyn.training.processes import leave_together
from lrfdyn.training.run import run_training

recipe, out, victim = sys.argv[1:]

class Dies(Reporter):
    def step(self, trainer):
        died = Path(recipe + victim)
        mortal = "MORTAL" in os.environ if victim == "node" else trainer.rank == 1
        if mortal and trainer.done == 7 and not died.exists():
            died.touch()
            if victim == "node":
                os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
    def say(self, message):
        print(message, flush=True)

# Asked to discard a run, it must not discard its own when it comes back. A node on its own cannot tell.
choice = {"resume": "auto"} if victim == "node" else {"restart": True}
run_training(load_recipe(Path(recipe)), Path(out), recipe="tiny", reporter=Dies(), **choice)
leave_together()
"""


def test_every_seed_and_process_draws_its_own_numbers():
    drawn = set()
    for seed, rank in ((0, 0), (0, 1), (1, 0), (1, 1)):
        seed_generators(seed, rank)
        drawn |= {float(torch.rand(())), random.random(), float(np.random.rand())}
    assert len(drawn) == 12


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run by two processes that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole")
    recipe = write_recipe(folder / "tiny.yaml", **EXACT)
    torchrun("-m", "lrfdyn", "train", str(recipe), "--out", str(folder / "run"))
    return folder / "run"


@pytest.fixture
def driver(tmp_path):
    path = tmp_path / "driver.py"
    path.write_text(DRIVER)
    return [str(path), str(write_recipe(tmp_path / "tiny.yaml", **EXACT)), str(tmp_path / "run")]


def test_two_processes_equal_one(whole, tmp_path):
    train(tiny(**EXACT), tmp_path)
    (expected, expected_meta, _), (tensors, meta, log) = final_state(tmp_path), final_state(whole)
    assert (meta["processes"], meta["step"]) == (2, STEPS)
    assert tensors.keys() == expected.keys()
    for name, value in tensors.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-7, msg=lambda text, n=name: f"{n}: {text}")
    assert len(meta["random"]) == 2
    assert abs(meta["loss_sum"] - expected_meta["loss_sum"]) < 1e-9
    assert sum(record["kind"] == "epoch" for record in log) == 2


def test_a_process_that_dies_leaves_no_trace(whole, driver):
    assert "resuming at step 6" in torchrun("--max_restarts", "1", *driver, "process")
    assert_same_end(Path(driver[2]), whole, STEPS)


class Nodes:
    """On this machine, of one process each."""

    def __init__(self, driver: list[str], victim: str) -> None:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            self.endpoint = free.getsockname()
        meeting = ["--local_addr", "localhost", "--rdzv_backend", "c10d", "--rdzv_id", "nodes"]
        meeting += ["--rdzv_endpoint", f"localhost:{self.endpoint[1]}"]
        self.arguments = ["--nnodes", "2", "--nproc_per_node", "1", "--max_restarts", "3", *meeting, *driver, victim]

    def start(self, **environment: str) -> subprocess.Popen[str]:
        return start("torch.distributed.run", *self.arguments, **environment)

    def wait_for_the_first(self) -> None:
        """It has the store at which they meet."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with suppress(OSError), socket.create_connection(self.endpoint, 1):
                return
            time.sleep(0.05)
        raise TimeoutError


def test_a_process_that_dies_on_one_of_two_nodes_leaves_no_trace(whole, driver):
    """The nodes count restarts differently: one has seen a failure, the other a neighbour that came back."""
    nodes = Nodes(driver, "process")
    both = [nodes.start(), nodes.start()]
    assert "resuming at step 6" in "".join(map(ending, both))
    assert_same_end(Path(driver[2]), whole, STEPS)


def test_a_node_that_dies_and_comes_back_leaves_no_trace(whole, driver):
    nodes, alone = Nodes(driver, "node"), {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    first = nodes.start(**alone)
    nodes.wait_for_the_first()
    ending(nodes.start(MORTAL="1", **alone), code=-signal.SIGKILL)
    second = nodes.start(**alone)
    assert "resuming at step 6" in ending(first) + ending(second)
    assert_same_end(Path(driver[2]), whole, STEPS)


def test_processes_share_a_prefix_that_the_dead_did_not_have():
    store, prefixes = dist.HashStore(), []
    for _ in range(3):
        found: dict[int, str] = {}

        def join(rank: int, found: dict[int, str] = found) -> None:
            found[rank] = fresh_prefix(store, rank, 3)

        members = [threading.Thread(target=join, args=(rank,), daemon=True) for rank in range(3)]
        members[0].start()
        members[0].join(0.1)  # it reads what the dead asked before the living do
        for member in members[1:]:
            member.start()
        for member in members:
            member.join(20)
        assert len(found) == 3
        (prefix,) = {*found.values()}
        prefixes.append(prefix)
    assert len({*prefixes}) == 3


def test_what_torch_says_of_equal_layouts_is_not_passed_on(recwarn):
    with without_warning(OTHER_LAYOUT):
        warnings.warn("Grad strides do not match bucket view strides. This may", UserWarning, stacklevel=1)
        warnings.warn("something else", UserWarning, stacklevel=1)
    assert [str(warning.message) for warning in recwarn] == ["something else"]
