"""Weights, optimiser and moving average in shards: what `accelerate launch --use_fsdp` does, on two processes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("accelerate")
from lrfdyn.errors import LrfdynError
from lrfdyn.io.weights import list_checkpoints
from lrfdyn.training.processes import keep_numbers
from tests.training.runs import assert_same_end, final_state, launch, tiny, train, write_recipe

# No stochastic depth: every process draws its own.
RUN = {"precision": "fp64", "batch_size": 256, "checkpoint_steps": 2}
STAGES = {"stages": [{"epochs": 1, "time_steps": 2, "tau": 1.5}]}
EXACT = {"model": {"drop_path": 0.0}, "schedule": STAGES, "run": RUN}
STEPS = 10  # 2 epochs of 1,437 images in batches of 256
SHORT = {"schedule": {"epochs": 1, "warmup_epochs": 0}}
MUON = {**EXACT, **SHORT, "optimizer": {"name": "muon", "ema_decay": None}}
HALF = {**EXACT, **SHORT, "run": {**RUN, "precision": "bf16"}}
TRUST = {
    **EXACT,
    **SHORT,
    "optimizer": {"name": "lamb", "ema_decay": None},
    "run": {**RUN, "accumulate": 2},
}

DRIVER = """
import sys
from pathlib import Path
from accelerate import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from lrfdyn.training import trainer
from lrfdyn.training.processes import build_accelerator, keep_numbers, leave_together
from lrfdyn.training.recipes import load_recipe
from lrfdyn.training.logs import Reporter
from lrfdyn.training.run import run_training
from lrfdyn.training.processes import Stop, Stopped

def build_sharding(run):
    # Accelerate shards on GPUs only. Told to, it does here what it does there.
    accelerator = build_accelerator(run)
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin()
    if run.precision == "bf16":
        accelerator.state.fsdp_plugin.set_mixed_precision("bf16")
    keep_numbers(accelerator.state.fsdp_plugin, run)
    return accelerator

class Watch(Reporter):
    def __init__(self, stop, at=0):
        self.stop, self.at = stop, at
    def start(self, trainer):
        units = sum(isinstance(module, FSDPModule) for module in trainer.model.modules())
        assert all(isinstance(weight, DTensor) for weight in trainer.model.parameters())
        trainer.say(f"{units} units")
    def step(self, trainer):
        if trainer.done == self.at:
            self.stop.deadline = 0.0
    def say(self, message):
        print(message, flush=True)

def train(recipe, out, at=0, **options):
    stop = Stop()
    watch = Watch(stop, at)
    run_training(load_recipe(Path(recipe)), Path(out), recipe="tiny", reporter=watch, stop=stop, **options)

trainer.build_accelerator = build_sharding
exact, *others, stopped = sys.argv[1:]
for recipe in (exact, *others):
    train(recipe, recipe + ".sharded")
try:
    train(exact, stopped, at=7)  # behind a test, which leaves weights whole
except Stopped as error:
    print(error, flush=True)
train(exact, stopped, resume="auto")
leave_together()
"""


def test_a_sharded_run_equals_one_that_is_not_and_goes_on_where_it_stopped(tmp_path):
    driver, stopped = tmp_path / "driver.py", tmp_path / "stopped"
    driver.write_text(DRIVER)
    settings = {"exact": EXACT, "half": HALF, "trust": TRUST, "muon": MUON}
    recipes = {name: write_recipe(tmp_path / name, **sections) for name, sections in settings.items()}
    blocks = ["--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP", "--fsdp_transformer_layer_cls_to_wrap", "Block"]
    options = ["--num_processes", "2", "--use_fsdp", "--fsdp_version", "2", *blocks]
    said = launch("accelerate.commands.launch", *options, str(driver), *map(str, recipes.values()), str(stopped))
    assert said.count("3 units") == 6, "two blocks and the rest"
    assert "stopped at step 7" in said
    assert "resuming at step 7" in said
    assert_same_end(stopped, tmp_path / "exact.sharded", STEPS)
    earlier = list_checkpoints(tmp_path / "exact.sharded" / "checkpoints")[1]
    train(tiny(**EXACT), tmp_path / "exact.alone", resume=str(earlier))
    for name, end in (("exact", "sharded"), ("exact", "alone"), ("trust", "sharded"), ("muon", "sharded")):
        whole = tmp_path / f"{name}.whole"
        if not whole.exists():
            train(tiny(**settings[name]), whole)
        (expected, _, _), (tensors, meta, _) = final_state(whole), final_state(tmp_path / f"{name}.{end}")
        assert meta["processes"] == (1 if end == "alone" else 2)
        torch.testing.assert_close(tensors, expected, rtol=1e-6, atol=1e-7)
    # Norms and loss in full precision, as without shards; later steps are not comparable, for a rounding is a spike.
    train(tiny(**HALF), tmp_path / "half.whole")
    (_, _, log), (tensors, _, sharded) = (final_state(tmp_path / f"half.{kind}") for kind in ("whole", "sharded"))
    assert sharded[0]["loss"] == pytest.approx(log[0]["loss"], rel=1e-6)
    assert {tensor.dtype for name, tensor in tensors.items() if name.startswith("model.blocks")} == {
        torch.float32, torch.int64
    }  # fmt: skip


@pytest.mark.parametrize(
    ("version", "together", "message"),
    [
        (1, True, "accelerate: expected --fsdp_version 2 beside --use_fsdp, got 1"),
        (2, False, "run.sync_batchnorm: expected true beside --use_fsdp"),
    ],
)
def test_sharding_that_would_give_other_numbers_is_refused(version, together, message):
    with pytest.raises(LrfdynError, match=message):
        keep_numbers(SimpleNamespace(fsdp_version=version), tiny(run={"sync_batchnorm": together}).run)
