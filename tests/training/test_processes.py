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
