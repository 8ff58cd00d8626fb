"""A run that takes a second: the smallest host on the digits, with everything on that has a state."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lrfdyn.files import read_json_lines
from lrfdyn.io.weights import list_checkpoints, read_checkpoint
from lrfdyn.training.config import TrainConfig
from lrfdyn.training.logs import Reporter
from lrfdyn.training.recipes import dump_yaml, merge, parse_config
from lrfdyn.training.run import run_training

TINY: dict[str, Any] = {
    "model": {
        "name": "spikformer_4_384",
        "attention": "lrf_dyn",
        "time_steps": 1,
        "drop_path": 0.2,
        "options": {"dim": 8, "depth": 2, "heads": 2, "mlp_ratio": 1, "pooling": [True, False, False, False]},
    },
    "data": {"name": "digits"},
    "augmentation": {"mixup": 0.5, "label_smoothing": 0.1},
    "optimizer": {"learning_rate": 0.005, "ema_decay": 0.9, "clip_norm": 1.0},
    "schedule": {"epochs": 2, "warmup_epochs": 1, "mix_epochs": 1},
    "run": {"batch_size": 128, "log_steps": 1, "checkpoint_steps": 4, "device": "cpu"},
}
STEPS = 22  # 2 epochs of 1,437 images in batches of 128
TIMES = ("images_per_s", "train_s", "wall_s", "timed_images", "train_seconds", "wall_seconds")


def tiny(**sections: dict[str, Any]) -> TrainConfig:
    return parse_config(merge(TINY, sections))


def write_recipe(path: Path, **sections: dict[str, Any]) -> Path:
    path.write_text(dump_yaml(merge(TINY, sections)), encoding="utf-8")
    return path


def train(config: TrainConfig, out: Path, **options: Any) -> dict[str, Any]:
    return run_training(config, out, recipe="tiny", **options)


def in_child(function: Callable[[], object]) -> int:
    """Runs in a forked process and returns the signal that ended it; 0 for a normal end."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            function()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def final_state(out: Path) -> tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]:
    """Tensors, JSON and log at the end of a run, without what a clock said."""
    tensors, meta = read_checkpoint(list_checkpoints(out / "checkpoints")[0])
    log = [{k: v for k, v in record.items() if k not in TIMES} for record in read_json_lines(out / "log.jsonl")]
    return tensors, {k: v for k, v in meta.items() if k not in TIMES}, log


def assert_same_end(out: Path, expected: Path, steps: int = STEPS) -> None:
    tensors, meta, log = final_state(out)
    other, other_meta, other_log = final_state(expected)
    assert meta["step"] == steps
    assert tensors.keys() == other.keys()
    for name, value in tensors.items():
        assert value.equal(other[name]), name
    assert meta == other_meta
    assert log == other_log


def torchrun(*arguments: str) -> str:
    return launch("torch.distributed.run", "--standalone", "--nproc_per_node", "2", *arguments)


def launch(module: str, *arguments: str) -> str:
    """What two processes say that `module` starts."""
    return ending(start(module, *arguments))


def start(module: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    usual = {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    given = {**os.environ, **usual, **environment}
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.Popen(
        command, env=given, text=True, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def ending(process: subprocess.Popen[str], code: int = 0) -> str:
    """What it says until its end."""
    try:
        output, _ = process.communicate(timeout=200)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)  # torchrun ends its processes, which have sessions of their own
        raise
    assert process.returncode == code, output
    return output


class Killer(Reporter):
    """kill -9, from inside, right after a step."""

    def __init__(self, step: int) -> None:
        self.at = step

    def step(self, trainer: Any) -> None:
        if trainer.done == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


class Listener(Reporter):
    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, message: str) -> None:
        self.said.append(message)
