"""A run that is told to end, by a clock or a signal, ends with a checkpoint and goes on as if it had not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from lrfdyn.cli import main
from lrfdyn.errors import LrfdynError
from lrfdyn.files import read_json_lines
from lrfdyn.io.weights import list_checkpoints
from lrfdyn.training.logs import Reporter
from lrfdyn.training.processes import TIME_IS_UP, Stop, Stopped, choose_threads
from tests.data.make import write_folder
from tests.training.runs import STEPS, assert_same_end, tiny, torchrun, train, write_recipe

RARELY = {"run": {"checkpoint_steps": 1000, "checkpoint_epochs": 5}}


class At(Stop):
    """The time is up once the given step is done."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.at, self.done = step, 0

    @property
    def reason(self) -> int:
        return TIME_IS_UP if self.done >= self.at else 0


class Clock(Reporter):
    def __init__(self, stop: At) -> None:
        self.stop = stop

    def step(self, trainer):
        self.stop.done = trainer.done


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("whole")
    train(tiny(**RARELY), out)
    return out


@pytest.mark.parametrize("step", [3, 11, 21])  # the 11th is the last of its epoch
def test_a_stop_loses_nothing(step, whole, tmp_path):
    stop = At(step)
    with pytest.raises(Stopped, match=f"stopped at step {step} of 22 .the time is up.; .* --resume auto") as stopped:
        train(tiny(**RARELY), tmp_path, stop=stop, reporter=Clock(stop))
    assert stopped.value.code == 0
    assert [p.name for p in list_checkpoints(tmp_path / "checkpoints")] == [f"step-{step:09d}.safetensors"]
    assert not (tmp_path / "summary.json").exists()
    train(tiny(**RARELY), tmp_path, resume="auto")
    assert_same_end(tmp_path, whole)


def test_a_stop_behind_the_last_step_is_too_late(whole, tmp_path):
    stop = At(STEPS)
    train(tiny(**RARELY), tmp_path, stop=stop, reporter=Clock(stop))
    assert_same_end(tmp_path, whole)


def test_signal_from_outside(whole, tmp_path):
    recipe, out = write_recipe(tmp_path / "tiny.yaml", **RARELY), tmp_path / "out"
    command = ["train", str(recipe), "--out", str(out), "--resume", "auto"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "lrfdyn", *command], env=environment, stdout=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 120
    while process.poll() is None and not read_json_lines(out / "log.jsonl"):
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=100)
    assert process.returncode == 128 + signal.SIGTERM
    assert "(SIGTERM); the same command with --resume auto goes on" in said
    assert list_checkpoints(out / "checkpoints")
    assert main(command) == 0  # here, since another process would take seconds to start
    assert_same_end(out, whole)


def test_ctrl_c_is_acknowledged_and_the_second_one_stops_now(capfd):
    stop = Stop()
    with pytest.raises(KeyboardInterrupt), stop.listening():  # noqa: PT012
        signal.raise_signal(signal.SIGINT)
        assert "finishing the step; press Ctrl-C again to stop now" in capfd.readouterr().err
        assert stop.reason == signal.SIGINT
        signal.raise_signal(signal.SIGINT)


def test_threads_on_a_cpu(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    for load, threads in ((0.2, 8), (5.1, 3), (30, 1)):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0, 0), raising=False)
        assert choose_threads(10**7) == threads
        assert choose_threads(10**5) == 1
    monkeypatch.undo()
    recipe, command = (
        write_recipe(tmp_path / "tiny.yaml"),
        ["train", "--minutes", "1e-9", "--out", str(tmp_path / "out")],
    )
    assert main([*command, str(recipe)]) == 0
    assert "threads" not in capsys.readouterr().out  # OMP_NUM_THREADS says how many
    monkeypatch.delenv("OMP_NUM_THREADS")
    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    assert main([*command, str(recipe), "--resume", "auto"]) == 0
    assert chosen[0] == 1  # for a network so small
    assert "1 of 1 threads (the variable OMP_NUM_THREADS sets others)" in capsys.readouterr().out


def test_workers_do_not_die_of_a_signal_to_all(tmp_path):
    """torchrun and schedulers signal every process of a run; it still needs the data of its last step."""
    pytest.importorskip("PIL")
    recipe = write_recipe(
        tmp_path / "tiny.yaml",
        model={"options": {"pooling": [True, True, False, False]}},
        data={
            "name": "imagenette",
            "root": str(write_folder(tmp_path / "images")),
            "image_size": 32,
            "options": {"workers": 2},
        },
        schedule={"epochs": 1000},
        run={"batch_size": 8, "checkpoint_steps": 100_000, "checkpoint_epochs": 1000},
    )
    out = tmp_path / "out"
    command = [sys.executable, "-m", "lrfdyn", "train", str(recipe), "--out", str(out)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True, start_new_session=True, **pipes
    )
    deadline = time.monotonic() + 120
    while process.poll() is None and len(read_json_lines(out / "log.jsonl")) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGTERM)
    said, _ = process.communicate(timeout=100)
    assert process.returncode == 128 + signal.SIGTERM, said
    assert len(list_checkpoints(out / "checkpoints")) == 1


def test_minutes_on_the_command_line(tmp_path, capsys):
    recipe, out = write_recipe(tmp_path / "tiny.yaml", **RARELY), tmp_path / "out"
    arguments = ["train", str(recipe), "--out", str(out), "--resume", "auto"]
    assert main([*arguments, "--minutes", "1e-9"]) == 0
    assert "stopped at step 1 of 22 (the time is up)" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert main([*arguments, "--minutes", "60"]) == 0
    assert (out / "summary.json").exists()
    assert main([*arguments, "--minutes", "0"]) == 2
    assert "minutes: expected a positive number, got 0.0" in capsys.readouterr().err


# Commands in the same two processes, since each would take seconds to start; they leave after the last.
COMMANDS = """
import sys
from pathlib import Path
from torch import distributed
from lrfdyn.training import processes

leave, processes.leave_together = processes.leave_together, lambda code=0: None
from lrfdyn.cli import main

recipe, out = sys.argv[1:]
train = ["train", recipe, "--out", out, "--resume", "auto"]
for command in ([*train, "--minutes", "1e-9"], train, ["evaluate", out]):
    assert main(command) == 0
    distributed.barrier()
    if distributed.get_rank() == 0:
        print("summary there:", (Path(out) / "summary.json").exists(), flush=True)
leave()
"""


def test_processes_stop_at_the_same_step(tmp_path):
    recipe, driver = write_recipe(tmp_path / "tiny.yaml", run={"log_steps": 2}), tmp_path / "driver.py"
    driver.write_text(COMMANDS)
    said = torchrun(str(driver), str(recipe), str(tmp_path / "out"))
    stopped, _, rest = said.partition("summary there: False\n")
    resumed, _, evaluated = rest.partition("summary there: True\n")
    assert "stopped at step 2 of 22" in stopped
    assert "resuming at step 2" in resumed
    assert evaluated.count("top-1") == 1, "one process speaks for all"


def test_one_run_at_a_time(tmp_path):
    class Second(Reporter):
        def step(self, trainer):
            if trainer.done == 2:
                with pytest.raises(LrfdynError, match="out: another process is using"):
                    train(tiny(), tmp_path, restart=True)
                seen.append(trainer.done)

    seen: list[int] = []
    train(tiny(), tmp_path, reporter=Second())
    assert seen == [2]
    train(tiny(), tmp_path, resume="auto")  # it is free again
